"""Oracle: takes a checkpoint, however broken, through all that ftw does, and tells a finding from what is allowed.

    open, inspect   refused by an `FtwError`, or every tensor's bytes equal those that other code finds: the
                    safetensors library, the gguf package, or a few lines here for an FTW
    verify, convert refused by an `FtwError`, or what was written verifies against its source and is judged alike
    load, lookup    refused by an `FtwError`, or rows equal those made from these bytes by torch or the gguf package

Everything else is a finding: another exception, other rows, more than `MAX_SECONDS` or more than `MAX_GROWTH_NBYTES` of
memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftw.cli.main import main

import ftw
from ftw.ggml_types import PACKED_TYPES
from fuzz.documents import write
from fuzz.findings import FindingError, check_message, require, words_of
from fuzz.looked_up import check_dummy, check_load, check_part
from fuzz.mutations import make
from fuzz.stored import compare_contents, read_contents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftw.checkpoint import Checkpoint
    from ftw.verdict import TableVerdict, Verdict
    from fuzz.stored import Contents

MAX_SECONDS = 20
MAX_GROWTH_NBYTES = 512 << 20
_SCRATCH = "/dev/shm" if os.path.isdir("/dev/shm") else None
_EMBEDS = ("gpu", "auto", "host")
_SHARD_LIMITS = (4096, 8192, 8 << 30)
_EXIT_CODES = (0, 1, 3)
_HEADS = ("output.", "lm_head.", "head.", "model.lm_head", "language_model.lm_head")
_ENCODERS = ("bert", "t5encoder")  # of GGUF's architectures that the mutations know, those without an LM head


class HangError(Exception):
    """It took too long."""


class Outcome(NamedTuple):
    """How far a checkpoint came: "refused", "not judged", "not eligible" or "eligible"; and the words of a refusal."""

    kind: str
    words: str = ""


def run(recipe: dict[str, Any], *, level: int = 3) -> Outcome:
    """Make a recipe's checkpoint in a folder of its own and check it.

    Args:
        recipe: See `fuzz.mutations`.
        level: 0 to open and inspect, 1 to verify and convert too, 2 to load and look up, 3 for the command line.
    """
    files, opened = make(recipe)
    scratch = Path(tempfile.mkdtemp(prefix="ftw-fuzz-", dir=_SCRATCH))
    try:
        folder = scratch / "in"
        folder.mkdir()
        write(files, folder)
        with _limits():
            return check(folder / opened if opened else folder, scratch, level)
    finally:
        shutil.rmtree(scratch)


def check(path: Path, scratch: Path, level: int) -> Outcome:
    """Check one checkpoint; `scratch` is an existing folder for what is converted."""
    if level >= 3:
        _check_command_line(path)
    try:
        checkpoint = ftw.open_checkpoint(path)
    except ftw.FtwError as error:
        return Outcome("refused", check_message(error))
    with checkpoint:
        contents = read_contents(checkpoint)
        compare_contents(checkpoint, contents)
        try:
            report = ftw.inspect(checkpoint, vram_bytes=1 << 30)
        except ftw.FtwError as error:
            return Outcome("not judged", check_message(error))
        json.dumps(report.to_dict(), allow_nan=False)
        _check_verdict(checkpoint, report.verdict)
        if level >= 1:
            _check_conversion(checkpoint, path, scratch, report.verdict, contents)
        if level >= 2:
            for embed in _EMBEDS:
                check_load(path, embed, contents)
            if report.is_host_eligible:
                check_part(path, report.verdict.token_embedding, contents)
            if report.is_host_eligible and level >= 3:  # packed blocks take a while to make
                check_dummy(path, report.verdict.token_embedding)
    table = report.verdict.token_embedding
    return Outcome("eligible" if table.eligible else "not eligible", words_of(table.detail))


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """End what takes too long; tell what takes too much memory."""

    def stop(*_: object) -> None:
        raise HangError(f"took more than {MAX_SECONDS} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # of the test, which has a limit of its own
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if growth > MAX_GROWTH_NBYTES:
        raise FindingError(f"memory grew by {growth} bytes")


def _check_verdict(checkpoint: Checkpoint, verdict: Verdict) -> None:
    table = verdict.token_embedding
    for one in verdict.tables:
        require(one.eligible == (one.reason == "ok"), f"{one.name!r}: eligible, and {one.reason}")
        require(not (one.eligible and one.unreadable), f"{one.name!r}: eligible, and unreadable: {one.unreadable}")
        if one.eligible:
            require(bool(one.rows and one.columns and one.nbytes), f"{one.name!r}: eligible, and empty")
            _check_size(checkpoint, one)
    if not table.eligible:
        return
    if not checkpoint.config.is_gguf:
        is_claimed = checkpoint.config.tie_flag and checkpoint.config.model_type == "llama"
        is_model = any(word in (checkpoint.config.architecture or "") for word in ("CausalLM", "LMHead"))
        has_head = any("head" in name or name.startswith(_HEADS) for name in checkpoint.tensors)
        require(has_head or not is_model, f"{table.name!r}: eligible, though no head is stored")
        require(not (is_model and is_claimed), f"{table.name!r}: eligible, though config.json claims a tie")
        return
    has_head = checkpoint.config.has_output_weight or any(name.startswith(_HEADS) for name in checkpoint.tensors)
    is_encoder = checkpoint.config.architecture in _ENCODERS
    require(bool(has_head or is_encoder), f"{table.name!r}: eligible, though no head is stored")


def _check_size(checkpoint: Checkpoint, table: TableVerdict) -> None:
    """Check rows and columns of a table against what the headers say; packed rows of FreeToken's say nothing there."""
    tensors = [checkpoint.tensors[name] for name in table.tensors]
    shapes = [tensor.logical_shape or tensor.shape for tensor in tensors]
    told = sum(shape[0] for shape in shapes), shapes[0][-1]
    is_told = table.dtype not in PACKED_TYPES or tensors[0].logical_shape is not None
    require(not is_told or told == (table.rows, table.columns), f"{table.name!r}: {table.rows} rows, not {told[0]}")


