"""Stored bytes: what ftw reads of each tensor, and what other code reads out of the same files.

That is the safetensors library, the gguf package, and for the region of an FTW a few lines here.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import gguf
import numpy as np
import safetensors

from ftw.dtypes import DTYPES
from fuzz.findings import require

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ftw.checkpoint import Checkpoint

    Contents = Mapping[str, bytes]

_CHUNK_NBYTES = 1000


def read_contents(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Read every tensor, whole and once more in two pieces."""
    room = sum(file.nbytes for file in checkpoint.files)
    require(checkpoint.nbytes <= room, f"tensors of {checkpoint.nbytes} bytes in files of {room}")
    _check_extents(checkpoint)
    contents = {}
    for name, tensor in checkpoint.tensors.items():
        whole, pieces = bytearray(tensor.nbytes), bytearray(tensor.nbytes)
        checkpoint.read_into(name, whole)
        cut = tensor.nbytes * 2 // 3
        checkpoint.read_into(name, memoryview(pieces)[:cut], offset=0)
        checkpoint.read_into(name, memoryview(pieces)[cut:], offset=cut)
        require(whole == pieces, f"{name!r}: pieces differ from the whole")
        chunks = b"".join(bytes(chunk) for chunk in checkpoint.iter_chunks(name, _CHUNK_NBYTES))
        require(whole == chunks, f"{name!r}: chunks differ from the whole")
        contents[name] = bytes(whole)
    return contents


def _check_extents(checkpoint: Checkpoint) -> None:
    """Check that every tensor lies in its files, and no two share a byte."""
    taken: list[tuple[int, int, int]] = []
    for name, tensor in checkpoint.tensors.items():
        extents = checkpoint.extents(name)
        require(sum(extent.nbytes for extent in extents) == tensor.nbytes, f"{name!r}: extents of another size")
        taken += [(extent.file, extent.offset, extent.offset + extent.nbytes) for extent in extents if extent.nbytes]
    taken.sort()
    for file, begin, end in taken:
        require(0 <= begin < end <= checkpoint.files[file].nbytes, f"bytes {begin} to {end} lie outside of their file")
    for (file, _, end), (other, begin, _) in itertools.pairwise(taken):
        require(file != other or end <= begin, f"two tensors share the bytes {begin} to {end}")


def compare_contents(checkpoint: Checkpoint, contents: Contents) -> None:
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
        require(b"-0" in content, f"the safetensors library refuses what was taken: {error}")
        return
    shard = path.relative_to(checkpoint.folder).as_posix()
    mine = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.shard == shard}
    for name, tensor in mine.items():
        other = stored[name]
        require(tuple(other["shape"]) == tensor.shape, f"{name!r}: shape {other['shape']}, not {tensor.shape}")
        require(other["dtype"].replace("_", "") in tensor.dtype.replace("_", ""), f"{name!r}: {other['dtype']}")
        require(bytes(other["data"]) == contents[name], f"{name!r}: other bytes than the safetensors library's")
    missing = set(stored) - set(checkpoint.tensors)
    require(not missing, f"{missing} are not there")


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
        require(tensor is not None, f"{name!r} is not there")
        if tensor is None or (path != checkpoint.files[0].path and "general.alignment" not in reader.fields):
            continue  # another alignment may be the right one
        begin, nbytes = int(stored.data_offset), int(stored.n_bytes)
        require(nbytes == tensor.nbytes, f"{name!r}: {nbytes} bytes, not {tensor.nbytes}")
        require(begin == tensor.offset or not nbytes, f"{name!r}: begins at {begin}, not {tensor.offset}")
        raw = content[begin : begin + nbytes]
        if is_big:
            if tensor.ggml_type or tensor.dtype == "BF16":
                continue
            width = DTYPES[tensor.dtype].bits // 8
            raw = np.frombuffer(raw, np.uint8).reshape(-1, width)[:, ::-1].tobytes()
        require(raw == contents[name], f"{name!r}: other bytes than the gguf package's")


def _compare_ftw(checkpoint: Checkpoint, contents: Contents) -> None:
    index = json.loads((checkpoint.folder / "freetoken_weight.json").read_bytes())
    region = b"".join((checkpoint.folder / shard["file"]).read_bytes() for shard in index["shards"])
    for entry in index["tensors"]:
        begin = int(entry["global_off"])
        stored = region[begin : begin + int(entry["nbytes"])]
        require(stored == contents[entry["name"]], f"{entry['name']!r}: other bytes than the region's")
