"""GGUF's element types: plain ones, and blocks of packed elements.

Codes, names, block sizes (in elements) and type sizes (bytes of a block) are the gguf package's, so a newer release
brings newer types. What a lookup needs besides is in `PACKED_TYPES`: a type that has no row there is opened, shown and
converted, but its rows are not looked up. A new packed type is a row there, and a decoder of its name in
`ftw.kernels.jit.ggml_decoders_triton`.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftw.dtypes import DTYPES

if TYPE_CHECKING:
    from types import ModuleType


class GgmlType(NamedTuple):
    """One element type: `type_size` bytes hold `block_size` elements."""

    code: int
    name: str
    block_size: int
    type_size: int

    @property
    def is_plain(self) -> bool:
        """Whether its elements lie one by one, in a type that `ftw.dtypes.DTYPES` has under the same name."""
        return self.block_size == 1 and self.name in DTYPES

    def row_nbytes(self, columns: int) -> int:
        """Return the bytes of a row of `columns` elements, a multiple of `block_size`."""
        return columns // self.block_size * self.type_size


class WideField(NamedTuple):
    """Integers or halves in a block: `number` of them, of `width` bytes each, from the byte `offset` on."""

    offset: int
    width: int
    number: int = 1


# Packed types whose rows are looked up, with what a file of the other byte order holds the other way round.
PACKED_TYPES: dict[str, tuple[WideField, ...]] = {
    "Q4_0": (WideField(0, 2),),
    "Q4_1": (WideField(0, 2, 2),),
    "Q5_0": (WideField(0, 2), WideField(2, 4)),
    "Q5_1": (WideField(0, 2, 2), WideField(4, 4)),
    "Q8_0": (WideField(0, 2),),
    "Q2_K": (WideField(80, 2, 2),),
    "Q3_K": (WideField(108, 2),),
    "Q4_K": (WideField(0, 2, 2),),
    "Q5_K": (WideField(0, 2, 2),),
    "Q6_K": (WideField(208, 2),),
    "IQ1_S": (WideField(0, 2), WideField(34, 2, 8)),
    "IQ1_M": (WideField(48, 2, 4),),
    # Of each eight bytes the first four are grid indices, one by one, the others one word of signs and scale.
    "IQ2_XXS": (WideField(0, 2), *(WideField(6 + 8 * group, 4) for group in range(8))),
    "IQ2_XS": (WideField(0, 2), WideField(2, 2, 32)),
    "IQ2_S": (WideField(0, 2),),
    "IQ3_XXS": (WideField(0, 2), WideField(66, 4, 8)),
    "IQ3_S": (WideField(0, 2),),
    "IQ4_NL": (WideField(0, 2),),
    "IQ4_XS": (WideField(0, 2, 2),),
    "TQ1_0": (WideField(52, 2),),
    "TQ2_0": (WideField(64, 2),),
    "MXFP4": (),
    "NVFP4": (),
}

# Types that the oldest gguf package allowed does not know: their codes, and the first release that has them.
LATER_TYPES = {"NVFP4": (40, "0.19.0"), "Q1_0": (41, "0.19.0")}


@functools.cache
def ggml_types() -> dict[int, GgmlType]:
    """Return the types that the installed gguf package knows, by code."""
    sizes: dict[Any, tuple[int, int]] = _gguf_constants().GGML_QUANT_SIZES
    return {int(code): GgmlType(int(code), code.name, *size) for code, size in sizes.items()}


@functools.cache
def ggml_types_by_name() -> dict[str, GgmlType]:
    """Return the same types by name."""
    return {known.name: known for known in ggml_types().values()}


@functools.cache
def gguf_architectures() -> frozenset[str]:
    """Return the architectures that the installed gguf package knows."""
    return frozenset(_gguf_constants().MODEL_ARCH_NAMES.values())


def unknown_type(kind: int | str) -> str:
    """Say that the installed gguf package has no type of this code or name, and which release has."""
    problem = "which the installed gguf package does not know"
    for name, (code, release) in LATER_TYPES.items():
        if kind in (name, code):
            return f"{problem}; gguf {release} has it, as {name}"
    return problem


def file_type_name(code: object) -> str:
    """Return what `general.file_type` says a file is made of, such as "Q4_K_M"; empty where it does not tell."""
    try:
        name: str = _gguf_constants().LlamaFileType(code).name
    except ValueError:
        return ""
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def swapped_block(known: GgmlType) -> tuple[int, ...] | None:
    """Return which byte goes where when a block changes its byte order; None for a type whose fields are not known."""
    fields: tuple[WideField, ...] | None = PACKED_TYPES.get(known.name)
    if known.is_plain:
        fields = (WideField(0, known.type_size),)
    if fields is None:
        return None
    order = list(range(known.type_size))
    for offset, width, number in fields:
        for start in range(offset, offset + width * number, width):
            order[start : start + width] = reversed(order[start : start + width])
    return tuple(order)


@functools.cache
def _gguf_constants() -> ModuleType:
    """Return the module `gguf.constants`, without what the rest of the package imports: 0.01 s instead of 0.1 s."""
    name = "gguf.constants"
    if name in sys.modules:
        return sys.modules[name]
    package = importlib.util.find_spec("gguf")
    folders = list(package.submodule_search_locations or ()) if package else []
    spec = (
        importlib.util.spec_from_file_location("ftw_gguf_constants", Path(folders[0], "constants.py"))
        if folders
        else None
    )
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("the gguf package is not installed", name="gguf")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
