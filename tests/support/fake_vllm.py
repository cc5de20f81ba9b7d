"""vLLM 0.26.0 as far as the plug-in sees it: its classes with their signatures and their ways, without its engine.

`test_vllm_real.py` compares the signatures with those of the vLLM that is installed, where one is.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

VERSION = "0.26.0"
_OWN = ("hooks", "layer", "loader", "log_line", "model_load", "steps", "weights")  # modules that take vLLM's classes


@dataclass
class World:
    """Ranks, which a test sets."""

    tp_rank: int = 0
    tp_size: int = 1
    is_first_rank: bool = True
    sums: list[torch.Tensor] = field(default_factory=list)  # what was handed to the all_reduce


def padded(count: int, to: int) -> int:
    return -(-count // to) * to


def make_classes(world: World) -> dict[str, Any]:
    registry: dict[str, type] = {}

    class PluggableLayer(nn.Module):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__new__(registry.get(cls.__name__, cls))

        @classmethod
        def register_oot(cls, _decorated_layer_cls: Any = None, name: str | None = None) -> Any:
            assert _decorated_layer_cls is not None, "the form that the plug-in uses"
            assert name is not None
            assert name not in registry, f"Duplicate layer name: {name}"
            registry[name] = _decorated_layer_cls
            return _decorated_layer_cls

    class QuantizeMethodBase:
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            pass

    class UnquantizedEmbeddingMethod(QuantizeMethodBase):
        def create_weights(
            self,
            layer: nn.Module,
            input_size_per_partition: int,
            output_partition_sizes: list[int],
            input_size: int,
            output_size: int,
            params_dtype: torch.dtype,
            **extra_weight_attrs: Any,
        ) -> None:
            shape = sum(output_partition_sizes), input_size_per_partition
            weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            for name, value in {"input_dim": 1, "output_dim": 0, **extra_weight_attrs}.items():
                setattr(weight, name, value)
            layer.register_parameter("weight", weight)

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            pass

        def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return F.linear(x, layer.weight, bias)

        def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
            return F.embedding(input_, layer.weight)

        def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
            layer.weight = embed_tokens.weight
            return layer

    class VocabParallelEmbedding(PluggableLayer):
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
            super().__init__()
            self.tp_size = world.tp_size
            self.num_embeddings = num_embeddings
            self.org_vocab_size = org_num_embeddings or num_embeddings
            self.num_embeddings_padded = padded(self.org_vocab_size, padding_size)
            self.num_embeddings_per_partition = self.num_embeddings_padded // world.tp_size
            start = self.num_embeddings_per_partition * world.tp_rank
            stop = min(start + self.num_embeddings_per_partition, self.org_vocab_size)
            self.shard_indices = SimpleNamespace(
                org_vocab_start_index=min(start, self.org_vocab_size), org_vocab_end_index=stop
            )
            self.embedding_dim = embedding_dim
            method = quant_config and quant_config.get_quant_method(self, prefix=prefix)
            self.quant_method = method or UnquantizedEmbeddingMethod()
            self.params_dtype = params_dtype or torch.get_default_dtype()
            self.quant_method.create_weights(
                self, embedding_dim, [self.num_embeddings_per_partition], embedding_dim, self.num_embeddings_padded,
                params_dtype=self.params_dtype, weight_loader=self.weight_loader,
            )  # fmt: skip

        def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
            assert param.output_dim == 0
            assert loaded_weight.shape[0] == self.org_vocab_size
            start, stop = self.shard_indices.org_vocab_start_index, self.shard_indices.org_vocab_end_index
            param[: stop - start].data.copy_(loaded_weight[start:stop])
            param[stop - start :].data.fill_(0)

        def forward(self, input_: torch.Tensor) -> torch.Tensor:
            start, stop = self.shard_indices.org_vocab_start_index, self.shard_indices.org_vocab_end_index
            is_foreign = (input_ < start) | (input_ >= stop)
            local = (input_ - start) * ~is_foreign
            rows = self.quant_method.embedding(self, (local if world.tp_size > 1 else input_).long())
            if world.tp_size > 1:
                rows.masked_fill_(is_foreign.unsqueeze(-1), 0)
                world.sums.append(rows)
            return rows

    class ParallelLMHead(VocabParallelEmbedding):
        def tie_weights(self, embed_tokens: nn.Module) -> nn.Module:
            return self.quant_method.tie_weights(self, embed_tokens)

        def forward(self, input_: torch.Tensor) -> torch.Tensor:
            return self.quant_method.apply(self, input_)

    metadata: dict[nn.Module, dict[str, torch.Tensor]] = {}

    def record_metadata_for_reloading(model: nn.Module) -> None:
        for layer in model.modules():
            metadata[layer] = {}
            for name, parameter in layer._parameters.items():
                metadata[layer][name] = parameter.data.to("meta")
                metadata[layer][name].__dict__.update(parameter.__dict__)

    def reload(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Load anew as vLLM does: into parameters made of what was recorded; return how many elements those had."""
        kept = {path: (layer, dict(layer._parameters)) for path, layer in model.named_modules()}
        made = 0
        for layer, parameters in metadata.items():
            for name, meta in parameters.items():
                parameter = nn.Parameter(torch.empty(meta.shape, dtype=meta.dtype), requires_grad=False)
                parameter.__dict__.update(meta.__dict__)
                layer._parameters[name] = parameter
                made += parameter.numel()
        loaded = model.load_weights(weights)
        for path, (layer, parameters) in kept.items():
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)
            for name, parameter in parameters.items():
                if f"{path}.{name}" in loaded:
                    parameter.data.copy_(layer._parameters[name])
                layer._parameters[name] = parameter
        return made

    class BaseModelLoader:
        make_model: Callable[..., nn.Module]  # set by tests; vLLM asks its registry

        def __init__(self, load_config: Any) -> None:
            self.load_config = load_config

        def download_model(self, model_config: Any) -> None:
            raise NotImplementedError

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            raise NotImplementedError

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
            model = BaseModelLoader.make_model(vllm_config, prefix)
            record_metadata_for_reloading(model)
            self.load_weights(model, model_config)
            for module in model.modules():
                if hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)
            return model.eval()

    class DefaultModelLoader(BaseModelLoader):
        weights: dict[str, torch.Tensor] = {}  # noqa: RUF012 - set by tests; vLLM reads files

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            model.load_weights(iter(self.weights.items()))

    class TensorizerLoader(BaseModelLoader):
        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
            return BaseModelLoader.make_model(vllm_config, prefix)

    loaders: dict[str, type] = {"auto": DefaultModelLoader, "tensorizer": TensorizerLoader}

    def register_model_loader(load_format: str) -> Callable[[type], type]:
        def take(loader: type) -> type:
            assert issubclass(loader, BaseModelLoader)
            loaders[load_format] = loader
            return loader

        return take

    def get_model_loader(load_config: Any) -> Any:
        return loaders[load_config.load_format](load_config)

    class Worker:
        def __init__(self) -> None:
            self.steps = 0

        def execute_model(self, scheduler_output: Any) -> Any:
            self.steps += 1
            return scheduler_output

    def get_pp_group() -> Any:
        return world

    return {
        "vllm": {"__version__": VERSION},
        "vllm.distributed": {"get_pp_group": get_pp_group},
        "vllm.model_executor": {},
        "vllm.model_executor.custom_op": {"PluggableLayer": PluggableLayer, "op_registry_oot": registry},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.vocab_parallel_embedding": {
            "UnquantizedEmbeddingMethod": UnquantizedEmbeddingMethod,
            "VocabParallelEmbedding": VocabParallelEmbedding,
            "ParallelLMHead": ParallelLMHead,
        },
        "vllm.model_executor.model_loader": {
            "BaseModelLoader": BaseModelLoader,
            "DefaultModelLoader": DefaultModelLoader,
            "TensorizerLoader": TensorizerLoader,
            "register_model_loader": register_model_loader,
            "get_model_loader": get_model_loader,
        },
        "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": BaseModelLoader},
        "vllm.model_executor.model_loader.reload": {
            "record_metadata_for_reloading": record_metadata_for_reloading,
            "reload": reload,
        },
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_worker": {"Worker": Worker},
    }


