"""Drawn GGUF files, read by ftw, by llama.cpp's rules and by the gguf package; see `ftw.readers.gguf.header`."""

from __future__ import annotations

import math
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf_builder import KINDS, entry, gguf_bytes, kv, text, value

from fuzz.findings import require
from fuzz.headers import llama_cpp
from fuzz.headers.differences import Difference, compare_answers

if TYPE_CHECKING:
    from random import Random

    import ftw

NAME = "model.gguf"
_SIZES = {kind.value: gguf.GGML_QUANT_SIZES[kind] for kind in gguf.GGMLQuantizationType}
_NUMBERS = (0, 1, 2, 3, 7, 8, 9, 31, 32, 64, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 62, 1 << 63, (1 << 64) - 1)
_TEXTS = (
    b"", b"a", b"llama", b"caf\xe9", "ü".encode(), b"a\0b", b"a\0c", b"\0", b"\xed\xa0\x80", b"x" * 63, b"x" * 64,
    "ü".encode() * 32, b"k" * 65535, b"k" * 65536, b"token_embd.weight",
)  # fmt: skip


class _File:
    """What a file is made of, until it is written."""

    def __init__(self) -> None:
        self.order = "<"
        self.version = 3
        self.alignment = 32
        self.keys: list[bytes] = []
        self.tensors: list[dict[str, Any]] = []
        self.data = b""
        self.counts: dict[str, int] = {}

    def render(self) -> bytes:
        entries = [entry(order=self.order, **fields) for fields in self.tensors]
        return gguf_bytes(
            entries, self.data, kvs=self.keys, version=self.version, order=self.order, alignment=self.alignment,
            **self.counts,
        )  # fmt: skip


def draw(random: Random) -> bytes:
    """Return a file: an intact one, in which up to three things were changed."""
    file = _intact(random)
    for _ in range(random.choice((0, 1, 1, 1, 1, 2, 3))):
        random.choice(_CHANGES)(random, file)
    content = file.render()
    if random.random() < 0.1:
        content = _with_other_bytes(random, content)
    return content[: random.randrange(len(content))] if random.random() < 0.05 else content


def compare(content: bytes, checkpoint: ftw.Checkpoint | None, error: ftw.FtwError | None) -> None:
    """Compare what ftw made of a file with llama.cpp's rules, and tensors with the gguf package's.

    Raises:
        FindingError: They differ, and no listed difference says so.
    """
    compare_answers(content, error, llama_cpp.refusal(content), read_here=READ_HERE, read_there=READ_THERE)
    if checkpoint is None:
        return
    reader = _package_reader(checkpoint.files[0].path)
    if reader is None:
        return
    names = [str(tensor.name) for tensor in reader.tensors]
    require(sorted(names) == sorted(checkpoint.tensors), f"tensors {names}, not {list(checkpoint.tensors)}")
    for stored in reader.tensors:
        tensor = checkpoint.tensors[str(stored.name)]
        shape = tuple(int(size) for size in reversed(stored.shape))
        require(shape == (tensor.logical_shape or tensor.shape), f"{tensor.name!r}: shape {shape}, not {tensor.shape}")
        require(stored.n_bytes == tensor.nbytes, f"{tensor.name!r}: {stored.n_bytes} bytes, not {tensor.nbytes}")
        kind = tensor.ggml_type or tensor.dtype
        require(stored.tensor_type.name == kind, f"{tensor.name!r}: {stored.tensor_type.name}, not {kind}")
        if reader.byte_order == "I" and tensor.nbytes:
            found = bytearray(tensor.nbytes)
            checkpoint.read_into(tensor.name, found)
            require(stored.data.tobytes() == found, f"{tensor.name!r}: other bytes than the gguf package's")


def _package_reader(path: Path) -> gguf.GGUFReader | None:
    try:
        with np.errstate(all="ignore"):
            return gguf.GGUFReader(path)
    except Exception:  # whatever comes
        return None


