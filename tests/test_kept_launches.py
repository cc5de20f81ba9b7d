"""Launches that are kept: what is kept is what the next lookup of its kind needs, and nothing of the caller's."""

import gc
import weakref

import pytest
import torch

from ftw import kept_launches
from ftw.kept_launches import KeptLaunches
from ftw.kernels.lookup import plan_launch

TABLE = torch.randn(9, 16, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU test_gpu_embedding has them")


def keep(kept: KeptLaunches, key: object, ids: torch.Tensor) -> torch.Tensor:
    out = torch.empty(ids.numel(), 16, dtype=TABLE.dtype)
    kept.keep(key, plan_launch(TABLE, ids, out), ids, out)
    return out


def test_kept_launch_takes_new_ids_and_output() -> None:
    kept = KeptLaunches()
    keep(kept, "key", torch.tensor([0, 1, 2]))
    assert "key" in kept
    assert "other" not in kept
    for ids in (torch.tensor([8, 8, 9]), torch.tensor([3, -1, 0])):
        out = torch.full((3, 16), float("nan"), dtype=TABLE.dtype)
        kept.launch("key", ids, out)
        wanted = torch.where(((ids >= 0) & (ids < 9))[:, None], TABLE[ids.clamp(0, 8)], 0.0)
        assert torch.equal(out, wanted)


def test_ids_and_output_are_not_kept_alive() -> None:
    kept = KeptLaunches()
    ids = torch.tensor([0, 1])
    out = keep(kept, "key", ids)
    references = [weakref.ref(ids), weakref.ref(out)]
    del ids, out
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_not_more_is_kept_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_launches, "_MAX_KEPT", 3)
    kept = KeptLaunches()
    for number in range(10):
        keep(kept, number, torch.tensor([number]))
        assert number in kept
        assert sum(other in kept for other in range(10)) <= 3
