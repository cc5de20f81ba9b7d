"""One model that vLLM loads, with its tables in host memory: from the verdict to the line in the log.

    judge       the checkpoint: may its tables leave the GPU?          before anything is made
    make        vLLM makes the model; layers of those tables keep their rows in host memory
    settle      does the model share such a layer with its LM head?    before weights are read
    fill        vLLM's loader reads the weights
    finish      page-lock, compile the kernels, key of the compile cache
    offload     a table that no such layer has taken leaves the GPU, before vLLM measures what the model takes

"host" ends the start where a table has to stay, "auto" says so in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_pp_group
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from ftw._version import __version__
from ftw.checkpoint import MOVED_ROLES, TOKEN_EMBEDDING, find_token_embeddings, open_checkpoint
from ftw.errors import FtwError, NotEligibleError, printable
from ftw.integrations.vllm.layer import HostEmbeddingMethod, replaced_layers, restore
from ftw.integrations.vllm.log_line import describe_tables
from ftw.integrations.vllm.steps import update_between_steps
from ftw.lookup import RowOptions, is_taken
from ftw.offloading import check_room, find_model_tables, plan_offload, replace_module, run_offload
from ftw.pinned import resolve_device
from ftw.verdict import judge, plan_placement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from ftw.integrations.vllm.settings import Settings
    from ftw.lookup import HostEmbedding
    from ftw.verdict import Placement

_CACHE_KEY = "ftw_tables"  # in vLLM's additional config, of which it makes the key of its compile cache
_WAY_OUT = "embed 'gpu' or 'auto' leaves it on the GPU"

_log = logging.getLogger("vllm.ftw")


def load_model(load: Callable[[], Any], settings: Settings, arguments: Mapping[str, Any]) -> Any:
    """Return the model that `load` loads, of whose arguments vLLM's are in `arguments`.

    Raises:
        NotEligibleError: "host" was asked for, and the token embedding may not leave the GPU.
        ValueError: What was asked for does not go together.
    """
    loader, config, model_config = (arguments[name] for name in ("self", "vllm_config", "model_config"))
    _check_config(config, model_config, settings)
    source = source_of(model_config)
    placement = _place(source, settings)
    if placement is None:
        return load()
    loading = ModelLoad(source, settings, placement, config)
    with replaced_layers(loading.choose), _guarded(loader, loading.load_weights):
        model = load()
    loading.offload_rest(model)
    loading.report()
    return model


def source_of(model_config: Any) -> str:
    """Return the path or hub id of vLLM's model, with its revision."""
    source = str(model_config.model)
    revision = getattr(model_config, "revision", None)
    return f"{source}@{revision}" if revision and not os.path.exists(source) else source


