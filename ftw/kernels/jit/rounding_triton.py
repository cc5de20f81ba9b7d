"""Between float32 and narrower floats, where Triton's interpreter is not what GPUs are."""

from __future__ import annotations

import os

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """Round float32 to nearest, ties to even; Triton's interpreter would cut bfloat16 off."""
    if dtype == tl.bfloat16 and IS_INTERPRETED:
        bits = values.to(tl.int32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        upper = tl.where(values == values, upper, 0x7FC0)  # of a NaN, the sum can be an infinity
        result = upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = values.to(dtype)
    return result


@triton.jit
def widened(values):
    """Convert to float32, which is exact; Triton's interpreter would change subnormals of bfloat16."""
    if values.dtype == tl.bfloat16 and IS_INTERPRETED:
        result = (values.to(tl.uint16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        result = values.to(tl.float32)
    return result
