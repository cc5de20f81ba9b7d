"""What the log says of tables in host memory: the bytes, and the tokens of KV cache that have room instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftw.errors import printable
from ftw.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftw.lookup import HostEmbedding


def describe_tables(tables: Mapping[str, HostEmbedding], config: Any) -> Iterator[str]:
    """Yield a line for each table; `config` is vLLM's."""
    token_nbytes = kv_token_nbytes(config)
    for path, table in tables.items():
        nbytes = table.pinned_nbytes or table.table.nbytes
        how = "page-locked in host memory" if table.pinned_nbytes else "in host memory"
        hot = "none of it in VRAM" if table.hot is None else f"in VRAM its {table.hot.rows.shape[0]} hot rows alone"
        gain = _gain(table, config, token_nbytes)
        yield f"ftw: {printable(path)}: {format_size(nbytes)} ({nbytes} bytes) {how}, {hot}{gain}"


def kv_token_nbytes(config: Any) -> int | None:
    """Return the bytes of one token in the KV caches of all layers that keep every token; None if that is not told."""
    block_size = getattr(config.cache_config, "block_size", None)
    layers = getattr(config.compilation_config, "static_forward_context", {})
    if not block_size:
        return None
    total = 0
    for layer in layers.values():
        get_spec = getattr(layer, "get_kv_cache_spec", None)
        if get_spec is None or getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        spec = get_spec(config)
        if spec is None or not hasattr(spec, "num_kv_heads") or getattr(spec, "sliding_window", None):
            continue
        total += spec.page_size_bytes // spec.block_size
    return total or None


def _gain(table: HostEmbedding, config: Any, token_nbytes: int | None) -> str:
    if getattr(config.cache_config, "kv_cache_memory_bytes", None):
        return "; the KV cache stays as large as kv_cache_memory_bytes says"
    if token_nbytes is None:
        return ""
    hot_nbytes = 0 if table.hot is None else sum(part.nbytes for part in table.hot if part is not None)
    return f": room for {(table.table.nbytes - hot_nbytes) // token_nbytes} more tokens of KV cache"
