"""FtwModelLoader: vLLM's `--load-format ftw`, for FTW folders that `ftw convert` made of safetensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class FtwModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Streams the weights of an FTW folder into a model, and its table straight into host memory."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        if load_config.model_loader_extra_config:
            problem = f"found {load_config.model_loader_extra_config!r}, load format 'ftw' takes none"
            raise ValueError(f"model_loader_extra_config: {problem}")

    def download_model(self, model_config: Any) -> None:
        """Fetch what a hub id names, if it is one."""
        from ftw.integrations.vllm.weights import open_weights

        open_weights(model_config).close()

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill a model's parameters.

        Raises:
            CheckpointError: The folder is broken, or of no use to vLLM, or lacks weights that the model needs.
        """
        from ftw.integrations.vllm.weights import find_host_layers

        loaded = model.load_weights(self.get_all_weights(model_config, model))
        if loaded is None or model_config.quantization is not None:
            return  # what is loaded is not told, or not all of it is stored
        on_host = {f"{path}.weight" for path in find_host_layers(model)}
        missing = {name for name, _ in model.named_parameters()} - set(loaded) - on_host
        if missing:
            problem = f"{len(missing)} weights of {type(model).__name__} are not in the checkpoint"
            raise CheckpointError(model_config.model, sorted(missing)[0], problem)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights but those of tables in host memory, which are filled meanwhile; for a reload, too."""
        from ftw.integrations.vllm.weights import stream_weights

        yield from stream_weights(model_config, model)
