"""Parts of `ftw bench lookup`: what an eager call costs, and hot rows that learn a distribution that shifts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ftw.lookup import HostEmbedding

from .ids import Ids
from .timing import time_graph_us, time_queueing_us

COUNTS = (1, 16, 64)  # at more the device is slower than the host
_HOT_BYTES = "32MiB"
_BATCH, _BATCHES_PER_UPDATE, _UPDATES = 1024, 32, 6


@torch.inference_mode()
def measure_calls(host: torch.Tensor, on_gpu: torch.Tensor) -> list[dict[str, Any]]:
    """Time what eager calls cost the host, the output's allocation included, beside `nn.Embedding` on a GPU table."""
    modules = {
        "HostEmbedding": HostEmbedding(host),
        "HostEmbedding, hot 32MiB": HostEmbedding(host, hot_bytes=_HOT_BYTES, device=on_gpu.device),
        "nn.Embedding in VRAM": nn.Embedding.from_pretrained(on_gpu),
    }
    rows = []
    for count in COUNTS:
        ids = torch.randint(0, host.shape[0], (count,), device=on_gpu.device)
        for name, module in modules.items():
            time = time_queueing_us(partial(module, ids))
            rows.append({"module": name, "ids": count, "host_us": round(time.median, 2)})
    return rows


def measure_learning(host: torch.Tensor, device: torch.device) -> list[dict[str, Any]]:
    """Replay a graph, captured once, on Zipf ids whose ranks are shuffled halfway; hit rate and time before updates."""
    source = Ids(host.shape[0], device, seed=1)
    embedding = HostEmbedding(host, hot_bytes=_HOT_BYTES, device=device)
    ids = source.draw("zipf", _BATCH)
    out = torch.empty(_BATCH, host.shape[1], dtype=host.dtype, device=device)
    embedding(ids, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        embedding(ids, out=out)
    rows = []
    for update in range(2 * _UPDATES):
        if update == _UPDATES:
            source.shift()
        hits = 0.0
        for _ in range(_BATCHES_PER_UPDATE):
            ids.copy_(source.draw("zipf", _BATCH))
            assert embedding.hot is not None
            hits += float((embedding.hot.slots[ids] >= 0).float().mean())
            graph.replay()
        wanted = host[ids.cpu()].to(device)
        if not torch.equal(out.view(torch.int16), wanted.view(torch.int16)):
            raise RuntimeError("a replayed lookup gave other rows than the table's")
        time = time_graph_us(partial(embedding, ids, out=out), repeats=9)
        rows.append(
            {
                "batches": (update + 1) * _BATCHES_PER_UPDATE,
                "shifted": update >= _UPDATES,
                "hit_rate": round(hits / _BATCHES_PER_UPDATE, 3),
                "graph_us": round(time.median, 2),
            }
        )
        embedding.update_hot_rows()
    return rows
