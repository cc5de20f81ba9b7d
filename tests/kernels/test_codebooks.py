"""Codebooks: the values that indices in packed blocks stand for."""

import pytest
import torch
from gguf import quants
from packed_tables import TYPES

from ftw.kernels.codebooks import codebook

CPU = torch.device("cpu")
ENTRIES = {
    "IQ1_S": (2048, 8), "IQ1_M": (2048, 8), "IQ2_XXS": (256, 8), "IQ2_XS": (512, 8), "IQ2_S": (1024, 8),
    "IQ3_XXS": (256, 4), "IQ3_S": (512, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
def test_grid_is_ggufs_in_single_bytes(name: str) -> None:
    found = codebook(name, CPU)
    assert found is not None
    assert found.dtype == torch.int8
    assert found.is_contiguous()
    decoder = getattr(quants, name)
    grid = torch.from_numpy(decoder.grid).reshape(ENTRIES[name])
    assert torch.equal(found.reshape(ENTRIES[name]).float(), grid.float())  # nothing is cut off or rounded


@pytest.mark.parametrize("name", ["IQ4_NL", "IQ4_XS"])
def test_nibbles_stand_for_ggufs_values(name: str) -> None:
    found = codebook(name, CPU)
    assert found is not None
    assert found.tolist() == list(quants.IQ4_NL.kvalues)


@pytest.mark.parametrize("name", [name for name in TYPES if name.startswith(("Q", "TQ"))])
def test_type_without_indices_has_no_codebook(name: str) -> None:
    assert codebook(name, CPU) is None


def test_codebook_is_made_once() -> None:
    assert codebook("IQ2_S", CPU) is codebook("IQ2_S", CPU)