def _intact(random: Random) -> _File:
    file = _File()
    file.order = random.choice("<<<<<<<>")
    file.version = random.choice((2, 3, 3, 3))
    file.keys = [kv("general.architecture", "str", "llama", order=file.order)]
    if random.random() < 0.2:
        file.alignment = random.choice((1, 8, 64))
        file.keys.append(kv("general.alignment", "u32", file.alignment, order=file.order))
    for number in range(random.randrange(4)):
        _add_key(random, file, f"k{number}".encode())
    for number in range(random.choice((0, 1, 1, 1, 2, 3))):
        code = random.choice(list(_SIZES))
        block, block_nbytes = _SIZES[code]
        rest = [random.choice((1, 1, 2, 3)) for _ in range(random.randrange(4))]
        sizes = [block * random.choice((1, 2)), *rest]
        if block == 1 and code != gguf.GGMLQuantizationType.BF16 and random.random() < 0.2:  # the package has no such
            sizes = []
        if random.random() < 0.1:
            sizes = [*sizes[:3], 0] if sizes else []
        offset = len(file.data)
        count = int(np.prod(sizes, dtype=object)) if sizes else 1
        nbytes = count // block * block_nbytes
        file.data += random.randbytes(nbytes) + bytes(-nbytes % file.alignment)
        file.tensors.append({"name": f"t{number}", "sizes": sizes, "code": code, "offset": offset})
    return file


def _with_other_bytes(random: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2))):
        place = random.randrange(min(len(changed), 300))
        changed[place : place + random.choice((0, 1))] = random.choice((b"", b"\0", b"\1", b"\xff", b"\x08", b"\x80"))
    return bytes(changed)


def _content(random: Random, kind: str) -> Any:
    """Return a value of a kind."""
    if kind == "str":
        return random.choice(_TEXTS)
    if kind == "array":
        of = random.choice([one for one in KINDS if one != "array" or random.random() < 0.3])
        return of, [_content(random, of) for _ in range(random.choice((0, 1, 1, 3)))]
    if kind in ("f32", "f64"):
        return 1.5
    return random.choice((0, 1, 1, 2, 127)) if kind != "bool" else random.choice((0, 1, 0, 1, 0, 1, 2))


def _add_key(random: Random, file: _File, name: bytes | None = None) -> None:
    kind = random.choice(list(KINDS))
    name = random.choice((*_TEXTS, b"general.alignment", b"general.architecture")) if name is None else name
    file.keys.append(kv(name, kind, _content(random, kind), order=file.order))


def _change_key(random: Random, file: _File) -> None:
    code = random.choice((0, 4, 7, 8, 9, 12, 13, 99, 0xFFFFFFFF))
    content = text(b"odd") + struct.pack(file.order + "I", code)
    more = struct.pack(file.order + "IQ", random.choice((0, 4, 7, 8, 9, 13)), random.choice(_NUMBERS))
    file.keys.append(content + more + random.choice((b"", bytes(8), value("str", "ab", order=file.order))))


def _change_alignment(random: Random, file: _File) -> None:
    kind, content = random.choice((("u32", 1), ("u32", 0), ("u32", 24), ("u32", 64), ("u64", 32), ("u32", 1 << 21)))
    file.keys.append(kv("general.alignment", kind, content, order=file.order))


def _shuffle_keys(random: Random, file: _File) -> None:
    random.shuffle(file.keys)


def _drop_key(random: Random, file: _File) -> None:
    if file.keys:
        del file.keys[random.randrange(len(file.keys))]


def _change_count(random: Random, file: _File) -> None:
    name, found = random.choice((("num_tensors", len(file.tensors)), ("num_keys", len(file.keys))))
    file.counts[name] = random.choice((found + 1, max(found - 1, 0), *_NUMBERS))


def _change_version(random: Random, file: _File) -> None:
    file.version = random.choice((0, 1, 2, 3, 4, 1 << 16, 3 << 24))


