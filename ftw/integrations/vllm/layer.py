"""HostEmbeddingMethod: what vLLM asks a layer's rows of, with the rows in host memory; the layer stays vLLM's own.

    VocabParallelEmbedding     vLLM's class, its ranks, masks and all_reduce
    layer.quant_method         a HostEmbeddingMethod; it is given ids that are local to the rank's shard
    layer.weight               a parameter of no rows on the GPU, whose weight_loader fills the table in host memory
    state_dict()               has the table itself under the parameter's name

So nothing of the table is ever in VRAM: a reload, which makes each parameter of a layer anew on the GPU, makes one of
no rows there.
"""

from __future__ import annotations

import contextlib
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from ftw.errors import FtwError, NotEligibleError, printable
from ftw.lookup import HostTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftw.lookup import HostEmbedding

    # Takes a layer, its prefix, and its method if that is not the plain one; returns what looks its rows up, or None.
    Choose = Callable[[Any, str, Any], "HostEmbeddingMethod | None"]

_CLASS = "VocabParallelEmbedding"
_PLAIN = UnquantizedEmbeddingMethod  # the method of rows that are looked up as they lie


class HostEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Looks rows of one layer up in host memory.

    Attributes:
        name: The layer's path, for messages.
        stored_as: The tensors of the checkpoint that hold the table.
        dtype: Of the table; None before it is made.
        rows: Looks them up; None until the weights are loaded.
    """

    def __init__(self, name: str, stored_as: tuple[str, ...], device: torch.device) -> None:
        self.name = name
        self.stored_as = stored_as
        self.dtype: torch.dtype | None = None
        self.rows: HostEmbedding | None = None
        self._device = device
        self._table: HostTable | None = None

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,  # noqa: ARG002
        output_size: int,  # noqa: ARG002
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Take memory for this rank's rows, and give the layer a parameter that stands for them."""
        columns = input_size_per_partition
        self.dtype = params_dtype
        self._table = HostTable(
            sum(output_partition_sizes), columns, dtype=params_dtype, name=self.name, device=self._device
        )
        weight = nn.Parameter(torch.empty(0, columns, dtype=params_dtype, device=self._device), requires_grad=False)
        # A bound method, as vLLM's own loader is, lets vLLM drop the layer from what it keeps for a reload.
        attributes = {**extra_weight_attrs, "input_dim": 1, "output_dim": 0, "weight_loader": MethodType(_load, layer)}
        for name, value in attributes.items():
            setattr(weight, name, value)
        layer.register_parameter("weight", weight)
        layer.register_state_dict_post_hook(_show_table)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave the rows as they are."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Refuse to be an LM head.

        Raises:
            NotEligibleError: Always.
        """
        problem = "is read as an LM head, which needs the whole table at every step"
        raise NotEligibleError(f"{printable(self.name)}: table: {problem}; embed 'gpu' or 'auto' leaves it on the GPU")

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return the rows of ids that are local to this rank's shard."""
        if self.rows is None:
            raise FtwError(f"{printable(self.name)}: table: its weights are not loaded yet")
        rows: torch.Tensor = self.rows(input_)
        return rows

    @contextlib.contextmanager
    def filling(self) -> Iterator[torch.Tensor]:
        """Give the table to be filled, or filled anew: `[rows of the shard with padding, columns]`."""
        if self.rows is not None:
            with self.rows.refill() as rows:
                yield rows
        elif self._table is not None:
            yield self._table.rows

    def finish(self, *, hot_bytes: int | None, handle: str, max_ids: int) -> HostEmbedding:
        """Page-lock the table, and compile what lookups of up to `max_ids` ids run; the first time it is loaded."""
        if self.rows is None:
            if self._table is None:
                raise FtwError(f"{printable(self.name)}: table: its layer was not made")
            self._table.name = self.name
            self.rows = self._table.finish(hot_bytes=hot_bytes, handle=handle)
            self.rows.warm_up(max_ids, dtypes=(torch.int64,))  # vLLM's layer casts ids to it
        return self.rows

    def discard(self) -> None:
        """Give the memory back; the table is not looked up."""
        if self._table is not None:
            self._table.close()

    @property
    def table(self) -> torch.Tensor:
        """The table, filled or not."""
        if self.rows is not None:
            return self.rows.table
        if self._table is None:
            raise FtwError(f"{printable(self.name)}: table: its layer was not made")
        return self._table.rows


@contextlib.contextmanager
def replaced_layers(choose: Choose) -> Iterator[None]:
    """Give layers that are made meanwhile the methods that `choose(layer, prefix, method)` returns.

    Raises:
        FtwError: Another plug-in has replaced the layer.
    """
    if _CLASS in op_registry_oot:
        problem = f"has been replaced by {op_registry_oot[_CLASS].__name__} of another plug-in"
        raise FtwError(f"vllm: {_CLASS}: {problem}; ftw goes with vLLM's own")
    PluggableLayer.register_oot(_make_layer_class(choose), name=_CLASS)
    try:
        yield
    finally:
        del op_registry_oot[_CLASS]


def restore(layer: Any) -> None:
    """Make the rows of a layer a parameter on the current default device again, as vLLM does, for all that hold it."""
    method: Any = layer.quant_method
    layer.quant_method = _PLAIN()
    layer.quant_method.create_weights(
        layer,
        layer.embedding_dim,
        [layer.num_embeddings_per_partition],
        layer.embedding_dim,
        layer.num_embeddings_padded,
        params_dtype=layer.params_dtype,
        weight_loader=layer.weight_loader,
    )
    method.discard()


def _make_layer_class(choose: Choose) -> type:
    class Layer(VocabParallelEmbedding):  # type: ignore[misc]
        """Becomes an instance of vLLM's own class while it is made, so that all that asks for that finds it."""

        def __init__(
            self,
            num_embeddings: int,
            embedding_dim: int,
            params_dtype: torch.dtype | None = None,
            org_num_embeddings: int | None = None,
            padding_size: int = 64,
            quant_config: Any = None,
            prefix: str = "",
        ) -> None:
            self.__class__ = VocabParallelEmbedding
            VocabParallelEmbedding.__init__(
                self,
                num_embeddings,
                embedding_dim,
                params_dtype,
                org_num_embeddings,
                padding_size,
                _Chooser(choose, quant_config),
                prefix,
            )

    return Layer


class _Chooser:
    """Stands for vLLM's quantization config while a layer asks for its method."""

    def __init__(self, choose: Choose, quant_config: Any) -> None:
        self._choose = choose
        self._quant_config = quant_config

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of a layer: ours, or what vLLM's config says."""
        own = None if self._quant_config is None else self._quant_config.get_quant_method(layer, prefix=prefix)
        is_plain = own is None or type(own) is _PLAIN
        return self._choose(layer, prefix, None if is_plain else own) or own


def _load(layer: nn.Module, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """Fill a layer's table as vLLM fills the parameter that it would have; of `param` no row is there."""
    del param
    method: Any = layer.quant_method
    loader: Callable[..., None] = layer.weight_loader  # type: ignore[assignment]
    with method.filling() as rows:
        stand_in = nn.Parameter(rows, requires_grad=False)
        stand_in.output_dim = 0  # type: ignore[attr-defined]
        loader(stand_in, loaded_weight)


def _show_table(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:  # noqa: ARG001
    method: Any = module.quant_method
    if isinstance(method, HostEmbeddingMethod):
        state_dict[f"{prefix}weight"] = method.table
