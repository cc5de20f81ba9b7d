"""Compile every kernel ahead of time for every target, without a GPU; run by test_kernels_compile in a process of its
own, since Triton decides on import whether it interprets kernels."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ftw.kernels.lookup_triton import lookup_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
}
UNITS = ("u8", "i16", "i32")
ID_TYPES = ("i32", "i64")


def main() -> None:
    """Print one line for each compiled variant: target, types, size of the machine code."""
    for name, target in TARGETS.items():
        for unit in UNITS:
            for id_type in ID_TYPES:
                signature = {
                    "table_ptr": f"*{unit}", "ids_ptr": f"*{id_type}", "out_ptr": f"*{unit}",
                    "table_rows": "i32", "row_units": "i32", "BLOCK": "constexpr",
                }  # fmt: skip
                source = ASTSource(lookup_kernel, signature, {"BLOCK": 1024})
                compiled = triton.compile(source, target=target, options={"num_warps": 4})
                binary = compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
                print("lookup", name, unit, id_type, len(binary))


if __name__ == "__main__":
    sys.exit(main())
