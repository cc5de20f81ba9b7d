"""Tables of packed rows: random blocks, blocks of every interesting scale, and what the gguf package makes of them."""

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from ftw.ggml_types import PACKED_TYPES, ggml_types_by_name

# The installed gguf package may be older than the table, or newer: test_packed_lookup compares the two.
DECODABLE = {kind.name for kind in quants._type_traits if gguf.GGML_QUANT_SIZES[kind][0] > 1}
TYPES = [name for name in PACKED_TYPES if name in DECODABLE]

# Zero, denormals, the least normal, one, the greatest, infinity, a quiet and a signalling NaN; then the same negative.
_POSITIVE_HALVES = (0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x7E00, 0x7D01)
SPECIAL_HALVES = (*_POSITIVE_HALVES, *(half | 0x8000 for half in _POSITIVE_HALVES))

# Where in a block the halves lie that scale it. Written down again here: PACKED_TYPES has other words among them.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,),
    "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip


def random_table(name: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return uint8 `[rows, row_bytes]` of random blocks, some of whose scales are NaN."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, ggml_types_by_name()[name].row_nbytes(columns))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def special_table(name: str, columns: int) -> torch.Tensor:
    """Return random rows of `columns` values among whose blocks every special scale is found."""
    known = ggml_types_by_name()[name]
    scales = _special_scales(name)
    blocks_per_row = columns // known.block_size
    table = random_table(name, -(-len(scales) // blocks_per_row), columns, seed=1)
    blocks = table.view(-1, known.type_size).numpy()
    for number, block in enumerate(blocks):
        _set_scales(name, block, scales[number % len(scales)])
    return table


def decoded(table: torch.Tensor, name: str) -> torch.Tensor:
    """Return every row of a table as the gguf package decodes it: float32, on the CPU."""
    with np.errstate(all="ignore"):  # infinite and NaN scales are decoded like any other
        values = quants.dequantize(table.cpu().numpy(), GGMLQuantizationType[name])
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def pick(rows: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the decoded rows of `ids`, rounded as torch does, on the rows' device; zeros for ids outside."""
    flat = ids.reshape(-1).to(rows.device, torch.int64)
    is_inside = (flat >= 0) & (flat < rows.shape[0])
    found = torch.zeros(ids.numel(), rows.shape[1], dtype=dtype, device=rows.device)
    found[is_inside] = rows[flat[is_inside]].to(dtype)
    return found.reshape(*ids.shape, rows.shape[1])


def expected(table: torch.Tensor, ids: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return what a lookup has to find, on the CPU."""
    return pick(decoded(table, name), ids, dtype)


def dtype_name(value: object) -> str:
    """Return what a test of a dtype is called."""
    return str(value).removeprefix("torch.")


def assert_equal_rows(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare bit by bit; only which NaN a NaN is may differ."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    found = found.to(wanted.device)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    is_equal = (found.view(bits) == wanted.view(bits)) | (found.isnan() & wanted.isnan())
    if not is_equal.all():
        where = tuple((~is_equal).nonzero()[0].tolist())
        count = int((~is_equal).sum())
        raise AssertionError(f"{count} of {found.numel()} differ; at {where} {found[where]!r}, not {wanted[where]!r}")


def _special_scales(name: str) -> list[tuple[int, ...]]:
    """Return scales for one block each: halves, or bytes of a type whose scales are bytes."""
    if name == "MXFP4":
        return [(exponent,) for exponent in range(256)]
    if name == "NVFP4":
        return [tuple((first + 64 * number) % 256 for number in range(4)) for first in range(256)]
    if len(_HALVES.get(name, (0,))) == 1:
        return [(half,) for half in SPECIAL_HALVES]
    count = len(SPECIAL_HALVES)  # each with itself, its negative, and some that differ
    return [(SPECIAL_HALVES[i], SPECIAL_HALVES[(i + step) % count]) for i in range(count) for step in (0, 1, 5, 9, 13)]


def _set_scales(name: str, block: np.ndarray, scales: tuple[int, ...]) -> None:
    """Write scales into a block, in place."""
    if name in ("MXFP4", "NVFP4"):
        block[: len(scales)] = scales
    elif name == "IQ1_M":  # four words, whose upper nibbles are the scale, the lowest first
        for number in range(4):
            nibble = (scales[0] >> (4 * number)) & 15
            block[49 + 2 * number] = (block[49 + 2 * number] & 15) | (nibble << 4)
    else:
        for offset, half in zip(_HALVES[name], scales, strict=True):
            block[offset : offset + 2] = half & 255, half >> 8
