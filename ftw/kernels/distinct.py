"""Distinct ids: each row that a lookup needs crosses the link once, however often its id is there.

    elect    owners[row of ids[i]] = i      plain stores: whichever comes last is the owner
    fetch    the lookup's own kernel        out[i] = row, at positions i that are owners alone
    spread   out[i] = out[owners[row of ids[i]]] at all others

Hot rows take no part, nor do ids outside the table. `owners`, int32 [rows], is made for each call and never cleared:
every entry that is read has been written by the same call. So nothing is left over between replays of a CUDA graph, or
shared by two streams.

The three launches cost 2.5 to 3 µs more than one. From 1024 ids on that is 3 % of a lookup whose ids are all different,
and Zipf ids take 0.71 of the time there, 0.55 at 8192. With hot rows what is left are mostly ids that occur once: Zipf
ids took 5 % longer at 8192, evenly spread ones 1 % less (bf16 [151936, 2048], H200, CUDA graph, 2026-11-30).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ftw.kernels.launching import Launch
from ftw.kernels.units import cut_row

if TYPE_CHECKING:
    from ftw.kernels.hot import Hot

_MIN_IDS = 1024
_MIN_IDS_BESIDE_HOT = 32768
_ELECT_BLOCK = 256


def prefers_distinct(num_ids: int, *, has_hot: bool = False) -> bool:
    """Whether so many ids are worth electing: by their number alone, so that a captured graph is always right."""
    return num_ids >= (_MIN_IDS_BESIDE_HOT if has_hot else _MIN_IDS)


def make_owners(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return memory for the owners of a table's rows on the ids' device."""
    return torch.empty(table.shape[0], dtype=torch.int32, device=ids.device)


def plan_distinct(
    fetch: Launch, ids: torch.Tensor, owners: torch.Tensor, out: torch.Tensor, *, first_id: int, hot: Hot | None
) -> list[Launch]:
    """Return the launches that are needed around and with `fetch`, the lookup's, which has been given `owners`."""
    from ftw.kernels.distinct_triton import elect_kernel, spread_kernel

    num_ids = ids.numel()
    slots = None if hot is None else hot.slots
    shape = cut_row(out.nbytes // num_ids, out.data_ptr())
    elect = Launch(
        kernel=elect_kernel,
        grid=(-(-num_ids // _ELECT_BLOCK), 1, 1),
        arguments=(ids, owners, slots, num_ids, first_id, owners.shape[0]),
        constants=(_ELECT_BLOCK,),
        options=(("num_warps", 4),),
    )
    spread = Launch(
        kernel=spread_kernel,
        grid=(num_ids, -(-shape.units // shape.block), 1),
        arguments=(out, ids, owners, slots, first_id, owners.shape[0], shape.units),
        constants=(shape.block,),
        options=(("num_warps", shape.num_warps),),
        views=((0, shape.unit),),
    )
    return [elect, fetch, spread]
