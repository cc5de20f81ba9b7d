"""Which modules of a model hold its lookup tables, and how all of them leave the GPU.

token, per-layer and n-gram embeddings, by their names         move, whatever their size
positions, segments, times, codebooks and such, by their names stay: they are read at every step, or as a whole
other embeddings of at least a MiB that only look rows up      move
the rest                                                       stays

A table that several modules hold to look rows up in the same way moves for all of them, as an encoder's of a T5 does,
if each place is called like a lookup table: a module that stands for the LM head too is one that the head reads.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ftw.checkpoint import (
    MOVED_ROLES,
    TOKEN_EMBEDDING,
    StoredModule,
    find_other_tables,
    find_token_embeddings,
    is_position_like,
)
from ftw.errors import NotEligibleError, printable
from ftw.lookup import HostEmbedding, RowOptions
from ftw.offloading.offloader import check_room, plan_offload, run_offload
from ftw.offloading.table_modules import find_table, is_table_module
from ftw.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import nn

    from ftw.offloading.offloader import OffloadPlan

    # Makes what takes a module's place of what looks its rows up; the second argument is the size of the hot rows.
    Wrap = Callable[["ModelTable", int | None, HostEmbedding], HostEmbedding]

_MIN_NBYTES = 1 << 20  # of a table whose name tells nothing


class ModelTable(NamedTuple):
    """A module that holds a lookup table.

    Attributes:
        path: Its path in the model.
        module: Itself.
        role: The table's; empty where the name does not tell.
        places: All paths in the model at which it stands, or another module that looks the same table up alike.
        readers: It and these modules, with the number of places of each.
    """

    path: str
    module: nn.Module
    role: str
    places: tuple[str, ...]
    readers: Mapping[nn.Module, int]


@dataclass(frozen=True, slots=True)
class OffloadedModel:
    """What became of the lookup tables of a model.

    Attributes:
        tables: Those that left the GPU, by the path of their module, whose place they have taken.
        left: Why others stay, by the path of their module.
    """

    tables: Mapping[str, HostEmbedding]
    left: Mapping[str, str]

    @property
    def freed_bytes(self) -> int:
        """VRAM that came back, by the driver's count."""
        return sum(table.memory.freed_bytes for table in self.tables.values() if table.memory is not None)

    def close(self) -> None:
        """Give the host memory of all tables back; the model cannot look tokens up any more."""
        with contextlib.ExitStack() as stack:  # whatever one of them runs into, the others are closed
            for table in self.tables.values():
                stack.callback(table.close)


def find_model_tables(model: nn.Module) -> list[ModelTable]:
    """Return the lookup tables of a model, each once with all modules that look it up alike, in its order."""
    modules = {path: module for path, module in model.named_modules() if path and is_table_module(module)}
    tokens = {found.path for found in find_token_embeddings([f"{path}.weight" for path in modules])}
    tables: list[ModelTable] = []
    for path, module in modules.items():
        role = TOKEN_EMBEDDING if path in tokens else _other_role(path)
        places = (path, *(place for place in _places_of(model, module) if place != path and _is_lookup_place(place)))
        own = ModelTable(path, module, role, places, {module: len(places)})
        alike = (number for number, table in enumerate(tables) if _look_up_alike(table.module, module))
        number = next(alike, None) if role in MOVED_ROLES else None
        if number is None or tables[number].role not in MOVED_ROLES:
            tables.append(own)
        else:
            tables[number] = _joined(tables[number], own)
    return tables


def _places_of(model: nn.Module, module: nn.Module) -> list[str]:
    """Return every path at which a module stands in a model."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, parent in model.named_modules()
        for name, child in parent._modules.items()
        if child is module
    ]


def _is_lookup_place(path: str) -> bool:
    return bool(find_token_embeddings([f"{path}.weight"])) or _other_role(path) in MOVED_ROLES


def _look_up_alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules look rows up in the very same tensor, and do the same with them."""
    weight = one._parameters.get("weight")
    if weight is None or weight is not other._parameters.get("weight") or type(one) is not type(other):
        return False
    buffers = (one._buffers, other._buffers)
    are_alike = buffers[0].keys() == buffers[1].keys() and all(
        _is_equal(buffer, buffers[1][name]) for name, buffer in buffers[0].items()
    )
    return are_alike and _plain_values(one) == _plain_values(other)


def _is_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and one.equal(other))


