"""Pin budget: may the tables of a checkpoint be page-locked? Answered before a byte of them is read.

    given max_pinned_bytes    page-locked already + asked for <= max_pinned_bytes
    without it                asked for <= MemAvailable
    always                    asked for <= what the memory cgroup leaves

A limit of the caller's takes the place of MemAvailable, as some virtual machines' memory grows as it is used. It does
not take that of the cgroup, whose breach ends the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.errors import PinError, printable
from ftw.host import PAGE_NBYTES, read_host_limits
from ftw.pinned.buffer import count_pinned_bytes
from ftw.sizes import align_up, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftw.host import HostLimits

_MAX_NAMED = 3
_WAY_OUT = "tables may stay on the GPU (embed 'gpu', or no offload)"


def check_pin_budget(
    tables: Mapping[str, int],
    source: str,
    max_pinned_bytes: int | None,
    *,
    limits: HostLimits | None = None,
    pinned_nbytes: int | None = None,
) -> None:
    """Refuse tables that host memory cannot take.

    Args:
        tables: Bytes of each table, by its name; they are page-locked by the page.
        source: What the tables are of, for messages: the name of a checkpoint.
        max_pinned_bytes: Bytes that tables may bring the process to; None for what is free.
        limits: What bounds the process's host memory; None to read that now.
        pinned_nbytes: Bytes that the process has page-locked already; None to count them now.

    Raises:
        PinError: The tables are too large; the message says by how much, for what, and what to do.
    """
    pages = {name: align_up(nbytes, PAGE_NBYTES) for name, nbytes in tables.items()}
    asked = sum(pages.values())
    if not asked:
        return
    limits = read_host_limits() if limits is None else limits
    pinned_nbytes = count_pinned_bytes() if pinned_nbytes is None else pinned_nbytes
    problem = _find_problem(asked, pinned_nbytes, max_pinned_bytes, limits)
    if problem:
        raise PinError(f"{printable(source)}: {_name_tables(pages)}: {format_size(asked)} to page-lock{problem}")


def _find_problem(asked: int, pinned_nbytes: int, max_pinned_bytes: int | None, limits: HostLimits) -> str:
    """Return how the sentence about the bytes asked for goes on, empty where nothing stands against them."""
    if max_pinned_bytes is not None and pinned_nbytes + asked > max_pinned_bytes:
        beside = f" beside {format_size(pinned_nbytes)} page-locked already"
        excess = format_size(pinned_nbytes + asked - max_pinned_bytes)
        return f"{beside} are {excess} more than max_pinned_bytes, {format_size(max_pinned_bytes)}; {_WAY_OUT}"
    if limits.cgroup_free is not None and asked > limits.cgroup_free:
        excess, free = format_size(asked - limits.cgroup_free), format_size(limits.cgroup_free)
        return f" are {excess} more than the {free} that the memory cgroup's limit leaves; {_WAY_OUT}"
    if max_pinned_bytes is None and limits.available is not None and asked > limits.available:
        excess, free = format_size(asked - limits.available), format_size(limits.available)
        grows = "max_pinned_bytes=… allows more, where the host's memory grows as it is used"
        return f" are {excess} more than the {free} of host memory that are free; {_WAY_OUT}; {grows}"
    return ""


def _name_tables(tables: Mapping[str, int]) -> str:
    """Return the largest tables with their sizes, and how many others there are."""
    names = sorted(tables, key=tables.__getitem__, reverse=True)
    named = ", ".join(f"{printable(name)} ({format_size(tables[name])})" for name in names[:_MAX_NAMED])
    others = len(names) - _MAX_NAMED
    return f"{named} and {others} more" if others > 0 else named
