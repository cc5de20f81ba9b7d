"""GGUF files from small specs: bytes piece by piece, any of which can be wrong, and files by the gguf package."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFEndian, GGUFValueType

from ftw.readers.gguf.reader import GgufReader
from ftw.tensors import TensorInfo

F32, F16, Q4_0, Q8_0, Q6_K, BF16 = 0, 1, 2, 8, 14, 30
# What a value is, to its code and the struct module's letter.
KINDS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"),
    "bool": (7, "B"), "str": (8, ""), "array": (9, ""), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip


def text(content: str | bytes, *, order: str = "<", length: int | None = None) -> bytes:
    """Return a string; `length` is what it claims to be."""
    encoded = content.encode() if isinstance(content, str) else content
    return struct.pack(order + "Q", len(encoded) if length is None else length) + encoded


def value(kind: str, content: Any, *, order: str = "<", count: int | None = None, code: int | None = None) -> bytes:
    """Return a value without its type; an array's `content` is its elements' kind and they, `count` what it claims."""
    letter = KINDS[kind][1]
    if kind == "str":
        return text(content, order=order)
    if kind != "array":
        return struct.pack(order + letter, content)
    of, elements = content
    head = struct.pack(order + "IQ", KINDS[of][0] if code is None else code, len(elements) if count is None else count)
    return head + b"".join(value(of, element, order=order) for element in elements)


def kv(
    key: str | bytes, kind: str, content: Any, *, order: str = "<", length: int | None = None, **fields: Any
) -> bytes:
    """Return a key-value; `length` is what its key claims, `fields` go to `value`."""
    return (
        text(key, order=order, length=length)
        + struct.pack(order + "I", KINDS[kind][0])
        + value(kind, content, order=order, **fields)
    )


def entry(
    name: str | bytes = "t",
    sizes: Sequence[int] = (8,),
    code: int = F32,
    offset: int = 0,
    *,
    order: str = "<",
    dimensions: int | None = None,
    length: int | None = None,
) -> bytes:
    """Return a tensor's entry, sizes fastest first; `dimensions` and `length`, of the name, are what it claims."""
    count = len(sizes) if dimensions is None else dimensions
    return text(name, order=order, length=length) + struct.pack(f"{order}I{len(sizes)}QIQ", count, *sizes, code, offset)


ARCHITECTURE = kv("general.architecture", "str", "llama")


def gguf_bytes(
    entries: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    kvs: Sequence[bytes] = (ARCHITECTURE,),
    magic: bytes = b"GGUF",
    version: int = 3,
    order: str = "<",
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """Return a file; `num_tensors` and `num_keys` are what it claims, `alignment` pads its header alone."""
    tensors = len(entries) if num_tensors is None else num_tensors
    keys = len(kvs) if num_keys is None else num_keys
    header = magic + struct.pack(order + "IQQ", version, tensors, keys) + b"".join((*kvs, *entries))
    return header + bytes(-len(header) % alignment) + data if entries else header


def shard_kvs(number: int, count: int, num_tensors: int, *, order: str = "<") -> list[bytes]:
    """Return what a shard says of its place; the number is from 0 on."""
    return [
        kv("split.no", "u16", number, order=order),
        kv("split.count", "u16", count, order=order),
        kv("split.tensors.count", "i32", num_tensors, order=order),
    ]


class Blocks(NamedTuple):
    """Packed rows for `write_gguf`: bytes `[..., bytes of a row]` of a type."""

    data: np.ndarray
    ggml_type: GGMLQuantizationType


def random_blocks(ggml_type: GGMLQuantizationType, rows: int = 3, blocks: int = 2, *, seed: int = 0) -> Blocks:
    """Return rows of random bytes."""
    shape = (rows, blocks * gguf.GGML_QUANT_SIZES[ggml_type][1])
    return Blocks(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), ggml_type)


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray | Blocks],
    kvs: Mapping[str, tuple[GGUFValueType, Any]] | None = None,
    *,
    architecture: str = "llama",
    alignment: int | None = None,
    order: GGUFEndian = GGUFEndian.LITTLE,
    **splitting: Any,
) -> Path:
    """Write a file, or shards, with the gguf package's writer, and return `path`."""
    writer = gguf.GGUFWriter(path, architecture, endianess=order, **splitting)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, (kind, content) in (kvs or {}).items():
        writer.add_key_value(key, content, kind)
    for name, tensor in tensors.items():
        if isinstance(tensor, Blocks):
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.ggml_type)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(reader: GgufReader, name: str) -> bytes:
    """Return the bytes of a tensor as they lie in its file."""
    return b"".join(
        reader.files[extent.file].read(extent.offset, extent.nbytes) for extent in reader.extents(reader.tensors[name])
    )


def little_endian(reader: GgufReader, name: str) -> bytes:
    """Return the bytes of a tensor, rearranged as its `block_order` says."""
    tensor: TensorInfo = reader.tensors[name]
    order = reader.block_order(tensor)
    data = np.frombuffer(stored(reader, name), dtype=np.uint8)
    return data.tobytes() if order is None else data.reshape(-1, len(order))[:, order].tobytes()