def _plain_values(module: nn.Module) -> dict[str, object]:
    """Return what may tell how a module looks rows up, as a scale does; where padding is matters to gradients alone."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and name not in ("training", "padding_idx")
    }


def _joined(table: ModelTable, other: ModelTable) -> ModelTable:
    role = table.role or other.role
    return table._replace(role=role, places=(*table.places, *other.places), readers={**table.readers, **other.readers})


def offload_tables(
    model: nn.Module,
    tables: list[ModelTable],
    *,
    device: torch.device | str | None,
    max_pinned_bytes: int | None,
    hot_bytes: int | None,
    strict: bool,
    is_scaled: Callable[[nn.Module], bool] | None = None,
    wrap: Wrap | None = None,
    why_kept: Callable[[ModelTable], str] | None = None,
) -> OffloadedModel:
    """Move tables of a model to host memory and put what looks them up into their modules' places.

    All are checked before the first one moves. One that the driver then refuses to page-lock ends the work: tables that
    have moved before stay moved, in a model that works.

    Args:
        model: What they are of.
        tables: What `find_model_tables` found, in this order.
        device: Whose kernels read them; None for each table's own.
        max_pinned_bytes: Page-locked bytes that they may bring the process to.
        hot_bytes: Of the hot rows of a token embedding.
        strict: Refuse a model of which a table that should move may not, instead of leaving that table.
        is_scaled: Whether a module scales its rows, which `wrap` takes care of; None where none does.
        wrap: Makes what takes a module's place; None for what looks its rows up.
        why_kept: Says why a table that should move may not, empty where it may; None where nothing is known of that.

    Raises:
        NotEligibleError: A table may not move, or there is none.
        PinError: They don't fit into host memory or the limit, or the driver refused.
    """
    plans: dict[str, OffloadPlan] = {}
    left = _tables_on_host(model)
    for table in tables:
        reason = _why_staying(table, is_scaled)
        if reason:
            left[table.path] = reason
            continue
        hot = hot_bytes if wrap is None and table.role == TOKEN_EMBEDDING else None
        try:
            _check_may_move(table, why_kept)
            parameter = _parameter_of(table, is_scaled)
            plan = plan_offload(
                table.module, RowOptions(hot_bytes=hot), parameter=parameter, device=device, readers=table.readers
            )
            _check_is_whole(table, plan)
            plans[table.path] = plan
        except NotEligibleError as error:
            if strict:
                raise
            left[table.path] = str(error)
    if not plans and strict:
        raise NotEligibleError(_no_table(model, left))
    check_room(plans.values(), max_pinned_bytes)
    moved: dict[str, HostEmbedding] = {}
    for table in tables:
        if table.path in plans:
            hot = hot_bytes if table.role == TOKEN_EMBEDDING else None
            embedding = run_offload(plans[table.path], wrap and partial(wrap, table, hot))
            for place in table.places:
                replace_module(model, place, embedding)
            moved[table.path] = embedding
    return OffloadedModel(moved, left)


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module into the place that a path tells."""
    parent, _, name = path.rpartition(".")
    module.train(model.get_submodule(path).training)
    setattr(model.get_submodule(parent), name, module)


def _tables_on_host(model: nn.Module) -> dict[str, str]:
    """Return why tables stay that have left the GPU before."""
    paths = [path for path, module in model.named_modules() if path and isinstance(module, HostEmbedding)]
    return {path: f"{printable(path)}: table: has been offloaded already" for path in paths}


def _check_may_move(table: ModelTable, why_kept: Callable[[ModelTable], str] | None) -> None:
    problem = why_kept(table) if why_kept else ""
    if problem:
        raise NotEligibleError(f"{printable(table.path)}: table: {problem}")


def _check_is_whole(table: ModelTable, plan: OffloadPlan) -> None:
    """Check that no ranks have to sum what a lookup returns, as nobody would in the module's place."""
    num_ids = getattr(table.module, "org_vocab_size", None)
    if plan.options.vocab_range not in (None, (0, num_ids)):
        start, length = plan.options.vocab_range or (0, 0)
        problem = f"holds the ids {start} to {start + length - 1} of {num_ids}, and its forward sums over the ranks"
        advice = "offload the module itself, and sum yourself"
        raise NotEligibleError(f"{printable(plan.name)}: module: {problem}; {advice}")


def _other_role(path: str) -> str:
    """Return the role of a module that is no token embedding; of a tower of other senses, too."""
    beside = StoredModule(f"{path.rpartition('.')[0]}.", {})
    return next((role for role, _ in find_other_tables([f"{path}.weight"], [beside])), "")


def _why_staying(table: ModelTable, is_scaled: Callable[[nn.Module], bool] | None) -> str:
    """Return why a table should not move at all; empty where it should, if it may."""
    subject = printable(table.path)
    if table.role in MOVED_ROLES:
        return ""
    if table.role:
        return f"{subject}: table: is a {table.role.replace('_', ' ')}, which is read at every step"
    if is_position_like(table.path):
        return f"{subject}: table: is by its name one of positions, kinds or codes, which is read at every step"
    try:
        tensor = find_table(table.module, _parameter_of(table, is_scaled), subject).tensor
    except NotEligibleError as error:
        return str(error)
    if tensor.nbytes < _MIN_NBYTES:
        return f"{subject}: table: has {format_size(tensor.nbytes)}, less than the {format_size(_MIN_NBYTES)} that move"
    return ""


def _parameter_of(table: ModelTable, is_scaled: Callable[[nn.Module], bool] | None) -> str | None:
    """Return which parameter is the table of a module that scales its rows; None where it only looks them up."""
    return "weight" if is_scaled is not None and is_scaled(table.module) else None


def _no_table(model: nn.Module, left: Mapping[str, str]) -> str:
    count = f"{len(left)} embeddings stay, such as" if len(left) > 1 else "its one embedding stays:"
    found = f"{count} {next(iter(left.values()))}" if left else "it holds no nn.Embedding or VocabParallelEmbedding"
    return f"{type(model).__name__}: tables: none to move: {found}"