class ModelLoad:
    """The tables of one model on their way to host memory."""

    def __init__(self, source: str, settings: Settings, placement: Placement, config: Any) -> None:
        self._source = printable(source)
        self._settings = settings
        self._config = config
        self._stored = {(table.rows, table.columns): table for table in placement.host_tables}
        self._device = resolve_device(config.device_config.device)
        self._layers: list[Any] = []
        self._tables: dict[str, HostEmbedding] = {}
        self._has_left = False  # a table that had to stay, of which the log tells

    def choose(self, layer: Any, prefix: str, quant_method: Any) -> HostEmbeddingMethod | None:
        """Return what looks a layer's rows up; None for a layer of another table, or whose rows are quantised."""
        stored = self._stored.get((layer.org_vocab_size, layer.embedding_dim))
        if stored is None:
            return None
        name = prefix or type(layer).__name__
        if quant_method is not None:
            self._leave(name, f"its rows are quantised ({type(quant_method).__name__}), plain rows are needed")
            return None
        self._layers.append(layer)
        return HostEmbeddingMethod(name, stored.tensors, self._device)

    def load_weights(self, load: Callable[[Any, Any], None], model: Any, model_config: Any) -> None:
        """Load weights as vLLM does; before that, look for ties, and finish the tables after it."""
        restored = [layer for layer in self._layers if self._settle(model, layer)]
        if restored:
            self._layers = [layer for layer in self._layers if layer not in restored]
            record_metadata_for_reloading(model)
        load(model, model_config)
        for layer in self._layers:
            method: Any = layer.quant_method
            hot_bytes = self._hot_bytes(self._stored[layer.org_vocab_size, layer.embedding_dim].role)
            handle = _free_handle(method.name)
            self._tables[method.name] = method.finish(hot_bytes=hot_bytes, handle=handle, max_ids=self._max_ids)
        self._set_cache_key()

    def offload_rest(self, model: nn.Module) -> None:
        """Move a token embedding that no layer of vLLM's has taken, in the memory that vLLM is measuring."""
        is_wanted = any(table.role == TOKEN_EMBEDDING for table in self._stored.values())
        if self._tables or self._has_left or not is_wanted or not get_pp_group().is_first_rank:
            return
        tables = [
            table for table in find_model_tables(model) if table.role in MOVED_ROLES and not _is_cut(table.module)
        ]
        if not tables:
            self._leave(type(model).__name__, "has no VocabParallelEmbedding or nn.Embedding of its token embedding")
        for table in tables:
            options = RowOptions(hot_bytes=self._hot_bytes(table.role), handle=_free_handle(table.path))
            try:
                plan = plan_offload(table.module, options, name=table.path, device=self._device)
            except NotEligibleError as error:
                self._leave_because(error)
                continue
            check_room([plan], None)
            embedding = run_offload(plan)
            replace_module(model, table.path, embedding)
            embedding.warm_up(self._max_ids)
            self._tables[table.path] = embedding
            _log.warning("%s: %s: reload_weights does not reach it: its class is not vLLM's", self._source, table.path)
        self._set_cache_key()

    def report(self) -> None:
        """Say in the log what has become of the tables, and let the hot rows follow what is looked up."""
        for line in describe_tables(self._tables, self._config):
            _log.info("%s", line)
        hot = [table for table in self._tables.values() if table.hot is not None]
        if hot:
            update_between_steps(hot)

    @property
    def _max_ids(self) -> int:
        return int(self._config.scheduler_config.max_num_batched_tokens)

    def _hot_bytes(self, role: str) -> int | None:
        return self._settings.hot_bytes if role == TOKEN_EMBEDDING else None

    def _settle(self, model: nn.Module, layer: nn.Module) -> bool:
        """Name a layer by its path; if anything else holds its table, return True, after its rows are on the GPU again.

        Raises:
            NotEligibleError: "host" was asked for, and something else holds it.
        """
        method: Any = layer.quant_method
        places, others = [], []
        for path, module in model.named_modules(remove_duplicate=False):
            if module is layer:
                places.append(path)
            elif any(value is layer.weight for value in module._parameters.values()):
                others.append((path, module))
        places.sort(key=lambda path: not find_token_embeddings([f"{path}.weight"]))
        method.name = places[0] if places else method.name
        shared_with = [*places[1:], *(path for path, _ in others)]
        if not shared_with:
            return False
        self._leave(method.name, f"tied: {shared_with[0]} reads the whole table at every step")
        restore(layer)
        for _, module in others:
            module.weight = layer.weight
        return True

    def _set_cache_key(self) -> None:
        """Tell vLLM's compile cache that compiled code looks rows up in tables of these handles."""
        if self._tables:
            handles = sorted(table.handle for table in self._tables.values())
            self._config.additional_config[_CACHE_KEY] = {"release": __version__, "handles": handles}

    def _leave(self, name: str, problem: str) -> None:
        """Say that a table stays on the GPU, and why.

        Raises:
            NotEligibleError: "host" was asked for.
        """
        self._leave_because(NotEligibleError(f"{self._source}: {printable(name)}: {problem}; {_WAY_OUT}"))

    def _leave_because(self, error: NotEligibleError) -> None:
        self._has_left = True
        if self._settings.must_move:
            raise error
        _log.warning("%s", error)


def _check_config(config: Any, model_config: Any, settings: Settings) -> None:
    if not isinstance(config.additional_config, dict):
        problem = f"found a {type(config.additional_config).__name__}, ftw puts the key of its tables into a dictionary"
        raise ValueError(f"additional config: {problem}")  # noqa: TRY004
    if settings.hot_bytes and getattr(model_config, "enable_sleep_mode", False):
        problem = "found together with enable_sleep_mode, whose level 2 takes the hot rows without a word"
        raise ValueError(f"additional config: ftw: hot_bytes: {problem}; leave one of the two")


def _place(source: str, settings: Settings) -> Placement | None:
    """Return which tables of a checkpoint go to host memory; None for none.

    Raises:
        NotEligibleError: "host" was asked for, and the token embedding may not leave the GPU.
    """
    try:
        with open_checkpoint(source, headers_only=True, follow_links=settings.follow_links) as checkpoint:
            placement = plan_placement(judge(checkpoint), settings.embed, checkpoint.source)
    except (FtwError, OSError) as error:
        if settings.must_move:
            raise
        _log.warning("%s; all tables stay on the GPU", error)
        return None
    if placement.placement == "gpu":
        _log.warning("%s: the token embedding stays on the GPU: %s", printable(source), printable(placement.reason))
    return placement if placement.host_tables else None


@contextlib.contextmanager
def _guarded(loader: Any, around: Callable[..., None]) -> Iterator[None]:
    """Let `around` load the weights, which is given the loader's own way to do so."""
    own = loader.load_weights
    loader.load_weights = lambda model, model_config: around(own, model, model_config)
    try:
        yield
    finally:
        del loader.load_weights


def _is_cut(module: Any) -> bool:
    """Return whether ranks add a layer's rows up, which what takes its place would not do."""
    return getattr(module, "tp_size", 1) > 1


def _free_handle(name: str) -> str:
    """Return a handle of a table: the name, or with a number if another engine of this process has that."""
    handles = (name if number == 1 else f"{name}#{number}" for number in range(1, 1 << 16))
    return next(handle for handle in handles if not is_taken(handle))