def _check_conversion(checkpoint: Checkpoint, path: Path, scratch: Path, verdict: Verdict, contents: Contents) -> None:
    try:
        ftw.verify(path)
    except ftw.FtwError as error:
        check_message(error)
    choice = len(contents) + sum(map(len, contents.values()))
    embed, limit = _EMBEDS[choice % 3], _SHARD_LIMITS[choice // 3 % 3]
    target = scratch / "out"
    try:
        ftw.convert(path, target, embed=embed, shard_limit=limit)
    except ftw.NotEligibleError as error:
        check_message(error)
        require(embed == "host" and not verdict.token_embedding.eligible, f"not converted, though eligible: {error}")
        return
    except ftw.FtwError as error:
        check_message(error)
        require(not target.exists(), "a failed conversion left its target")
        return
    result = ftw.verify(target, against=path)
    require(result.is_ok, f"what was written does not verify: {result.problems}")
    with ftw.open_checkpoint(target) as made:
        require(read_contents(made) == contents, "what was written has other bytes")
        compare_contents(made, contents)
        # Under names that are not a GGUF's own an FTW has tables, where the GGUF itself has none.
        if verdict.token_embedding.name or checkpoint.format != "gguf":
            _compare_verdicts(verdict, ftw.inspect(made).verdict)
        check_load(target, "auto", contents)


def _compare_verdicts(before: Verdict, after: Verdict) -> None:
    def told(verdict: Verdict) -> list[tuple[Any, ...]]:
        keys = ("name", "tensors", "role", "rows", "columns", "dtype", "nbytes", "eligible", "reason")
        first, *others = (tuple(getattr(table, key) for key in keys) for table in verdict.tables)
        return [first, *sorted(others, key=repr)]

    require(told(before) == told(after), f"judged {told(before)}, converted {told(after)}")
    require(before.tied == after.tied, f"tied is {before.tied}, converted {after.tied}")


def _check_command_line(path: Path) -> None:
    """Run the commands that only read; each ends with one line on stderr, or none, and a status."""
    for arguments in (["inspect", str(path)], ["inspect", str(path), "--json"], ["verify", str(path), "--json"]):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
        require(status in _EXIT_CODES, f"{arguments[0]} ends with {status}")
        require("Traceback" not in err.getvalue(), f"{arguments[0]} prints a traceback")
        if status == 0 and "--json" in arguments:
            json.loads(out.getvalue())


def describe(error: BaseException) -> str:
    """Return what a finding is known by: its kind and the last place in ftw, or in the oracle, where it arose."""
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if "/ftw/" in file or "/cli/" in file:
            place = f"{Path(file).name}:{traceback.tb_frame.f_code.co_name}"
        traceback = traceback.tb_next
    if isinstance(error, FindingError):
        place = str(error)[:40]
    return f"{type(error).__name__} {place}".strip()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, run(json.loads(Path(name).read_bytes())))
