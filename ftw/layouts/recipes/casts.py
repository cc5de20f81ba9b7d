"""Casts of element types, as torch makes them: to the nearest, ties to the even one; a NaN becomes the quiet one."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from numpy.typing import NDArray

    Bytes: TypeAlias = NDArray[np.uint8]
    Floats: TypeAlias = NDArray[np.float32]

_E4M3_BIAS, _E4M3_MANTISSA_BITS = 7, 3
_E8M0_BIAS = 127


def _bf16_to_floats(stored: Bytes) -> Floats:
    return (stored.view("<u2").astype(np.uint32) << 16).view(np.float32)


@cache
def _e4m3_values() -> Floats:
    """Return the value of each byte of F8_E4M3, which has no infinity, and NaN where all other bits are set."""
    codes = np.arange(256)
    exponents, mantissas = codes >> _E4M3_MANTISSA_BITS & 15, codes & 7
    is_normal = exponents > 0
    scales = np.exp2(np.where(is_normal, exponents, 1) - _E4M3_BIAS - _E4M3_MANTISSA_BITS)
    values = (mantissas + np.where(is_normal, 8, 0)) * scales * np.where(codes < 128, 1, -1)
    values[codes & 127 == 127] = np.nan
    return np.asarray(values, np.float32)


@cache
def _e8m0_values() -> Floats:
    """Return the value of each byte of F8_E8M0, a power of two; 255 is NaN."""
    values = np.exp2(np.arange(256, dtype=np.float64) - _E8M0_BIAS)
    values[255] = np.nan
    return values.astype(np.float32)


_TO_FLOATS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": lambda stored: stored.view("<f4").astype(np.float32, copy=False),
    "F16": lambda stored: stored.view("<f2").astype(np.float32),
    "BF16": _bf16_to_floats,
    "F8_E4M3": lambda stored: _e4m3_values()[stored],
    "F8_E8M0": lambda stored: _e8m0_values()[stored],
}


def to_floats(stored: Bytes, dtype: str) -> Floats:
    """Return stored elements as float32; `dtype` is F32, F16, BF16, F8_E4M3 or F8_E8M0."""
    return _TO_FLOATS[dtype](stored)


def from_floats(floats: Floats, dtype: str) -> Bytes:
    """Return float32 elements as they are stored in `dtype`, F32 or BF16."""
    if dtype == "F32":
        return np.ascontiguousarray(floats, "<f4").view(np.uint8).reshape(-1)
    bits = np.ascontiguousarray(floats, np.float32).view(np.uint32).reshape(-1)
    rounded = bits + (0x7FFF + (bits >> 16 & 1))
    is_nan = bits & 0x7FFFFFFF > 0x7F800000
    return np.where(is_nan, 0x7FC0, rounded >> 16).astype("<u2").view(np.uint8)


def cast(stored: Bytes, before: str, after: str) -> Bytes:
    """Return stored elements of one type as those of another."""
    return from_floats(to_floats(stored, before), after)