class FakeVllm:
    """One vLLM in this process; the attributes of all its modules are its own."""

    def __init__(self) -> None:
        self.world = World()
        self.modules: dict[str, ModuleType] = {}
        for name, attributes in make_classes(self.world).items():
            module = self.modules[name] = ModuleType(name)
            module.__path__ = []
            module.__dict__.update(attributes)
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(self.modules[parent], leaf, module)
            self.__dict__.update(attributes)

    def config(self, model: Any, **overrides: Any) -> SimpleNamespace:
        """Return what vLLM hands to a loader for a model of this path."""
        return SimpleNamespace(
            additional_config={},
            model_config=SimpleNamespace(
                model=str(model), revision=None, runner_type="generate", quantization=None, enable_sleep_mode=False
            ),
            device_config=SimpleNamespace(device=torch.device("cpu")),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
            cache_config=SimpleNamespace(block_size=16, kv_cache_memory_bytes=None),
            compilation_config=SimpleNamespace(static_forward_context={}),
            **overrides,
        )

    def load(self, config: Any, load_format: str = "auto", **options: Any) -> Any:
        """Load a model as vLLM's runner does."""
        load_config = SimpleNamespace(load_format=load_format, model_loader_extra_config={})
        loader = self.get_model_loader(load_config)  # type: ignore[attr-defined]
        return loader.load_model(vllm_config=config, model_config=config.model_config, **options)


def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    """Put a fake vLLM in the place of the real one, and import the plug-in's modules for it alone."""
    fake = FakeVllm()
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in fake.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("FTW_EMBED", raising=False)
    _forget()
    yield fake
    _forget()


def _forget() -> None:
    package = sys.modules.get("ftw.integrations.vllm")
    for name in _OWN:
        sys.modules.pop(f"ftw.integrations.vllm.{name}", None)
        if package is not None:
            vars(package).pop(name, None)
