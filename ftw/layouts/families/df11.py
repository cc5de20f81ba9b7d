"""DF11 in FreeToken's layout: which matrices of a checkpoint are stored so, and their exponents counted once."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.layouts.recipes.dense_tensor import DenseTensor
    from ftw.layouts.recipes.df11_plan import Chunks, Df11Plan
    from ftw.layouts.recipes.recipe import Recipe

DF11_ROLES = ("low8", "bitstream", "chunk_start", "lut")
DF11_LUT = 4096  # entries of a table that is looked up by the next bits

_MAX_KEPT = 1024  # plans: about 2 KiB each, and a model has some hundred


def encode_df11(checkpoint: Checkpoint, tensors: list[DenseTensor], matrices: str, tables: str) -> list[DenseTensor]:
    """Put the DF11 form of some tensors in their places; each is read once, unless this process has done so before.

    Args:
        checkpoint: What they are read from.
        tensors: All tensors.
        matrices: A regular expression of the names of matrices.
        tables: The same of tables whose rows are looked up one by one.

    Raises:
        CheckpointError: One is no matrix of plain numbers.
    """
    from ftw.layouts.recipes.df11_plan import prepare_matrix  # imports numpy
    from ftw.layouts.recipes.df11_tensors import df11_tensors

    made: list[DenseTensor] = []
    for tensor in tensors:
        is_table = re.fullmatch(tables, tensor.name) is not None
        if not is_table and not re.fullmatch(matrices, tensor.name):
            made.append(tensor)
            continue
        inner, chunks = prepare_matrix(checkpoint.source, tensor, is_by_row=is_table)
        plan = _find_plan(checkpoint, tensor, inner, chunks)
        made += df11_tensors(checkpoint.source, tensor, plan, inner)
    return made


def _find_plan(checkpoint: Checkpoint, tensor: DenseTensor, inner: Recipe, chunks: Chunks) -> Df11Plan:
    stored = checkpoint.find_tensor(tensor.origin)
    found = checkpoint.find_bytes(stored.name, 0, stored.nbytes)
    # the same bytes are those of the same state of a file; what lies on the hub or in several files is counted again
    kept = [] if found is None else _kept_plan(found[0].path, found[0].identity, found[1], stored.dtype, chunks)
    if not kept:
        from ftw.layouts.recipes.df11_plan import plan_df11

        kept.append(plan_df11(inner, chunks, lambda name, view, at: checkpoint.read_into(name, view, offset=at)))
    return kept[0]


@lru_cache(maxsize=_MAX_KEPT)
def _kept_plan(*_identity: object) -> list[Df11Plan]:
    """Return a place for the plan of the bytes that are meant, empty until the first who asks has filled it."""
    return []