def _change_tensor(random: Random, file: _File) -> None:
    if not file.tensors:
        return
    tensor = random.choice(file.tensors)
    key = random.choice(("name", "sizes", "code", "offset", "dimensions", "length"))
    if key == "name":
        tensor[key] = random.choice((*_TEXTS, "t0", b"t0\0x"))
    elif key == "sizes":
        tensor[key] = [random.choice((size, size, random.choice(_NUMBERS))) for size in tensor[key]]
    elif key == "code":
        tensor[key] = random.choice((*_SIZES, 4, 5, 36, 99, 0xFFFFFFFF))
    elif key == "offset":
        tensor[key] = random.choice((tensor[key] + 32, tensor[key] + 1, 0, *_NUMBERS))
    else:
        tensor[key] = random.choice((0, 1, 2, 4, 5, 64, *_NUMBERS)) & (0xFFFFFFFF if key == "dimensions" else -1)


def _add_dimension(random: Random, file: _File) -> None:
    if file.tensors:
        tensor = random.choice(file.tensors)
        tensor["sizes"] = [*tensor["sizes"], random.choice((0, 1, 1, 2, 1 << 32, 1 << 62))]


def _shuffle_tensors(random: Random, file: _File) -> None:
    random.shuffle(file.tensors)


def _change_data(random: Random, file: _File) -> None:
    if file.tensors and random.random() < 0.5:
        gap = random.choice((32, 64))
        file.tensors[-1]["offset"] += gap
        file.data += bytes(gap)
    else:
        file.data = random.choice((file.data[:-1], file.data + b"x", file.data.rstrip(b"\0"), b""))


_CHANGES = (
    _add_key, _change_key, _change_alignment, _shuffle_keys, _drop_key, _change_count, _change_version, _change_tensor,
    _change_tensor, _change_tensor, _change_tensor, _add_dimension, _shuffle_tensors, _change_data, _change_data,
)  # fmt: skip


def _is_read_by_the_package(content: bytes) -> bool:
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(content)
        file.flush()
        return _package_reader(Path(file.name)) is not None


def _always(_: bytes) -> bool:
    return True


def _has_names_beyond_utf8(content: bytes) -> bool:
    header = llama_cpp.read(content)
    names = [*header.values, *(tensor.name for tensor in header.tensors)]
    return any(name.decode(errors="replace").encode() != name for name in names) or b"\0" in content


def _has_long_key(content: bytes) -> bool:
    return any(len(key) > 65535 for key in llama_cpp.read(content).values)


def _has_odd_bool(content: bytes) -> bool:
    return any(one.kind == 7 and one.number > 1 for one in llama_cpp.read(content).values.values())


def _has_empty_name(content: bytes) -> bool:
    return any(not tensor.name for tensor in llama_cpp.read(content).tensors)


def _has_large_shape(content: bytes) -> bool:
    shapes = [tensor.sizes for tensor in llama_cpp.read(content).tensors]
    return any(0 in sizes and math.prod(size or 1 for size in sizes) >= 1 << 63 for sizes in shapes)


def _has_large_alignment(content: bytes) -> bool:
    return llama_cpp.read(content).values[llama_cpp.ALIGNMENT].number > 1 << 20


READ_HERE = (
    Difference("another byte order", _is_read_by_the_package),
    Difference("unexpected offset", _is_read_by_the_package),
    Difference("array in an array", _is_read_by_the_package),
    Difference("duplicate tensor name", _is_read_by_the_package),
    Difference("failed to seek to beginning", _is_read_by_the_package),
    Difference("not within the file bounds", _is_read_by_the_package),
    Difference("unknown model architecture", _always),
)
READ_THERE = (
    Difference("its name is not UTF-8", _has_names_beyond_utf8),
    Difference("its name is 65536 bytes long", _has_long_key),
    Difference("holds a bool of", _has_odd_bool),
    Difference("its name is empty", _has_empty_name),
    Difference("has 2^63 elements or more", _has_large_shape),
    Difference("general.alignment: is", _has_large_alignment),
)
