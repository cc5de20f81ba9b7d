"""Lookups spread over the GPUs of a host, held against a whole table on each: `python tests/support/tp_worker.py`.

Every rank loads its own rows, sums lookups with NCCL, and compares with a table on its GPU: eagerly, and in a graph
that is captured once and replayed with new ids. With `--time` it also times replays, beside a table that the ranks
share with `share="node"`. On a machine without GPUs `--backend gloo` compares on the CPU. Prints a JSON object.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from builders import llama_config, write_checkpoint

import ftw

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COUNTS = (1, 16, 512, 8192)
REPLAYS, REPEATS = 20, 30


def write_model(folder: Path, rows: int, columns: int) -> Path:
    """Write a table of random bits, NaNs and negative zeros among them, and a head that is another one."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(-(1 << 15), 1 << 15, (rows, columns), generator=generator, dtype=torch.int16)
    table[::7] = -(1 << 15)  # -0.0
    tensors = {TABLE: table.view(torch.bfloat16), HEAD: torch.ones(rows, columns, dtype=torch.bfloat16)}
    return write_checkpoint(folder, tensors, llama_config(vocab_size=rows, hidden_size=columns))


def random_ids(count: int, rows: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return the same ids on every rank, some outside."""
    return torch.randint(-3, rows + 3, (count,), generator=torch.Generator().manual_seed(seed)).to(device)


def wanted_bits(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    is_inside = (ids >= 0) & (ids < table.shape[0])
    return table.view(torch.int16)[ids.where(is_inside, 0)] * is_inside[:, None]


def compare(embedding: Callable[..., torch.Tensor], table: torch.Tensor, device: torch.device) -> int:
    """Return how many lookups were equal; the first that is not ends the run."""
    compared = 0

    def check(rows: torch.Tensor, ids: torch.Tensor, what: str) -> None:
        nonlocal compared
        if not torch.equal(rows.view(torch.int16), wanted_bits(table, ids)):
            raise SystemExit(f"{what} of {ids.numel()} ids: rows differ from the whole table's")
        compared += 1

    for count in COUNTS:
        ids = random_ids(count, table.shape[0], count, device)
        check(embedding(ids), ids, "eager lookup")
        if device.type == "cpu":
            continue
        graph, rows = captured(embedding, ids)
        for seed in range(5):
            ids.copy_(random_ids(count, table.shape[0], 100 + seed, device))
            graph.replay()
            check(rows, ids, f"replay {seed}")
    return compared


def captured(
    embedding: Callable[..., torch.Tensor], ids: torch.Tensor, calls: int = 1
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph of lookups, and the rows of the last."""
    embedding(ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            rows = embedding(ids)
    return graph, rows


def microseconds(embedding: Callable[..., torch.Tensor], ids: torch.Tensor) -> float:
    """Return the median time of a lookup in a graph of several."""
    graph, _ = captured(embedding, ids, REPLAYS)
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / REPLAYS)
    return round(statistics.median(times), 2)


def work(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Compare, and perhaps time, as one rank."""
    is_gpu = arguments.backend == "nccl"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(arguments.backend, init_method=rendezvous, rank=rank, world_size=arguments.size)
    source = Path(folder, "model")
    with (
        ftw.load(source, embed="gpu", device=device) as whole,
        ftw.load(source, embed="host", device=device, tp=True) as sharded,
    ):
        table = whole.embedding.table
        result = {
            "size": arguments.size,
            "backend": arguments.backend,
            "equal_lookups": compare(sharded.embedding, table, device),
            "pinned_bytes": sharded.memory.total_pinned_bytes,
        }
        if arguments.time and is_gpu:
            with ftw.load(source, embed="host", device=device, share="node") as node:
                compare(node.embedding, table, device)
                result["microseconds"] = {
                    count: {
                        "sharded": microseconds(sharded.embedding, random_ids(count, table.shape[0], 1, device)),
                        "share_node": microseconds(node.embedding, random_ids(count, table.shape[0], 1, device)),
                        "gpu": microseconds(whole.embedding, random_ids(count, table.shape[0], 1, device)),
                    }
                    for count in COUNTS
                }
        torch.cuda.synchronize() if is_gpu else None
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Write a model, and start a process for each rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--rows", type=int, default=151_937, help="of the table; odd, so that the last rank has fewer")
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--time", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder, "model"), arguments.rows, arguments.columns)
        mp.spawn(work, (arguments, folder), nprocs=arguments.size)


if __name__ == "__main__":
    main()
