"""Distinct ids: each row that a lookup needs crosses the link once, however often its id is there.

    elect    owners[row of ids[i]] = i      plain stores: whichever comes last is the owner
    fetch    the lookup's own kernel        out[i] = row, at positions i that are owners alone
    spread   out[i] = out[owners[row of ids[i]]] at all others

Ids outside the table take no part. Hot rows do: their owners read the copies on the device. So it does not matter to
election and spreading which rows are hot, nor whether that changes from one launch to the next. `owners`, int32 [rows],
is made for each call and never cleared: every entry that is read has been written by the same call. So nothing is left
over between replays of a CUDA graph, or shared by two streams.

The three launches cost 2.5 to 3 µs more than one. From 1024 ids on that is 3 % of a lookup whose ids are all different,
and Zipf ids take 0.71 of the time there, 0.55 at 8192. With 64 MiB of hot rows what crosses the link are mostly ids
that occur once: Zipf ids take 6 % longer at 8192, 4 % at 32768 and 1 % at 65536, where evenly spread ones take 18 %
less (bf16 [151936, 2048], H200, CUDA graph, 2026-11-30).
"""

from __future__ import annotations

import torch

from ftw.kernels.launching import Launch
from ftw.kernels.row_tiling import tile_row

_MIN_IDS = 1024
_MIN_IDS_BESIDE_HOT = 65536
_ELECT_BLOCK = 256
_OWNER_NBYTES = 4
_SMALL_NBYTES = 4 << 20  # of owners that are not worth a thought: 1 Mi rows


def prefers_distinct(num_ids: int, *, num_rows: int, out_nbytes: int, has_hot: bool = False) -> bool:
    """Whether so many ids of a table of `num_rows` are worth electing.

    They are from 1024 on, with hot rows from 65536, unless that takes memory that a lookup should not: the owners have
    4 bytes for each row of the table, which may be no more than the output's `out_nbytes`, or 4 MiB. All of that is
    known by shape alone, so that a captured graph is always right.
    """
    is_affordable = _OWNER_NBYTES * num_rows <= max(out_nbytes, _SMALL_NBYTES)
    return is_affordable and num_ids >= (_MIN_IDS_BESIDE_HOT if has_hot else _MIN_IDS)


def make_owners(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return memory for the owners of a table's rows on the ids' device: 4 bytes for each row, until the call ends."""
    return torch.empty(table.shape[0], dtype=torch.int32, device=ids.device)


def plan_distinct(
    fetch: Launch, ids: torch.Tensor, owners: torch.Tensor, out: torch.Tensor, *, first_id: int
) -> list[Launch]:
    """Return the launches that are needed around and with `fetch`, the lookup's, which has been given `owners`."""
    from ftw.kernels.jit.distinct_triton import elect_kernel, spread_kernel

    num_ids = ids.numel()
    tiling = tile_row(out.nbytes // num_ids, out.data_ptr())
    elect = Launch(
        kernel=elect_kernel,
        grid=(-(-num_ids // _ELECT_BLOCK), 1, 1),
        arguments=(ids, owners, num_ids, first_id, owners.shape[0]),
        constants=(_ELECT_BLOCK,),
        options=(("num_warps", 4),),
    )
    spread = Launch(
        kernel=spread_kernel,
        grid=(num_ids, -(-tiling.units // tiling.block), 1),
        arguments=(out, ids, owners, first_id, owners.shape[0], tiling.units),
        constants=(tiling.block,),
        options=(("num_warps", tiling.num_warps),),
        views=((0, tiling.unit),),
    )
    return [elect, fetch, spread]
