"""Compile every kernel ahead of time for one target, without a GPU; run by test_kernels_compile in a process of its
own, since Triton decides on import whether it interprets kernels. Usage: compile_kernels.py TARGET."""

import re
import sys
from typing import Any

import triton
from packed_tables import TYPES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ftw.ggml_types import ggml_types_by_name
from ftw.kernels import ggml_decoders_triton
from ftw.kernels.lookup_triton import lookup_kernel
from ftw.kernels.packed_lookup_triton import UNITS, packed_lookup_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
}
ID_TYPES = ("i32", "i64")
TYPES_OF_EVERY_OUT = ("Q4_K", "MXFP4")
LINE_NBYTES = 128

# A multiplication and an addition in one, rounded once. AMD's v_fma_mix converts from and to halves on the way; it is
# but a product where it adds minus zero, neg(0), and but a sum where it multiplies by 1.0.
_FUSED = {
    "cuda": re.compile(r"\bfma\.rn\S*\.f32\b.*"),
    "hip": re.compile(r"\bv_(?:pk_|dual_)?(?:fma|fmac|mad|mac)\w*_f(?:16|32)\b.*"),
}
_NOT_FUSED = re.compile(r"v_fma_mix(?:_f32|lo_f16|hi_f16) \S+, \S+, (?:1\.0, \S+|\S+, neg\(0\))(?: |$)")


def main(target_name: str) -> None:
    """Print one line for each compiled variant: kernel, what it is for, size of the machine code, fused operations."""
    target = TARGETS[target_name]
    for unit in ("u8", "i16", "i32"):
        for id_type in ID_TYPES:
            pointers = {"table_ptr": f"*{unit}", "ids_ptr": f"*{id_type}", "out_ptr": f"*{unit}"}
            for first_id in ID_TYPES:
                sizes = {"first_id": first_id, "table_rows": "i32", "row_units": "i32"}
                compiled = _compile(lookup_kernel, target, pointers | sizes, {"BLOCK": 1024})
                print("lookup", unit, id_type, first_id, *_describe(compiled, target))
    for name in TYPES:
        for is_staged in (False, True):
            for out in ("bf16", "fp32", "fp16") if name in TYPES_OF_EVERY_OUT else ("bf16",):
                print(
                    "packed_lookup",
                    name,
                    is_staged,
                    out,
                    *_describe(_compile_packed(name, is_staged, out, target), target),
                )


def _compile_packed(name: str, is_staged: bool, out: str, target: GPUTarget) -> Any:
    """Compile as `ftw.kernels.packed_lookup.launch` would: a few rows unstaged, or many of them staged."""
    known = ggml_types_by_name()[name]
    elements = 2048 if is_staged else 1024
    unit_nbytes = 4 if known.type_size % 2 == 0 else 1
    lanes = (known.row_nbytes(elements) + LINE_NBYTES) // unit_nbytes
    pointers = {"table_ptr": "*u8", "ids_ptr": "*i64", "codebook_ptr": "*i8", "out_ptr": f"*{out}"}
    sizes = {"first_id": "i32", "table_rows": "i32", "columns": "i32", "row_nbytes": "i32", "zero": "i32"}
    constants = {
        "DECODE": getattr(ggml_decoders_triton, f"decode_{name.lower()}"),
        "BLOCK_SIZE": known.block_size, "TYPE_SIZE": known.type_size, "ELEMENTS": elements, "IS_STAGED": is_staged,
        "UNIT": UNITS[unit_nbytes], "UNIT_NBYTES": unit_nbytes, "UNITS": 1 << (lanes - 1).bit_length(),
        "LINE_NBYTES": LINE_NBYTES, "WARM_WORDS": 1024 if name.startswith("IQ2") else 0,
    }  # fmt: skip
    return _compile(packed_lookup_kernel, target, pointers | sizes, constants, enable_fp_fusion=False)


def _compile(
    kernel: Any, target: GPUTarget, signature: dict[str, str], constants: dict[str, Any], **options: Any
) -> Any:
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    return triton.compile(source, target=target, options={"num_warps": 4, **options})


def _describe(compiled: Any, target: GPUTarget) -> tuple[int, int]:
    binary, text = ("cubin", "ptx") if target.backend == "cuda" else ("hsaco", "amdgcn")
    fused = [found for found in _FUSED[target.backend].findall(compiled.asm[text]) if not _NOT_FUSED.match(found)]
    return len(compiled.asm[binary]), len(fused)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
