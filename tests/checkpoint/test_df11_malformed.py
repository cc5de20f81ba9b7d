"""DF11 tables whose tensors are missing, of other sizes than they need, or contradict one another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from df11_builders import (
    DF11_CONFIG,
    MODULE,
    Parts,
    as_u8,
    decode,
    read_all,
    read_fixture,
    uneven_parts,
    write_df11,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import ftw

NORMAL, _ = read_fixture("normal")
SMALL = uneven_parts(3000)
POSITIONS = NORMAL["output_positions"].numpy().view("<u4").tolist()


def changed(suffix: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Parts], None]:
    def apply(parts: Parts) -> None:
        tensor = change(parts[suffix])
        if tensor is None:
            del parts[suffix]
        else:
            parts[suffix] = tensor

    return apply


def positions(*values: int) -> Callable[[Parts], None]:
    return changed("output_positions", lambda _: as_u8(np.array(values, "<u4").tobytes()))


def at(suffix: str, *index: Any, value: int) -> Callable[[Parts], None]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    return changed(suffix, change)


BROKEN_HEADERS: dict[str, tuple[Callable[[Parts], None], str]] = {
    "missing": (changed("gaps", lambda _: None), r"gaps: is missing, DF11 needs luts, encoded_exponent"),
    "weight-too": (
        lambda parts: parts.update(weight=torch.ones(600, 72)), r"weight: lies beside the module's DF11, which can",
    ),
    "dtype": (changed("gaps", lambda t: t.to(torch.int8)), r"gaps: is I8 \[1280\], for 4 blocks U8 \[1280\] is needed"),
    "luts-dims": (changed("luts", lambda t: t.flatten()), r"luts: is U8 \[768\], U8 \[2 to 18, 256\] is needed"),
    "luts-one": (changed("luts", lambda t: t[:1]), r"luts: is U8 \[1, 256\], U8 \[2 to 18, 256\]"),
    "luts-many": (changed("luts", lambda t: t.repeat(7, 1)), r"luts: is U8 \[21, 256\], U8 \[2 to 18, 256\]"),
    "stream-empty": (changed("encoded_exponent", lambda t: t[:0]), r"encoded_exponent: is U8 \[0\], U8 \[1 or more\]"),
    "stream-dims": (changed("encoded_exponent", lambda t: t[None]), r"is U8 \[1, 13919\], U8 \[1 or more\] is needed"),
    "elements-many": (
        changed("encoded_exponent", lambda t: t[:5399]), r"sign_mantissa: is U8 \[43200\], U8 \[1 to 43192\], as many",
    ),
    "elements-none": (changed("sign_mantissa", lambda t: t[:0]), r"sign_mantissa: is U8 \[0\], U8 \[1 to 111352\]"),
    "positions-few": (positions(*POSITIONS[1:]), r"output_positions: is U8 \[16\], for 4 blocks U8 \[20\] is needed"),
    "gaps-few": (changed("gaps", lambda t: t[:-1]), r"gaps: is U8 \[1279\], for 4 blocks U8 \[1280\] is needed"),
    "blocks-differ": (changed("encoded_exponent", lambda t: t[:9000]), r"for 3 blocks U8 \[16\] is needed"),
    "several-weights": (
        changed("split_positions", lambda _: torch.tensor([9])), r"for a table, which is one weight, I64 \[0\] is",
    ),
}  # fmt: skip
BROKEN_DATA: dict[str, tuple[Callable[[Parts], None], str]] = {
    "first-position": (positions(1, *POSITIONS[1:]), r"output_positions: go from 1 to 43200, 0 and the 43200"),
    "last-position": (positions(*POSITIONS[:-1], 43199), r"output_positions: go from 0 to 43199, 0 and the 43200 elem"),
    "falling-positions": (
        positions(0, 25455, 12760, 38128, 43200), r"output_positions: tell of -12695 elements in block 1, 0 to 32768",
    ),
    "steep-positions": (positions(0, 1, 2, 3, 43200), r"tell of 43197 elements in block 3, 0 to 32768 are allowed"),
    "wrong-position": (
        positions(0, 12761, *POSITIONS[2:]), r"block 0 has 12760 codes, output_positions say 12761",
    ),
    "first-gap": (at("gaps", 0, value=8), r"gaps: the first code begins at bit 1, bit 0 is needed"),
    "gap": (at("gaps", 700, value=0xFF), r"exponent: the codes of bytes \d+ to \d+ end \d+ bits behind them, gaps"),
    "stream": (at("encoded_exponent", slice(5000, 5300), value=0), r"codes of bytes 4992 to 4999 end 2 bits behind"),
    "pointer": (at("luts", 0, slice(None), value=240), r"bytes 0 to 7 hold bits that are no code, those of luts are"),
    "pointers-go-on": (at("luts", slice(0, 2), slice(None), value=255), r"bytes 0 to 7 hold bits that are no code"),
    "length-zero": (at("luts", 2, slice(None), value=0), r"bytes 0 to 7 hold bits that are no code"),
    "length-33": (at("luts", 2, slice(None), value=33), r"bytes 0 to 7 hold bits that are no code"),
    "stream-short": (changed("encoded_exponent", lambda t: t[:12400]), r"block 3 has \d+ codes|no code|end \d+ bits"),
    "stream-short-by-one": (
        changed("encoded_exponent", lambda t: t[:13918]), r"its last code ends at bit 1113\d\d, it has 111344",
    ),
}  # fmt: skip


def broken(folder: Path, change: Callable[[Parts], None]) -> Path:
    parts = {suffix: tensor.clone() for suffix, tensor in NORMAL.items()}
    change(parts)
    return write_df11(folder, parts, (600, 72))


@pytest.mark.parametrize("name", BROKEN_HEADERS, ids=str)
def test_table_with_broken_headers_is_refused_when_opened(tmp_path: Path, name: str) -> None:
    change, message = BROKEN_HEADERS[name]
    folder = broken(tmp_path, change)
    with pytest.raises(ftw.CheckpointError, match=message) as caught:
        ftw.open_checkpoint(folder, decode_df11=True)
    assert str(caught.value).startswith(f"{folder}: {MODULE}")
    ftw.open_checkpoint(folder)  # as it is stored, it is no concern


@pytest.mark.parametrize("name", BROKEN_DATA, ids=str)
def test_table_with_broken_data_is_refused_when_read(tmp_path: Path, name: str) -> None:
    change, message = BROKEN_DATA[name]
    folder = broken(tmp_path, change)
    with pytest.raises(ftw.CheckpointError, match=message) as caught:
        read_all(folder)
    assert str(caught.value).startswith(f"{folder}: {MODULE}.")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("key", ["threads_per_block", "bytes_per_thread"], ids=str)
def test_stream_of_another_division_is_refused(tmp_path: Path, key: str) -> None:
    folder = write_df11(tmp_path, NORMAL, (600, 72), dfloat11_config={**DF11_CONFIG, key: [256]})
    with pytest.raises(ftw.CheckpointError, match=rf"config\.json: dfloat11_config\.{key}: is .256., .*is needed"):
        ftw.open_checkpoint(folder, decode_df11=True)


@settings(max_examples=150)
@given(data=st.data())
def test_any_changed_byte_gives_bytes_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    parts = {suffix: tensor.clone() for suffix, tensor in SMALL.items()}
    for _ in range(data.draw(st.integers(1, 4))):
        tensor = parts[data.draw(st.sampled_from(["luts", "encoded_exponent", "output_positions", "gaps"]))].view(-1)
        tensor[data.draw(st.integers(0, len(tensor) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_all(write_df11(tmp_path_factory.mktemp("changed"), parts, (3000, 1)))
    except ftw.FtwError:
        return
    assert found == decode(parts)  # one bit and the next, as far as the elements go
