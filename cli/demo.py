"""`ftw demo`: the whole way once, on a checkpoint that it writes itself, with every step shown as it is typed."""

from __future__ import annotations

import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftw.errors import FtwError, OutputError, printable
from ftw.sizes import format_size

from .exit_codes import DONE, INTERRUPTED, REFUSED

if TYPE_CHECKING:
    import torch

    from ftw import LoadedModel

# What is shown is what runs. The table has 8192 rows.
_CODE = """\
import ftw, torch

model = ftw.load({folder!r}, embed="host", device={device!r})
ids = torch.tensor([5, 17, 8191, 8192], device=model.device)
rows = model.embedding(ids)
print(rows.shape, rows.dtype, "zeros for the id outside of the table:", not rows[3].any())
"""
_FOLDER = "ftw-demo"  # of the commands that are proposed
_NUM_IDS, _WARM_UP_CALLS, _TIMED_CALLS = 1000, 20, 200


def demo_command(
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="Keep the checkpoints in this new folder, to go on with them."),
    ] = None,
) -> None:
    """Build a small MoE checkpoint, inspect, convert, verify and load it, look rows up, and prove them."""
    if folder is not None:
        if folder.exists():
            raise OutputError(f"{printable(str(folder))}: folder: it exists, --folder needs the name of a new one")
        folder.mkdir(parents=True)
        _run(folder)
        _propose(folder, is_new=False)
        return
    with tempfile.TemporaryDirectory(prefix="ftw-demo-") as name:
        _run(Path(name))
    print(f"the folder {name} is deleted again")
    _propose(Path(_FOLDER), is_new=True)


def _run(folder: Path) -> None:
    from .demo_checkpoint import write_demo_checkpoint

    model, tied, out = folder / "Qwen3-tiny", folder / "Qwen3-tiny-tied", folder / "out"
    print(f"# a Qwen3-MoE checkpoint with random weights, and a tied variant of it, in {folder}")
    write_demo_checkpoint(model)
    write_demo_checkpoint(tied, tied=True)
    _step(DONE, "inspect", str(model))
    _step(DONE, "convert", str(model), str(out), "--embed", "host")
    _step(DONE, "verify", str(out), "--against", str(model))
    _look_up(out, model)
    print("\n# the tied variant is refused: its LM head reads the whole table at every step")
    _step(REFUSED, "convert", str(tied), str(folder / "refused"), "--embed", "host")
    print("\nall steps as expected")


def _step(expected: int, *arguments: str) -> None:
    """Show a command as a user would type it, run it, and check its exit status."""
    from .main import main

    print(f"\n$ ftw {shlex.join(arguments)}", flush=True)
    status = main(list(arguments))
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status != expected:
        raise FtwError(f"demo: ftw {arguments[0]}: exit status {status}, {expected} was expected")
    if status:
        print(f"(exit status {status})")


def _propose(folder: Path, *, is_new: bool) -> None:
    """Print what to type next; the first two lines alone where the shell does not find this `ftw`."""
    lines = [f"ftw demo --folder {shlex.quote(str(folder))}  # the same again, and the files stay"] if is_new else []
    model, out = shlex.quote(str(folder / "Qwen3-tiny")), shlex.quote(str(folder / "out"))
    lines += [
        f"ftw inspect {model} --vram 1GiB",
        f"ftw inspect {out} --json",
        f"ftw convert {model} {shlex.quote(str(folder / 'again'))} --embed host --sha256",
        f"ftw verify {out} --against {model}",
    ]
    activate = Path(sys.prefix, "bin", "activate")
    print("\nto go on:")
    if not _is_on_path() and activate.is_file():
        lines = [f". {shlex.quote(str(activate))}  # brings ftw into this shell", "ftw --help", *lines]
    print("\n".join(f"    {line}" for line in lines))
    print("the same in Python:")
    print("".join(f"    {line}\n" if line else "\n" for line in _code(folder / "out").splitlines()), end="")


def _is_on_path() -> bool:
    """Tell whether a shell that is given our PATH finds the `ftw` of this Python."""
    import shutil

    found = shutil.which("ftw")
    return found is not None and Path(found).parent == Path(sys.executable).parent


def _code(converted: Path) -> str:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return _CODE.format(folder=str(converted), device=device)


def _look_up(converted: Path, original: Path) -> None:
    """Run the code that is shown, and compare the rows it finds, and many more, with the bytes of the checkpoint."""
    code = _code(converted)
    print(f"\n$ python\n{code}", end="", flush=True)
    names: dict[str, LoadedModel] = {}
    exec(compile(code, "<ftw demo>", "exec"), names)  # noqa: S102 -- our own text: what is shown is what runs
    with names["model"] as model:
        _check_rows(model, original)
        weights = sum(tensor.nbytes for _, tensor in model.weights())
        nbytes, device = model.memory.total_pinned_bytes, model.device.type
        where = "page-locked host memory" if device == "cuda" else "host memory (no GPU here)"
        print(
            f"# every byte of {_NUM_IDS - 1} rows equals the checkpoint's, and an id outside of the table gives zeros"
        )
        print(f"# table in {where}: {format_size(nbytes)}; all other weights on {device}: {format_size(weights)}")
        if device == "cuda":  # on a CPU it says how busy the machine is, and nothing about ftw
            print(f"# a lookup of {_NUM_IDS} ids, called from Python: {_median_lookup_seconds(model) * 1e6:.0f} µs,")
            print(f"# the median of {_TIMED_CALLS} calls after {_WARM_UP_CALLS} others")


def _check_rows(model: LoadedModel, original: Path) -> None:
    """Look random ids up, the first one outside of the table, and compare each row with the checkpoint's bytes."""
    import torch
    from safetensors import safe_open

    ids = _random_ids(model)
    ids[0] = model.embedding.num_embeddings
    found, ids = model.embedding(ids).cpu(), ids.cpu()
    with safe_open(original / "model.safetensors", framework="pt") as file:
        expected = file.get_tensor(model.embedding.name)[ids[1:]]
    if not torch.equal(found[1:].view(torch.int16), expected.view(torch.int16)) or found[0].count_nonzero():
        raise FtwError("demo: lookup: rows differ from the checkpoint's bytes")


def _median_lookup_seconds(model: LoadedModel) -> float:
    """Return the median of calls on a GPU, each waited for."""
    import torch

    ids, seconds = _random_ids(model), []
    for _ in range(_WARM_UP_CALLS + _TIMED_CALLS):
        start = time.perf_counter()
        model.embedding(ids)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[_WARM_UP_CALLS:])


def _random_ids(model: LoadedModel) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.embedding.num_embeddings, (_NUM_IDS,), generator=generator).to(model.device)
