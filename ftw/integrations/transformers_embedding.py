"""TransformersEmbedding: a HostEmbedding in the place of an embedding of a transformers model.

forward(ids)        rows, scaled as the module did that it replaces
weight              tells dtype, shape, and the model's device; `weight[id]` is an unscaled row there
state_dict()        holds the table under its own name, not copied
load_state_dict()   takes equal bytes alone
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import PreTrainedModel

from ftw.embedding import HostEmbedding
from ftw.errors import FtwError, NotEligibleError, printable

if TYPE_CHECKING:
    from torch import nn

_ON_GPU = "load the model with embed='gpu'"
_SCALED = "ScaledWordEmbedding"  # ends the names of transformers' classes that multiply rows by `embed_scale`
_SCALING = frozenset(
    "super forward embed_scale to weight dtype".split()
)  # all that a forward names which does just that


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
        hot_bytes: int | str | None = None,
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
        own: dict[str, Any] = {"scale": scale, "hot_bytes": hot_bytes, "num_slices": host.num_slices}
        super().__init__(host.table, name=host.name, device=device, **own)
        self.memory = host.memory
        self.padding_idx = padding_idx
        self._host = (host,)  # a tuple, so that it is no submodule
        # Goes where the model goes, which the table doesn't.
        self.register_buffer("_place", torch.empty(0, device=device), persistent=False)

    @property
    def weight(self) -> HostWeight:
        """What models and libraries ask an embedding's weight for; `table` is the tensor itself.

        Raises:
            ClosedError: The memory has been given back.
        """
        place: torch.Tensor = self._buffers["_place"]  # type: ignore[assignment]
        return HostWeight(self._host[0], place.device)

    @property
    def pinned_nbytes(self) -> int:
        """Page-locked bytes: the table's, rounded up to whole pages; 0 on a CPU-only machine."""
        return self._host[0].pinned_nbytes

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
            error_msgs.append(f"{printable(self.name)}: table: {problem}; {_ON_GPU} to replace it")


class HostWeight:
    """Stands for the weight of an embedding whose table is in host memory; it is no tensor, and no operand of one.

    Attributes:
        device: Where the model is, and rows are put.
        dtype: Of the table.
        shape: Of the table, `[rows, columns]`.
        ndim: 2.
        nbytes: Of the table.
        grad: None.
        is_meta: Whether the model is on the meta device.
        is_cuda: Whether it is on a GPU.
    """

    grad = None

    def __init__(self, host: HostEmbedding, device: torch.device) -> None:
        self.device = device
        self.dtype = host.table.dtype
        self.shape = host.table.shape
        self.ndim = host.table.ndim
        self.nbytes = host.table.nbytes
        self.is_meta = device.type == "meta"
        self.is_cuda = device.type == "cuda"
        self._host = host

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        given += [item for several in given if isinstance(several, (list, tuple)) for item in several]  # of torch.cat
        found = (item for item in given if isinstance(item, HostWeight))
        name = getattr(func, "__name__", str(func))
        raise TypeError(f"{next(found, cls)}, where {name} reads no weight; table is the tensor, or {_ON_GPU}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self}, what stands for its weight has no {name!r}; table is the tensor, or {_ON_GPU}")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(f"{self}, and stays as it is; {_ON_GPU} to change it")

    def __matmul__(self, other: Any) -> NoReturn:
        self.__torch_function__(torch.matmul, (), (self, other))

    __rmatmul__ = __matmul__  # torch takes what its own operator raises for "ask the other side"

    def __str__(self) -> str:
        # Without _host, as where the constructor has failed, __getattr__ would come here again and again.
        host = vars(self).get("_host")
        return f"{printable(host.name) if host is not None else 'table'}: table: is in host memory"

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def data(self) -> torch.Tensor:
        """The table, in host memory; what is written there is written for all that share it, and not for hot rows."""
        return self._host.table

    @property
    def requires_grad(self) -> bool:
        """False; nothing else can be set."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> HostWeight:
        """Take False alone, as a table in host memory is not trained."""
        if requires_grad:
            raise TypeError(f"{self}, and is not trained; {_ON_GPU} to train it")
        return self

    def detach(self) -> HostWeight:
        """Return itself, which no graph of autograd holds."""
        return self

    def dim(self) -> int:
        """Return 2."""
        return self.ndim

    def is_floating_point(self) -> bool:
        """Tell that of the table's dtype."""
        return self.dtype.is_floating_point

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return self.dtype.itemsize

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the row of an id, looked up on the model's device; of all else a part of the table in host memory."""
        row = index[0] if isinstance(index, tuple) and index[1:] == (slice(None),) else index
        if isinstance(row, int) and 0 <= row < self.shape[0]:
            rows: torch.Tensor = self._host(torch.full((1,), row, device=self.device))
            return rows[0]
        return self._host.table[index]


def _is_same(given: torch.Tensor, table: torch.Tensor) -> bool:
    """Compare bits, which NaN and -0.0 have, too."""
    return given.shape == table.shape and torch.equal(given.contiguous().view(torch.uint8), table.view(torch.uint8))


def take_place(
    module: nn.Module, host: HostEmbedding, device: torch.device, hot_bytes: int | str | None
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
        raise FtwError(f"{printable(embedding.name)}: table: {problem}; {_ON_GPU} to resize it")
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
        raise FtwError(f"{printable(embedding.name)}: table: {problem}; {_ON_GPU} to tie it") from error
