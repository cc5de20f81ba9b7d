"""`ftw demo`: the whole way once, on a checkpoint that it writes itself, with every step shown as a command."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftw.errors import FtwError
from ftw.sizes import format_size

from .exit_codes import DONE, INTERRUPTED, REFUSED

if TYPE_CHECKING:
    import torch

_IDS = 1000


def demo_command(
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Keep the files in this new folder.")
    ] = None,
) -> None:
    """Build a small MoE checkpoint, inspect, convert, verify and load it, look rows up, and prove them."""
    if folder is not None:
        folder.mkdir(parents=True)
        _run(folder)
        return
    with tempfile.TemporaryDirectory(prefix="ftw-demo-") as name:
        _run(Path(name))


def _run(folder: Path) -> None:
    from .demo_checkpoint import write_demo_checkpoint

    start = time.perf_counter()
    model, tied, out = folder / "Qwen3-tiny", folder / "Qwen3-tiny-tied", folder / "out"
    print(f"# a Qwen3-MoE checkpoint with random weights, and a tied variant of it, in {folder}")
    write_demo_checkpoint(model)
    write_demo_checkpoint(tied, tied=True)
    _step(DONE, "inspect", str(model))
    _step(DONE, "convert", str(model), str(out), "--embed", "host")
    _step(DONE, "verify", str(out), "--against", str(model))
    print("\n$ python")
    _look_up(out, model)
    print("\n# the tied variant is refused: its LM head reads the whole table at every step")
    _step(REFUSED, "convert", str(tied), str(folder / "refused"), "--embed", "host")
    print(f"\nall steps as expected, {time.perf_counter() - start:.1f} s")


def _step(expected: int, *arguments: str) -> None:
    """Show a command as a user would type it, run it, and check its exit status."""
    from .main import main

    print(f"\n$ ftw {' '.join(arguments)}", flush=True)
    status = main(list(arguments))
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status != expected:
        raise FtwError(f"demo: ftw {arguments[0]}: exit status {status}, {expected} was expected")
    if status:
        print(f"(exit status {status})")


def _look_up(converted: Path, original: Path) -> None:
    """Look rows up through the host table and compare them with the bytes of the checkpoint they came from."""
    import torch

    import ftw

    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f">>> model = ftw.load('{converted}', embed='host', device='{device}')")
    with ftw.load(converted, embed="host", device=device) as model:
        rows = model.embedding.num_embeddings
        ids = torch.randint(0, rows, (_IDS,), device=device)
        ids[0] = rows  # outside of the table
        print(f">>> model.embedding(ids)  # {_IDS} random ids of {rows}, one of them outside the table")
        found = model.embedding(ids).cpu()
        _check_rows(found, ids.cpu(), original, model.embedding.name)
        seconds = _time_lookup(model.embedding, ids)
        nbytes = model.memory.total_pinned_bytes
        weights = sum(tensor.nbytes for _, tensor in model.weights())
    where = "page-locked host memory" if device == "cuda" else "host memory (no GPU here)"
    print(f"every byte of {_IDS - 1} rows equals the checkpoint's, and the id outside gave zeros")
    print(f"table in {where}: {format_size(nbytes)}; all other weights on {device}: {format_size(weights)}")
    print(f"one lookup of {_IDS} ids on {device}, called eagerly: {seconds * 1e6:.0f} µs")


def _check_rows(found: torch.Tensor, ids: torch.Tensor, original: Path, name: str) -> None:
    import torch
    from safetensors import safe_open

    with safe_open(original / "model.safetensors", framework="pt") as file:
        table = file.get_tensor(name)
    expected = table[ids[1:]]
    if not torch.equal(found[1:].view(torch.int16), expected.view(torch.int16)) or found[0].count_nonzero():
        raise FtwError("demo: lookup: rows differ from the checkpoint's bytes")


def _time_lookup(embedding: torch.nn.Module, ids: torch.Tensor, calls: int = 20) -> float:
    import torch

    embedding(ids)
    if ids.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        embedding(ids)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls
