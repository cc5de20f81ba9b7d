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
import re
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import numpy as np
import safetensors
import torch
from ftw.cli.main import main
from gguf import GGMLQuantizationType, quants

import ftw
from ftw.dtypes import DTYPES
from ftw.ggml_types import PACKED_TYPES
from fuzz.documents import write
from fuzz.mutations import make

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftw.checkpoint import Checkpoint
    from ftw.verdict import TableVerdict, Verdict

    Contents = Mapping[str, bytes]

MAX_SECONDS = 20
MAX_GROWTH_NBYTES = 512 << 20
_SCRATCH = "/dev/shm" if os.path.isdir("/dev/shm") else None
_EMBEDS = ("gpu", "auto", "host")
_SHARD_LIMITS = (4096, 8192, 8 << 30)
_EXIT_CODES = (0, 1, 3)
_ENCODERS = ("bert", "t5encoder")  # of GGUF's architectures that the mutations know, those without an LM head


class FindingError(Exception):
    """Results that cannot be right."""


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
        return Outcome("refused", _check_message(error))
    with checkpoint:
        contents = _read(checkpoint)
        _compare(checkpoint, contents)
        try:
            report = ftw.inspect(checkpoint, vram_bytes=1 << 30)
        except ftw.FtwError as error:
            return Outcome("not judged", _check_message(error))
        json.dumps(report.to_dict(), allow_nan=False)
        _check_verdict(checkpoint, report.verdict)
        if level >= 1:
            _check_conversion(checkpoint, path, scratch, report.verdict, contents)
        if level >= 2:
            for embed in _EMBEDS:
                _check_load(path, embed, contents)
    table = report.verdict.token_embedding
    return Outcome("eligible" if table.eligible else "not eligible", _words_of(table.detail))


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """End what takes too long; tell what takes too much memory."""

    def stop(*_: object) -> None:
        raise HangError(f"took more than {MAX_SECONDS} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if growth > MAX_GROWTH_NBYTES:
        raise FindingError(f"memory grew by {growth} bytes")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise FindingError(problem)


def _check_message(error: ftw.FtwError) -> str:
    """Check that a message is one line, and return the words of it that do not depend on the checkpoint."""
    text = str(error)
    _require("\n" not in text and text.isprintable(), f"message is no printable line: {text!r}")
    return _words_of(text.rpartition(": ")[2])


def _words_of(text: str) -> str:
    return " ".join(word for word in text.split() if re.fullmatch(r"[a-z_]+[,;]?", word))


def _read(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Read every tensor, whole and once more in two pieces."""
    room = sum(file.nbytes for file in checkpoint.files)
    _require(checkpoint.nbytes <= room, f"tensors of {checkpoint.nbytes} bytes in files of {room}")
    contents = {}
    for name, tensor in checkpoint.tensors.items():
        whole, pieces = bytearray(tensor.nbytes), bytearray(tensor.nbytes)
        checkpoint.read_into(name, whole)
        cut = tensor.nbytes * 2 // 3
        checkpoint.read_into(name, memoryview(pieces)[:cut])
        checkpoint.read_into(name, memoryview(pieces)[cut:], offset=cut)
        _require(whole == pieces, f"{name!r}: pieces differ from the whole")
        contents[name] = bytes(whole)
    return contents


# --- what other code finds --------------------------------------------------------------------------------------------


def _compare(checkpoint: Checkpoint, contents: Contents) -> None:
    """Compare the bytes of all tensors with what other code reads out of the same files."""
    if checkpoint.format == "gguf":
        for file in checkpoint.files:
            _compare_gguf(checkpoint, file.path, contents)
    elif checkpoint.format == "ftw":
        _compare_ftw(checkpoint, contents)
    for file in checkpoint.files:
        if checkpoint.format == "safetensors" or any(t.shard == file.path.name for t in checkpoint.tensors.values()):
            _compare_safetensors(checkpoint, file.path, contents)


def _compare_safetensors(checkpoint: Checkpoint, path: Path, contents: Contents) -> None:
    if checkpoint.format == "gguf":
        return
    content = path.read_bytes()
    try:
        stored = dict(safetensors.deserialize(content))
    except safetensors.SafetensorError as error:
        _require(b"-0" in content, f"the safetensors library refuses what was taken: {error}")
        return
    shard = path.relative_to(checkpoint.folder).as_posix()
    mine = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.shard == shard}
    for name, tensor in mine.items():
        other = stored[name]
        _require(tuple(other["shape"]) == tensor.shape, f"{name!r}: shape {other['shape']}, not {tensor.shape}")
        _require(other["dtype"].replace("_", "") in tensor.dtype.replace("_", ""), f"{name!r}: {other['dtype']}")
        _require(bytes(other["data"]) == contents[name], f"{name!r}: other bytes than the safetensors library's")
    missing = set(stored) - set(checkpoint.tensors)
    _require(not missing, f"{missing} are not there")


def _compare_gguf(checkpoint: Checkpoint, path: Path, contents: Contents) -> None:
    try:
        with np.errstate(all="ignore"):
            reader = gguf.GGUFReader(path)
    except Exception:  # it raises whatever comes, and is no oracle then
        return
    content = path.read_bytes()
    is_big = reader.byte_order == "S"
    for stored in reader.tensors:
        name = str(stored.name)
        tensor = checkpoint.tensors.get(name)
        _require(tensor is not None, f"{name!r} is not there")
        if tensor is None or (path != checkpoint.files[0].path and "general.alignment" not in reader.fields):
            continue  # another alignment may be the right one
        begin, nbytes = int(stored.data_offset), int(stored.n_bytes)
        _require(nbytes == tensor.nbytes, f"{name!r}: {nbytes} bytes, not {tensor.nbytes}")
        _require(begin == tensor.offset or not nbytes, f"{name!r}: begins at {begin}, not {tensor.offset}")
        raw = content[begin : begin + nbytes]
        if is_big:
            if tensor.ggml_type or tensor.dtype == "BF16":
                continue
            width = DTYPES[tensor.dtype].bits // 8
            raw = np.frombuffer(raw, np.uint8).reshape(-1, width)[:, ::-1].tobytes()
        _require(raw == contents[name], f"{name!r}: other bytes than the gguf package's")


def _compare_ftw(checkpoint: Checkpoint, contents: Contents) -> None:
    index = json.loads((checkpoint.folder / "freetoken_weight.json").read_bytes())
    region = b"".join((checkpoint.folder / shard["file"]).read_bytes() for shard in index["shards"])
    for entry in index["tensors"]:
        begin = int(entry["global_off"])
        stored = region[begin : begin + int(entry["nbytes"])]
        _require(stored == contents[entry["name"]], f"{entry['name']!r}: other bytes than the region's")


# --- verdicts and conversions -----------------------------------------------------------------------------------------


def _check_verdict(checkpoint: Checkpoint, verdict: Verdict) -> None:
    table = verdict.token_embedding
    for one in verdict.tables:
        _require(one.eligible == (one.reason == "ok"), f"{one.name!r}: eligible, and {one.reason}")
        _require(not (one.eligible and one.unreadable), f"{one.name!r}: eligible, and unreadable: {one.unreadable}")
        if one.eligible:
            _require(bool(one.rows and one.columns and one.nbytes), f"{one.name!r}: eligible, and empty")
    if not table.eligible or not checkpoint.config.is_gguf:
        return
    has_head = checkpoint.config.has_output_weight or any(name.startswith(_HEADS) for name in checkpoint.tensors)
    is_encoder = checkpoint.config.architecture in _ENCODERS
    _require(bool(has_head or is_encoder), f"{table.name!r}: eligible, though no head is stored")


_HEADS = ("output.", "lm_head.", "head.", "model.lm_head", "language_model.lm_head")


def _check_conversion(checkpoint: Checkpoint, path: Path, scratch: Path, verdict: Verdict, contents: Contents) -> None:
    try:
        ftw.verify(path)
    except ftw.FtwError as error:
        _check_message(error)
    choice = len(contents) + sum(map(len, contents.values()))
    embed, limit = _EMBEDS[choice % 3], _SHARD_LIMITS[choice // 3 % 3]
    target = scratch / "out"
    try:
        ftw.convert(path, target, embed=embed, shard_limit=limit)
    except ftw.NotEligibleError as error:
        _check_message(error)
        _require(embed == "host" and not verdict.token_embedding.eligible, f"not converted, though eligible: {error}")
        return
    except ftw.FtwError as error:
        _check_message(error)
        _require(not target.exists(), "a failed conversion left its target")
        return
    result = ftw.verify(target, against=path)
    _require(result.is_ok, f"what was written does not verify: {result.problems}")
    with ftw.open_checkpoint(target) as made:
        _require(_read(made) == contents, "what was written has other bytes")
        _compare(made, contents)
        # Under names that are not a GGUF's own an FTW has tables, where the GGUF itself has none.
        if verdict.token_embedding.name or checkpoint.format != "gguf":
            _compare_verdicts(verdict, ftw.inspect(made).verdict)
        _check_load(target, "auto", contents)


def _compare_verdicts(before: Verdict, after: Verdict) -> None:
    def told(verdict: Verdict) -> list[tuple[Any, ...]]:
        keys = ("name", "tensors", "role", "rows", "columns", "dtype", "nbytes", "eligible", "reason")
        first, *others = (tuple(getattr(table, key) for key in keys) for table in verdict.tables)
        return [first, *sorted(others, key=repr)]

    _require(told(before) == told(after), f"judged {told(before)}, converted {told(after)}")
    _require(before.tied == after.tied, f"tied is {before.tied}, converted {after.tied}")


# --- loading and looking up -------------------------------------------------------------------------------------------


def _check_load(path: Path, embed: str, contents: Contents) -> None:
    try:
        model = ftw.load(path, embed=embed, device="cpu")
    except ftw.NotEligibleError as error:
        _check_message(error)
        _require(embed == "host", f"embed={embed!r} is refused: {error}")
        return
    except ftw.FtwError as error:
        _check_message(error)
        return
    with model:
        tables = {table.name: table for table in model.verdict.tables}
        is_moved = model.verdict.token_embedding.name in model.tables
        _require(is_moved == (embed != "gpu" and model.verdict.token_embedding.eligible), "moved, or not, against it")
        for name, embedding in model.tables.items():
            _compare_rows(embedding, tables[name], contents)
        if not is_moved:
            with contextlib.suppress(ftw.NotEligibleError, ftw.CheckpointError):
                _compare_rows(model.embedding, model.verdict.token_embedding, contents)
        try:
            for name, weight in model.weights():
                _require(_bytes_of(weight) == contents[name], f"{name!r}: weight of other bytes")
        except ftw.CheckpointError as error:
            _check_message(error)  # a dtype that torch has not


def _compare_rows(embedding: Any, table: TableVerdict, contents: Contents) -> None:
    wanted = _rows(table, contents)
    rows = len(wanted)
    ids = torch.tensor([[0, rows - 1, rows // 2, 0], [-1, rows, rows + 1, -rows], [1, 2**31, -(2**31), 2**62]])
    found = embedding(ids)
    _require(found.shape == (3, 4, wanted.shape[1]), f"{table.name!r}: rows of shape {tuple(found.shape)}")
    for number, row in zip(ids.reshape(-1).tolist(), found.reshape(12, -1), strict=True):
        expected = wanted[number] if 0 <= number < rows else torch.zeros_like(wanted[0])
        same = _is_same(row, expected.to(row.dtype))
        _require(same, f"{table.name!r}: row {number} is {row[:8].tolist()}, not {expected[:8].tolist()}")


def _rows(table: TableVerdict, contents: Contents) -> torch.Tensor:
    """Return all rows of a table, without the padding after them, made from its bytes."""
    data = bytearray(b"".join(contents[name] for name in table.tensors))
    if table.dtype not in PACKED_TYPES:
        dtype = getattr(torch, str(DTYPES[table.dtype].torch_name))
        return torch.frombuffer(data, dtype=dtype).reshape(-1, table.columns or 1)[: table.rows]
    kind = GGMLQuantizationType[table.dtype]
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(data, np.uint8).reshape(-1, (table.columns or 1) // block_size * type_size)[: table.rows]
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.ascontiguousarray(quants.dequantize(blocks, kind), np.float32))


def _is_same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Compare bit by bit; only which NaN a NaN is may differ."""
    if found.dtype != wanted.dtype:
        return False
    is_nan = (found.double().isnan() & wanted.double().isnan()).unsqueeze(-1)
    same = found.contiguous().view(torch.uint8) == wanted.contiguous().view(torch.uint8)
    return bool((same.reshape(len(found), -1) | is_nan).all())


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


# --- the command line -------------------------------------------------------------------------------------------------


def _check_command_line(path: Path) -> None:
    """Run the commands that only read; each ends with one line on stderr, or none, and a status."""
    for arguments in (["inspect", str(path)], ["inspect", str(path), "--json"], ["verify", str(path), "--json"]):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
        _require(status in _EXIT_CODES, f"{arguments[0]} ends with {status}")
        _require("Traceback" not in err.getvalue(), f"{arguments[0]} prints a traceback")
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
