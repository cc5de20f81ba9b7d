"""Sizes as people write and read them."""

from typing import Any

import numpy as np
import pytest

from ftw.sizes import format_size, parse_nbytes, parse_size

KI, MI, GI, TI = 1 << 10, 1 << 20, 1 << 30, 1 << 40


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0), ("1", 1), ("8589934592", 8 * GI), ("12B", 12), ("4KiB", 4 * KI), ("4K", 4 * KI), ("4KB", 4 * KI),
        ("4Ki", 4 * KI), ("8GiB", 8 * GI), ("8G", 8 * GI), ("8GB", 8 * GI), ("8gib", 8 * GI), ("512MiB", 512 * MI),
        ("2TiB", 2 * TI), ("1.5GiB", 3 * GI // 2), ("0.5K", 512), (" 8 GiB ", 8 * GI), ("0.0001K", 0),
        ("9007199254740993", 9007199254740993), ("9007199254740993KiB", 9007199254740993 * KI),
        ("0.1GiB", GI // 10), ("9" * 30, int("9" * 30)),
    ],
    ids=str,
)  # fmt: skip
def test_parse_size_reads(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "-1", "+1", "1e9", "1.GiB", ".5GiB", "1,5GiB", "8 Gi B", "8PiB", "8i", "0x10", "nan", "inf",
     "1.2.3", "8GiB!", "9" * 31, "9" * 400, "9" * 5000],
    ids=lambda text: text if 0 < len(text) < 12 else f"length-{len(text)}",
)  # fmt: skip
def test_parse_size_refuses(text):
    with pytest.raises(ValueError, match="is not a size, such as 8GiB or 512MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (MI, "1.00 MiB"),
        (622329856, "593.50 MiB"), (GI, "1.00 GiB"), (TI, "1.00 TiB"), (5000 * TI, "5000.00 TiB"),
    ],
    ids=str,
)  # fmt: skip
def test_format_size(nbytes, text):
    assert format_size(nbytes) == text


@pytest.mark.parametrize("nbytes", [0, 7, 4 * KI, 96 * MI, 8 * GI, 3 * TI], ids=str)
def test_parse_size_reads_what_format_size_writes(nbytes):
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (None, None),
        (0, 0),
        (1, 1),
        (1 << 70, 1 << 70),
        ("8GiB", 8 << 30),
        ("8G", 8 << 30),
        ("0", 0),
        ("4096", 4096),
        (np.int64(5), 5),
        (np.uint64(1 << 63), 1 << 63),
    ],
    ids=str,
)
def test_parse_nbytes_reads(value: int | str | None, nbytes: int | None) -> None:
    assert parse_nbytes("max_pinned_bytes", value) == nbytes


@pytest.mark.parametrize(
    "value",
    [-1, np.int64(-1), np.True_, np.float64(1), True, False, 1.0, 8e9, b"8GiB", [1], "", "-1", "8PiB", "all", "1e9"],
    ids=repr,
)
def test_parse_nbytes_refuses(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^max_pinned_bytes: .* a size, such as "):
        parse_nbytes("max_pinned_bytes", value)
