"""TransformersEmbedding: a HostEmbedding in the place of an embedding of a transformers model.

forward(ids)        rows, scaled as the module did that it replaces
weight              tells dtype, shape, and the model's device; `weight[id]` is an unscaled row there
state_dict()        holds the table under its own name, not copied
load_state_dict()   takes equal bytes alone
"""

from __future__ import annotations

import contextlib
import types
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ftw.errors import FtwError, NotEligibleError, printable
from ftw.integrations.transformers.weight_proxy import ON_GPU, WeightProxy
from ftw.lookup import HostEmbedding, RowOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_SCALED = "ScaledWordEmbedding"  # ends the names of transformers' classes that multiply rows by `embed_scale`
_SCALING = frozenset("super forward embed_scale to weight dtype".split())  # all that their forward names


class TransformersEmbedding(HostEmbedding):
    """Looks up rows as the module does that it replaces.

    Attributes:
        padding_idx: That module's; it has no effect on a lookup.
    """

    def __init__(
        self,
        host: HostEmbedding,
        *,
        device: torch.device,
        scale: float | None = None,
        hot_bytes: int | None = None,
        padding_idx: int | None = None,
    ) -> None:
        """Wrap a table.

        Args:
            host: Looks up its rows as they are stored, and owns the memory; a close here closes it.
            device: Where the model is.
            scale: Multiplies rows.
            hot_bytes: Size of the hot rows.
            padding_idx: That of the module replaced.
        """
        own = RowOptions(scale=scale, hot_bytes=hot_bytes, num_slices=host.num_slices)
        super().__init__(host.table, name=host.name, device=device, **own._asdict())
        self.memory = host.memory
        self.padding_idx = padding_idx
        self._host = (host,)  # a tuple, so that it is no submodule
        # Goes where the model goes, which the table doesn't.
        self.register_buffer("_place", torch.empty(0, device=device), persistent=False)

    @property
    def weight(self) -> WeightProxy:
        """What models and libraries ask an embedding's weight for; `table` is the tensor itself.

        Raises:
            ClosedError: The memory has been given back.
        """
        place: torch.Tensor = self._buffers["_place"]  # type: ignore[assignment]
        return WeightProxy(self._host[0], place.device)

    @property
    def pinned_nbytes(self) -> int:
        """Page-locked bytes: the table's, rounded up to whole pages; 0 on a CPU-only machine."""
        return self._host[0].pinned_nbytes

    @contextlib.contextmanager
    def refill(self) -> Iterator[torch.Tensor]:
        """Give the table to be written anew; see `HostEmbedding.refill`."""
        with self._host[0].refill(), super().refill() as rows:
            yield rows

    def close(self) -> None:
        """Give the memory back, once the device has finished; see `HostEmbedding.close`."""
        try:
            super().close()
        finally:
            self._host[0].close()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.table

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],  # noqa: ARG002
        strict: bool,  # noqa: ARG002
        missing_keys: list[str],
        unexpected_keys: list[str],  # noqa: ARG002
        error_msgs: list[str],
    ) -> None:
        """Compare what would be written, cast as it is then: processes may share the table, hot rows are copies."""
        name = f"{prefix}weight"
        given = state_dict.get(name)
        if given is None:
            missing_keys.append(name)
        elif not _is_same(given.to(self.table), self.table):
            problem = "found other bytes than those in host memory, which stay; equal ones are allowed"
            error_msgs.append(f"{printable(self.name)}: table: {problem}; {ON_GPU} to replace it")


def _is_same(given: torch.Tensor, table: torch.Tensor) -> bool:
    """Compare bits, which NaN and -0.0 have, too."""
    return given.shape == table.shape and torch.equal(given.contiguous().view(torch.uint8), table.view(torch.uint8))


def make_replacement(
    module: nn.Module, host: HostEmbedding, device: torch.device, hot_bytes: int | None
) -> TransformersEmbedding:
    """Return what looks rows up as a module does, whose table `host` holds, in a model that is on this device."""
    return TransformersEmbedding(
        host,
        device=device,
        scale=scale_of(module, host.table.dtype, host.name),
        hot_bytes=hot_bytes,
        padding_idx=getattr(module, "padding_idx", None),
    )


def scale_of(module: nn.Module, dtype: torch.dtype, name: str) -> float | None:
    """Return what a module multiplies rows of this dtype by; None for nothing that is known.

    Raises:
        NotEligibleError: It does so in another way than lookups do, which round the scale to the rows' dtype first.
    """
    kind = type(module)
    if not kind.__name__.endswith(_SCALED) or not kind.__module__.startswith("transformers.models."):
        return None
    code: Any = getattr(kind.forward, "__code__", None)
    if code is None or not _SCALING.issuperset(code.co_names):
        return None  # T5Gemma2's has a vector of its own for one token
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return None  # it does more than its class
    scale: Any = module.embed_scale
    if isinstance(scale, torch.Tensor):
        return float(scale.to(dtype))
    if dtype != torch.float32 and float(torch.tensor(scale, dtype=dtype)) != scale:
        problem = f"multiplies rows by {scale}, which {dtype} does not hold; float32 is allowed"
        raise NotEligibleError(f"{printable(name)}: module: {problem}")
    return float(scale)


def weight_of(module: nn.Module) -> torch.Tensor:
    """Return the weight of an embedding."""
    weight: Any = module.weight
    return weight  # type: ignore[no-any-return]


def input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Return where a model looks its inputs up; None for a tower that looks nothing up."""
    try:
        found: nn.Module | None = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return found


def guard_tables(model: nn.Module) -> None:
    """Let no model in this one resize a table in host memory, or tie a head to it."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and isinstance(input_embeddings(module), TransformersEmbedding):
            for name, guard in (("resize_token_embeddings", _resize), ("tie_weights", _tie_weights)):
                # On the instance, as its class is transformers' own; a bound method, so that copies bind theirs.
                object.__setattr__(module, name, types.MethodType(guard, module))


def _resize(model: PreTrainedModel, new_num_tokens: int | None = None, *args: Any, **options: Any) -> Any:
    """Stand before transformers' own method: a size that is there already passes."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, TransformersEmbedding):  # another one has been set since
        return type(model).resize_token_embeddings(model, new_num_tokens, *args, **options)
    rows = embedding.num_embeddings
    wanted = rows if new_num_tokens is None else new_num_tokens
    multiple = options.get("pad_to_multiple_of", args[0] if args else None)
    if multiple:
        wanted = -(-wanted // multiple) * multiple
    if wanted != rows:
        problem = f"{wanted} rows were asked for, but in host memory it keeps its {rows}"
        raise FtwError(f"{printable(embedding.name)}: table: {problem}; {ON_GPU} to resize it")
    return embedding


def _tie_weights(model: PreTrainedModel, *args: Any, **options: Any) -> None:
    """Stand before transformers' own method, which assigns what stands for the weight where a parameter is needed."""
    try:
        type(model).tie_weights(model, *args, **options)
    except (AttributeError, TypeError) as error:
        embedding = model.get_input_embeddings()
        if not isinstance(embedding, TransformersEmbedding):
            raise
        problem = "is in host memory, so nothing can be tied to it"
        raise FtwError(f"{printable(embedding.name)}: table: {problem}; {ON_GPU} to tie it") from error
