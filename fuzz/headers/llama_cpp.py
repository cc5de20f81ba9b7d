"""llama.cpp's rules for a GGUF file, on a little-endian machine: of its `gguf.cpp`, and of its loader what it adds.

The loader adds that there is an architecture, of a name such as it knows, and that each tensor lies in the file.
"""

from __future__ import annotations

import math
import re
import struct
from typing import NamedTuple

import gguf

MAX_NAME = 64  # GGML_MAX_NAME
_MAX_DIMENSIONS = 4
_MAX_STRING = 1 << 30
_INT64 = (1 << 63) - 1
_STRING, _ARRAY = 8, 9
_NBYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ARCHITECTURE, ALIGNMENT = b"general.architecture", b"general.alignment"
_KNOWN = re.compile(rb"[a-z0-9_.-]{1,63}")  # as the names of all that it knows are


class RefusedError(Exception):
    """Why llama.cpp refuses a file."""


class Value(NamedTuple):
    """A value: the code of its type and its bytes, of an array only the code."""

    kind: int
    content: bytes

    @property
    def number(self) -> int:
        """Return it as an unsigned integer."""
        return int.from_bytes(self.content, "little")


class Tensor(NamedTuple):
    """An entry of a tensor; `sizes` are four."""

    name: bytes
    sizes: list[int]
    nbytes: int
    offset: int


class Header(NamedTuple):
    """What llama.cpp knows of a file."""

    values: dict[bytes, Value]
    tensors: list[Tensor]


class _Bytes:
    """A place in a file; reading beyond the end refuses it."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self.content) - self.at:
            raise RefusedError("ends too early")
        self.at += count
        return self.content[self.at - count : self.at]

    def number(self, letter: str) -> int:
        value: int = struct.unpack("<" + letter, self.take(struct.calcsize(letter)))[0]
        return value

    def string(self) -> bytes:
        length = self.number("Q")
        if length > _MAX_STRING:
            raise RefusedError("string too long")
        return self.take(length)


def refusal(content: bytes) -> str:
    """Return why llama.cpp refuses a file; empty if it does not."""
    try:
        read(content)
    except RefusedError as error:
        return str(error)
    return ""


def read(content: bytes) -> Header:
    """Read a file.

    Raises:
        RefusedError: llama.cpp refuses it.
    """
    data = _Bytes(content)
    if data.take(4) != b"GGUF":
        raise RefusedError("invalid magic characters")
    version = data.number("I")
    if not version & 0xFFFF:
        raise RefusedError("another byte order")
    if version not in (2, 3):
        raise RefusedError("version")
    num_tensors, num_keys = data.number("q"), data.number("q")
    if num_tensors < 0 or num_keys < 0:
        raise RefusedError("negative count")
    values = _read_keys(data, num_keys)
    kind, alignment = (values[ALIGNMENT].kind, values[ALIGNMENT].number) if ALIGNMENT in values else (4, 32)
    if kind != 4 or alignment & (alignment - 1) or not alignment:
        raise RefusedError("alignment")
    tensors: list[Tensor] = []
    for _ in range(num_tensors):
        tensors.append(_read_tensor(data))
        if any(tensors[-1].name == other.name for other in tensors[:-1]):
            raise RefusedError("duplicate tensor name")
    start = data.at + -data.at % alignment
    if tensors and start > len(data.content):
        raise RefusedError("failed to seek to beginning of data section")
    end = 0
    for tensor in tensors:
        if tensor.offset != end:
            raise RefusedError("unexpected offset")
        end += tensor.nbytes + -tensor.nbytes % alignment
        if start + tensor.offset + tensor.nbytes > len(data.content):
            raise RefusedError("not within the file bounds")
    architecture = values.get(_ARCHITECTURE)
    if architecture is None or architecture.kind != _STRING or not architecture.content:
        raise RefusedError("no architecture")
    if not _KNOWN.fullmatch(architecture.content):
        raise RefusedError("unknown model architecture")
    return Header(values, tensors)


def _read_keys(data: _Bytes, count: int) -> dict[bytes, Value]:
    values: dict[bytes, Value] = {}
    for _ in range(count):
        key = data.string()
        if not key or key in values:
            raise RefusedError("empty or duplicate key")
        kind, elements = data.number("I"), 1
        is_array = kind == _ARRAY
        if is_array:
            kind, elements = data.number("I"), data.number("Q")
        if kind == _ARRAY:
            raise RefusedError("array in an array")
        if kind != _STRING and kind not in _NBYTES:
            raise RefusedError("invalid type")
        if kind == _STRING:
            if elements > (len(data.content) - data.at) // 8:
                raise RefusedError("ends too early")
            value = b"".join([data.string() for _ in range(elements)])
        else:
            value = data.take(_NBYTES[kind] * elements)
        values[key] = Value(_ARRAY, b"") if is_array else Value(kind, value)
    return values


def _read_tensor(data: _Bytes) -> Tensor:
    name = data.string()
    if len(name) >= MAX_NAME:
        raise RefusedError("tensor name is too long")
    name = name.split(b"\0")[0]
    num_dimensions = data.number("I")
    if num_dimensions > _MAX_DIMENSIONS:
        raise RefusedError("number of dimensions")
    sizes = [data.number("q") for _ in range(num_dimensions)]
    sizes += [1] * (_MAX_DIMENSIONS - num_dimensions)
    if min(sizes) < 0 or math.prod(sizes) >= _INT64:
        raise RefusedError("number of elements")
    code = data.number("i")
    known = {kind.value: gguf.GGML_QUANT_SIZES[kind] for kind in gguf.GGMLQuantizationType}
    if code not in known:
        raise RefusedError("invalid ggml type")
    block, block_nbytes = known[code]
    if sizes[0] % block:
        raise RefusedError("not a multiple of block size")
    return Tensor(name, sizes, math.prod(sizes) // block * block_nbytes, data.number("Q"))
