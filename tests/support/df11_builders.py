"""DF11 from small codes, by a serial encoder; and a serial decoder, slow and obvious, that ftw's is held against."""

import random
import struct
from pathlib import Path
from typing import Any

import torch
from builders import llama_config, write_checkpoint
from places import DATA
from safetensors import safe_open

import ftw

MODULE = "model.embed_tokens"
TABLE = f"{MODULE}.weight"
BLOCK_BITS = 8 * 4096
DF11_CONFIG = {
    "version": "0.5.0", "threads_per_block": [512], "bytes_per_thread": 8,
    "pattern_dict": {"model\\.embed_tokens": [], "lm_head": []},
}  # fmt: skip
Parts = dict[str, torch.Tensor]
Code = dict[int, str]  # the bits of each symbol, as "0" and "1"


# Codes of 1 to 32 bits, and one of 32 that is left for the end.
UNEVEN: Code = {100 + depth: "1" * depth + "0" for depth in range(32)}
UNEVEN_END = "1" * 32


def as_u8(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def make_luts(code: Code) -> list[list[int]]:
    """Return lookup tables and lengths; slots that no code needs hold a symbol at random, as left over."""
    prefixes = [""]
    for bits in code.values():
        prefixes += [bits[:end] for end in range(8, len(bits), 8) if bits[:end] not in prefixes]
    prefixes.sort(key=len)
    tables = [[max(code)] * 256 for _ in prefixes]
    for symbol, bits in code.items():
        own = (len(bits) - 1) // 8 * 8
        rest = bits[own:]
        for byte in range(256):
            if f"{byte:08b}".startswith(rest):
                tables[prefixes.index(bits[:own])][byte] = symbol
        for end in range(8, own + 1, 8):
            tables[prefixes.index(bits[: end - 8])][int(bits[end - 8 : end], 2)] = 256 - prefixes.index(bits[:end])
    return [*tables, [len(code.get(symbol, "")) for symbol in range(256)]]


def encode(code: Code, symbols: list[int], *, end: str = "", seed: int = 0) -> Parts:
    """Return the parts of a module that holds these exponents; the code of the `end` fills its last byte up."""
    pieces, starts, place = [], [], 0
    for symbol in symbols:
        starts.append(place)
        pieces.append(code[symbol])
        place += len(code[symbol])
    if place % 8:
        starts.append(place)  # as dfloat11 counts, the end begins in a chunk too
        pieces.append((end + "0" * 8)[: -place % 8])
    stream = "".join(pieces)
    data = int(stream, 2).to_bytes(len(stream) // 8, "big")
    num_blocks = -(-len(data) // 4096)
    gaps, positions = [0] * (512 * num_blocks), []
    for start in reversed(starts):
        gaps[start // 64] = start % 64
    for element, start in enumerate(starts):
        if start // BLOCK_BITS == len(positions):
            positions.append(min(element, len(symbols)))
    packed = int("".join(f"{gap:05b}" for gap in gaps), 2).to_bytes(320 * num_blocks, "big")
    return {
        "luts": torch.tensor(make_luts(code), dtype=torch.uint8),
        "encoded_exponent": as_u8(data),
        "sign_mantissa": as_u8(random.Random(seed).randbytes(len(symbols))),
        "output_positions": as_u8(struct.pack(f"<{len(positions) + 1}I", *positions, len(symbols))),
        "gaps": as_u8(packed),
        "split_positions": torch.empty(0, dtype=torch.int64),
    }


def decode(parts: Parts) -> bytes:
    """Return the plain bf16 bytes, decoded bit by bit from the first block to the last."""
    *tables, lengths = parts["luts"].tolist()
    stream, others = parts["encoded_exponent"].numpy().tobytes(), parts["sign_mantissa"].tolist()
    data, place = stream + bytes(4), 0
    elements = []
    for other in others:
        window = int.from_bytes(data[place // 8 : place // 8 + 5], "big") >> (8 - place % 8) & 0xFFFFFFFF
        value, depth = tables[0][window >> 24], 0
        while value >= 240:
            depth += 1
            value = tables[256 - value][window >> (24 - 8 * depth) & 0xFF]
        place += lengths[value]
        elements.append((other & 0x80) << 8 | value << 7 | other & 0x7F)
    return struct.pack(f"<{len(elements)}H", *elements)


def uneven_parts(num_symbols: int) -> Parts:
    return encode(UNEVEN, random.Random(0).choices(list(UNEVEN), k=num_symbols), end=UNEVEN_END)


def read_fixture(name: str) -> tuple[Parts, dict[str, str]]:
    """Return parts that dfloat11 0.5.0 wrote (`data/make_df11.py`), and rows, columns and sha256 of the plain table."""
    with safe_open(DATA / f"df11-0.5.0-{name}.safetensors", "pt") as file:
        return {key.removeprefix(f"{MODULE}."): file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def under(path: str, parts: Parts) -> dict[str, torch.Tensor]:
    return {f"{path}.{suffix}": tensor.clone() for suffix, tensor in parts.items()}


def write_df11(
    folder: Path, parts: Parts, shape: tuple[int, int] | None, rest: Parts | None = None, **config: Any
) -> Path:
    """Write a folder as dfloat11 does: the table in a file of its own, all other tensors in model.safetensors."""
    known = {} if shape is None else {"vocab_size": shape[0], "hidden_size": shape[1]}
    whole = llama_config(**{**known, "dfloat11_config": DF11_CONFIG, **config})
    write_checkpoint(folder, under(MODULE, parts), file="model_embed_tokens.safetensors")
    others = {"model.norm.weight": torch.ones(8)} if rest is None else rest
    return write_checkpoint(folder, others, whole)


def read_all(folder: Path) -> bytes:
    with ftw.open_checkpoint(folder, decode_df11=True) as checkpoint:
        buffer = bytearray(checkpoint.tensors[TABLE].nbytes)
        checkpoint.read_into(TABLE, buffer)
    return bytes(buffer)
