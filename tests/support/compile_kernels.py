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
from ftw.kernels.jit import ggml_decoders_triton
from ftw.kernels.jit.distinct_triton import elect_kernel, spread_kernel
from ftw.kernels.jit.lookup_triton import lookup_kernel
from ftw.kernels.jit.packed_lookup_triton import UNITS, packed_lookup_kernel

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
# What lookups may be given besides table, ids and output; each is compiled out where it is not.
OPTIONS = {"slots_ptr": "*i32", "hot_ptr": "", "counts_ptr": "*i32", "owners_ptr": "*i32", "scale": "fp32"}
VARIANTS = {
    "plain": (),
    "hot": ("slots_ptr", "hot_ptr"),
    "counted": ("slots_ptr", "hot_ptr", "counts_ptr"),
    "distinct": ("owners_ptr",),
    "scaled": ("scale",),
    "all": tuple(OPTIONS),
}
UNITS_OF_VARIANTS = {"scaled": ("bf16", "fp16", "fp32"), "all": ("bf16",)}

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
            for first_id in ID_TYPES:
                _print("lookup", "plain", unit, id_type, first_id, _compile_lookup(target, unit, id_type, first_id))
    for variant in VARIANTS:
        for unit in UNITS_OF_VARIANTS.get(variant, ("i32",)):
            compiled = _compile_lookup(target, unit, "i64", "i32", variant, is_slice=variant != "plain")
            _print("lookup", variant, unit, compiled)
    for id_type in ID_TYPES:
        _print("elect", id_type, _compile_elect(target, id_type))
        _print("spread", id_type, _compile_spread(target, id_type))
    for name in TYPES:
        for is_staged in (False, True):
            for out in ("bf16", "fp32", "fp16") if name in TYPES_OF_EVERY_OUT else ("bf16",):
                _print("packed_lookup", name, "plain", is_staged, out, _compile_packed(name, is_staged, out, target))
    for name in TYPES_OF_EVERY_OUT:
        for is_staged, variant in [(True, variant) for variant in list(VARIANTS)[1:]] + [(False, "all")]:
            compiled = _compile_packed(name, is_staged, "bf16", target, variant)
            _print("packed_lookup", name, variant, is_staged, compiled)


def _compile_lookup(
    target: GPUTarget, unit: str, id_type: str, first_id: str, variant: str = "plain", *, is_slice: bool = False
) -> Any:
    pointers = {"table_ptr": f"*{unit}", "ids_ptr": f"*{id_type}", "out_ptr": f"*{unit}"}
    sizes = {"first_id": first_id, "table_rows": "i32", "row_units": "i32"}
    signature, constants = _options(variant, f"*{unit}")
    if is_slice:
        signature["out_units"] = "i32"
    else:
        constants["out_units"] = None
    signature |= pointers | sizes
    return _compile(lookup_kernel, target, signature, constants | {"BLOCK": 1024}, enable_fp_fusion=False)


def _compile_elect(target: GPUTarget, id_type: str) -> Any:
    pointers = {"ids_ptr": f"*{id_type}", "owners_ptr": "*i32"}
    sizes = {"num_ids": "i32", "first_id": "i32", "table_rows": "i32"}
    return _compile(elect_kernel, target, pointers | sizes, {"BLOCK": 256})


def _compile_spread(target: GPUTarget, id_type: str) -> Any:
    pointers = {"out_ptr": "*i32", "ids_ptr": f"*{id_type}", "owners_ptr": "*i32"}
    sizes = {"first_id": "i32", "table_rows": "i32", "out_units": "i32"}
    return _compile(spread_kernel, target, pointers | sizes, {"BLOCK": 1024})


def _compile_packed(name: str, is_staged: bool, out: str, target: GPUTarget, variant: str = "plain") -> Any:
    """Compile as `ftw.kernels.packed_lookup` would: a few rows unstaged, or many of them staged."""
    known = ggml_types_by_name()[name]
    elements = 2048 if is_staged else 1024
    unit_nbytes = 4 if known.type_size % 2 == 0 else 1
    lanes = (known.row_nbytes(elements) + LINE_NBYTES) // unit_nbytes
    pointers = {"table_ptr": "*u8", "ids_ptr": "*i64", "codebook_ptr": "*i8", "out_ptr": f"*{out}"}
    sizes = {"first_id": "i32", "table_rows": "i32", "columns": "i32", "row_nbytes": "i32", "zero": "i32"}
    signature, absent = _options(variant, "*u8")
    constants = {
        "DECODE": getattr(ggml_decoders_triton, f"decode_{name.lower()}"),
        "BLOCK_SIZE": known.block_size, "TYPE_SIZE": known.type_size, "ELEMENTS": elements, "IS_STAGED": is_staged,
        "UNIT": UNITS[unit_nbytes], "UNIT_NBYTES": unit_nbytes, "UNITS": 1 << (lanes - 1).bit_length(),
        "LINE_NBYTES": LINE_NBYTES, "WARM_WORDS": 1024 if name.startswith("IQ2") else 0,
    }  # fmt: skip
    signature |= pointers | sizes
    return _compile(packed_lookup_kernel, target, signature, constants | absent, enable_fp_fusion=False)


def _options(variant: str, hot_pointer: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the types of what a variant is given, and None for what it is not."""
    given = {name: OPTIONS[name] or hot_pointer for name in VARIANTS[variant]}
    return given, dict.fromkeys(OPTIONS.keys() - given.keys())


def _compile(
    kernel: Any, target: GPUTarget, signature: dict[str, str], constants: dict[str, Any], **options: Any
) -> Any:
    types = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
    return triton.compile(source, target=target, options={"num_warps": 4, **options})


def _print(*words: Any) -> None:
    """Print what was compiled, which is the last of the words, by its size and its fused operations."""
    *what, compiled = words
    print(*what, *_describe(compiled))


def _describe(compiled: Any) -> tuple[int, int]:
    target = compiled.metadata.target
    binary, text = ("cubin", "ptx") if target.backend == "cuda" else ("hsaco", "amdgcn")
    fused = [found for found in _FUSED[target.backend].findall(compiled.asm[text]) if not _NOT_FUSED.match(found)]
    return len(compiled.asm[binary]), len(fused)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
