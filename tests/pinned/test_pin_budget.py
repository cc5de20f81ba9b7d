"""The plan of page-locked bytes: what is refused, and what the refusal says."""

import re
from typing import Any

import pytest

import ftw
from ftw.host.limits import HostLimits
from ftw.pinned.budget import check_pin_budget

PAGE, MI, GI = 4096, 1 << 20, 1 << 30
SOURCE = "/models/gemma"
UNKNOWN = HostLimits(available=None, cgroup_free=None, memlock=None, is_wsl=False)


def limits(available: int | None = None, cgroup_free: int | None = None) -> HostLimits:
    return HostLimits(available, cgroup_free, memlock=8 * MI, is_wsl=False)


def check(tables: dict[str, int], host: HostLimits = UNKNOWN, *, limit: int | None = None, pinned: int = 0) -> None:
    check_pin_budget(tables, SOURCE, limit, limits=host, pinned_nbytes=pinned)


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ftw.PinError) as caught:
        check(*arguments, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"{SOURCE}: ")
    return message


@pytest.mark.parametrize(
    ("host", "limit", "pinned"),
    [
        (UNKNOWN, None, 0),
        (UNKNOWN, None, 99 * GI),
        (limits(available=3 * GI), None, 99 * GI),
        (limits(cgroup_free=3 * GI), None, 99 * GI),
        (limits(available=3 * GI, cgroup_free=3 * GI), 3 * GI, 0),
        (limits(available=9 * GI), 5 * GI, 2 * GI),
        (limits(available=PAGE), 3 * GI, 0),
        (limits(available=0, cgroup_free=3 * GI), 99 * GI, GI),
    ],
    ids=["unknown", "no-limit", "available", "cgroup", "all", "beside-others", "limit-for-available", "growing-host"],
)
def test_tables_that_just_fit_are_allowed(host: HostLimits, limit: int | None, pinned: int) -> None:
    check({"embed": 2 * GI, "ple": GI}, host, limit=limit, pinned=pinned)


@pytest.mark.parametrize(
    ("host", "limit", "pinned", "words"),
    [
        (limits(available=3 * GI - PAGE), None, 0, "more than the 3.00 GiB of host memory"),
        (limits(cgroup_free=3 * GI - PAGE), None, 0, "memory cgroup"),
        (limits(available=99 * GI, cgroup_free=3 * GI - PAGE), 99 * GI, 0, "memory cgroup"),
        (limits(available=99 * GI), 3 * GI - PAGE, 0, "max_pinned_bytes"),
        (limits(available=99 * GI), 5 * GI - PAGE, 2 * GI, "max_pinned_bytes"),
        (UNKNOWN, 3 * GI - PAGE, 0, "max_pinned_bytes"),
    ],
    ids=["available", "cgroup", "cgroup-in-spite-of-a-limit", "limit", "limit-beside-others", "limit-alone"],
)
def test_one_page_too_much_is_refused(host: HostLimits, limit: int | None, pinned: int, words: str) -> None:
    message = refusal({"embed": 2 * GI, "ple": GI}, host, limit=limit, pinned=pinned)
    assert "4.00 KiB more than" in message
    assert words in message


def test_refusal_by_the_limit_says_what_is_pinned_asked_and_allowed() -> None:
    assert refusal({"embed": 3 * GI}, limit=4 * GI, pinned=2 * GI) == (
        "/models/gemma: embed (3.00 GiB): 3.00 GiB to page-lock beside 2.00 GiB page-locked already are 1.00 GiB more "
        "than max_pinned_bytes, 4.00 GiB; tables may stay on the GPU (embed 'gpu', or no offload)"
    )


def test_refusal_for_want_of_memory_says_what_is_free_and_what_to_do() -> None:
    assert refusal({"embed": 3 * GI}, limits(available=GI)) == (
        "/models/gemma: embed (3.00 GiB): 3.00 GiB to page-lock are 2.00 GiB more than the 1.00 GiB of host memory "
        "that are free; tables may stay on the GPU (embed 'gpu', or no offload); max_pinned_bytes=… allows more, "
        "where the host's memory grows as it is used"
    )


def test_refusal_by_the_cgroup_offers_no_way_that_it_would_refuse_too() -> None:
    assert refusal({"embed": 3 * GI}, limits(available=GI, cgroup_free=2 * GI)) == (
        "/models/gemma: embed (3.00 GiB): 3.00 GiB to page-lock are 1.00 GiB more than the 2.00 GiB that the memory "
        "cgroup's limit leaves; tables may stay on the GPU (embed 'gpu', or no offload)"
    )


@pytest.mark.parametrize(
    ("tables", "subject"),
    [
        ({"a": GI}, "a (1.00 GiB)"),
        ({"a": GI, "b": 2 * GI, "c": MI}, "b (2.00 GiB), a (1.00 GiB), c (1.00 MiB)"),
        ({"a": 1 * MI, "b": 2 * MI, "c": 3 * MI, "d": GI}, "d (1.00 GiB), c (3.00 MiB), b (2.00 MiB) and 1 more"),
        ({str(n): GI for n in range(40)}, "0 (1.00 GiB), 1 (1.00 GiB), 2 (1.00 GiB) and 37 more"),
        ({"a\nb": GI}, r"a\nb (1.00 GiB)"),
    ],
    ids=["one", "three", "four", "forty-of-one-size", "control-character"],
)
def test_refusal_names_the_largest_tables(tables: dict[str, int], subject: str) -> None:
    assert refusal(tables, limit=0).startswith(f"{SOURCE}: {subject}: ")


def test_source_of_a_refusal_is_printable() -> None:
    with pytest.raises(ftw.PinError, match=re.escape(r"a\nb: embed (4.00 KiB): ")):
        check_pin_budget({"embed": PAGE}, "a\nb", 0, limits=UNKNOWN, pinned_nbytes=0)


@pytest.mark.parametrize("tables", [{}, {"empty": 0}], ids=["none", "of-no-rows"])
def test_no_bytes_are_never_refused(tables: dict[str, int]) -> None:
    check(tables, limits(available=0, cgroup_free=0), limit=0, pinned=GI)
