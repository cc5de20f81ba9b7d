"""Dummy contents: random values of a tensor's own encoding, for benchmarks that need shapes and placement alone.

Values come from a pool that is repeated: floating-point elements are normal with a standard deviation of 0.02, as
models are initialised; packed blocks are random ones whose values are finite and at most 1; all other bits are random.
Every tensor begins elsewhere in the pool, by its name, so processes agree.
"""

from __future__ import annotations

import functools
import zlib
from typing import TYPE_CHECKING

import torch

from ftw.dtypes import DTYPES, FLOAT8_DTYPES, FLOAT_DTYPES
from ftw.ggml_types import PACKED_TYPES, ggml_types_by_name

if TYPE_CHECKING:
    from ftw.tensors import TensorInfo

_POOL_ELEMENTS = (1 << 20) - 1  # odd, so that the rows of a table differ
_POOL_BLOCKS = 1 << 15
_SCALE = 0.02
_SEED = 0
_COMPLEX = frozenset({"C64"})


def fill_dummy(target: torch.Tensor, tensor: TensorInfo) -> None:
    """Fill the bytes of a tensor: `target` is uint8, contiguous, `[nbytes]`, on any device; or several tensors long."""
    unit_nbytes, pool = _make_pool(tensor.dtype, tensor.ggml_type)
    flat = target.reshape(-1)
    units = pool.numel() // unit_nbytes
    shift = zlib.crc32(tensor.name.encode("utf-8", "surrogatepass")) % units * unit_nbytes
    start = pool.roll(-shift)[: flat.numel()]
    flat[: start.numel()].copy_(start)
    done = start.numel()
    while done < flat.numel():  # what is there doubles each time
        nbytes = min(done, flat.numel() - done)
        flat[done : done + nbytes].copy_(flat[:nbytes])
        done += nbytes


@functools.lru_cache(maxsize=8)
def _make_pool(dtype: str, ggml_type: str | None) -> tuple[int, torch.Tensor]:
    """Return the bytes of one element or block, and a pool of them as uint8."""
    if ggml_type in PACKED_TYPES:
        return ggml_types_by_name()[ggml_type].type_size, _make_blocks(ggml_type)
    generator = torch.Generator().manual_seed(_SEED)
    known = DTYPES[dtype]
    if dtype in FLOAT_DTYPES | FLOAT8_DTYPES | _COMPLEX:
        values = torch.randn(_POOL_ELEMENTS, generator=generator) * _SCALE
        pool = values.to(getattr(torch, str(known.torch_name))).view(torch.uint8)
    else:
        nbytes = _POOL_ELEMENTS * max(1, known.bits // 8)
        pool = torch.randint(0, 2 if dtype == "BOOL" else 256, (nbytes,), generator=generator, dtype=torch.uint8)
        if dtype == "F8_E8M0":  # powers of two, 127 is one
            pool = pool % 8 + 120
    return max(1, known.bits // 8), pool


def _make_blocks(ggml_type: str) -> torch.Tensor:
    """Return packed blocks: out of random ones those whose values the gguf package's decoder finds finite and small."""
    import numpy as np
    from gguf import GGMLQuantizationType, quants

    generator = np.random.default_rng(_SEED)
    known = ggml_types_by_name()[ggml_type]
    blocks = generator.integers(0, 256, (_POOL_BLOCKS, known.type_size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = np.abs(quants.dequantize(blocks, GGMLQuantizationType[ggml_type])).max(axis=1)
    chosen = blocks[(values > 0) & (values <= 1)]  # a NaN is neither
    return torch.from_numpy(chosen[: len(chosen) - 1 + len(chosen) % 2].reshape(-1).copy())
