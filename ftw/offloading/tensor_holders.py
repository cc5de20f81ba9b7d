"""Who else holds a tensor's memory: modules and tensors that are alive, found among what the garbage collector tracks.

    the same object, registered in another module      a tied LM head, as transformers and vLLM make it
    the same module, registered in a second place      a tied LM head, as SGLang makes it
    the module or a method of it, kept in another      a list or an attribute that is read instead of the module's place
    another tensor over the same memory                a detached alias, a view, an entry of a state dict

What C++ alone holds, such as a graph of autograd, is not found here; it shows when the memory should be gone.
"""

from __future__ import annotations

import contextlib
import gc
from types import MethodType
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import torch
from torch import nn

from ftw.checkpoint import find_token_embeddings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_Kind = TypeVar("_Kind")
_PYTHONS_OWN = 10_000  # Python 3.12 freezes some of its own objects when it starts; an engine has hundreds of thousands


class Place(NamedTuple):
    """Where a tensor or a module stands: its path, and the class of the module that the path begins at."""

    path: str
    root: str

    def __str__(self) -> str:
        return f"{self.path} of {self.root}"


class Span(NamedTuple):
    """Memory: a device, and the first and the last address in it, the last one not included."""

    device: torch.device
    start: int
    stop: int


def place_of(module: nn.Module, attribute: str) -> Place:
    """Return where an attribute of a module stands in the largest module that is alive."""
    with _thawed():
        return _Live().place(module, attribute)


def find_holder(tensor: torch.Tensor, owners: Mapping[nn.Module, int]) -> str | None:
    """Return who else holds a tensor's memory, in words, or None where nobody does.

    The tensor itself, wherever else than in a module it is kept, and its registration in `owners` do not count, nor do
    these modules in as many places as are told.
    """
    with _thawed():
        if _find_holder(tensor, owners) is None:
            return None
        gc.collect()  # what was found may be garbage that waits for being collected
        return _find_holder(tensor, owners)


def span_of(tensor: torch.Tensor) -> Span | None:
    """Return the whole memory that a tensor keeps alive; None where it has none of its own."""
    with torch._C.DisableTorchFunctionSubclass():  # nobody's subclass shall compute anything
        if tensor.layout is not torch.strided:
            return None
        try:
            storage = tensor.untyped_storage()
            if storage.device.type == "meta":  # a fake tensor's too, whatever device it tells
                return None
            start = storage.data_ptr()
        except (NotImplementedError, RuntimeError):  # a wrapper around other tensors, which are looked at themselves
            return None
        return Span(storage.device, start, start + storage.nbytes()) if start and storage.nbytes() else None


def _find_holder(tensor: torch.Tensor, owners: Mapping[nn.Module, int]) -> str | None:
    live, span = _Live(), span_of(tensor)
    aliases = [other for other in live.tensors if other is not tensor and _overlap(span_of(other), span)]
    wanted, own = {id(tensor), *map(id, aliases)}, {id(owner) for owner in owners}
    for module in live.modules:
        for name, value in _tensors_in(module):
            if id(value) in wanted and not (id(module) in own and value is tensor):
                return str(live.place(module, name))
            if any(module is not owner and _leads_to(value, owner) for owner in owners):
                return str(live.place(module, name))
    for owner, num_places in owners.items():
        if len(live.parents.get(id(owner), [])) > num_places:
            return " and ".join(str(live.place(parent, name)) for parent, name in live.parents[id(owner)])
    return _describe(aliases[0]) if aliases else None


class _Live:
    """The modules and tensors that are alive, and which modules stand in which."""

    def __init__(self) -> None:
        objects = gc.get_objects()
        self.modules = _of_type(objects, nn.Module)
        self.tensors = _of_type(objects, torch.Tensor)
        self.parents: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.modules:
            for name, child in list(vars(module).get("_modules", {}).items()):
                self.parents.setdefault(id(child), []).append((module, name))

    def place(self, module: nn.Module, attribute: str) -> Place:
        """Climb from a module to a root."""
        names, seen = [attribute], {id(module)}
        while True:
            above = [entry for entry in self.parents.get(id(module), []) if id(entry[0]) not in seen]
            # One that is both stands under two names, and a user knows the embedding, not the LM head.
            parent, name = next((entry for entry in above if _is_embedding(entry[1])), (*above, (None, ""))[0])
            if parent is None:
                return Place(".".join(reversed(names)), type(module).__name__)
            names.append(name)
            seen.add(id(parent))
            module = parent


@contextlib.contextmanager
def _thawed() -> Iterator[None]:
    """Let the collector see what has been frozen: engines freeze all that they have once they are warm.

    Where that was done, it is done again, and so for all that has been made since.
    """
    is_frozen = gc.get_freeze_count() > _PYTHONS_OWN
    gc.unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            gc.collect()  # frozen garbage would never go
            gc.freeze()


def _is_embedding(name: str) -> bool:
    return bool(find_token_embeddings([f"{name}.weight"]))


def _of_type(objects: list[object], kind: type[_Kind]) -> list[_Kind]:
    """Pick by type(), since isinstance() asks an object for its class, which wakes lazy modules and dead proxies."""
    return cast("list[_Kind]", [item for item in objects if issubclass(type(item), kind)])


def _tensors_in(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield a module's parameters, buffers and other attributes, and what stands in its lists and dicts."""
    attributes = vars(module)
    for entries in ("_parameters", "_buffers"):
        yield from list(attributes.get(entries, {}).items())
    for name, value in list(attributes.items()):
        if issubclass(type(value), (list, tuple)):
            yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
        elif issubclass(type(value), dict) and name not in ("_parameters", "_buffers", "_modules"):
            yield from ((f"{name}[{key!r}]", item) for key, item in list(value.items()))
        else:
            yield name, value


def _leads_to(value: object, module: nn.Module) -> bool:
    """Return whether a value is a module or a method of it."""
    return value is module or (type(value) is MethodType and value.__self__ is module)


def _overlap(one: Span | None, other: Span | None) -> bool:
    if one is None or other is None or one.device != other.device:
        return False
    return one.start < other.stop and other.start < one.stop


def _describe(alias: torch.Tensor) -> str:
    """Say what is known of a tensor that stands in no module."""
    for referrer in gc.get_referrers(alias):
        if issubclass(type(referrer), dict):
            for key, value in list(referrer.items()):
                if value is alias:
                    return f"another tensor {list(alias.shape)}, kept as {key!r}"
    return f"another tensor {list(alias.shape)}"
