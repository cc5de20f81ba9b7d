"""Rows that are looked up, and weights, against those that torch or the gguf package make from the same bytes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

import ftw
from ftw.dtypes import DTYPES
from ftw.ggml_types import PACKED_TYPES
from fuzz.findings import check_message, require

if TYPE_CHECKING:
    from pathlib import Path

    from ftw.verdict import TableVerdict
    from fuzz.stored import Contents


def check_load(path: Path, embed: str, contents: Contents) -> None:
    """Load a checkpoint one way, and compare all that it gives."""
    try:
        model = ftw.load(path, embed=embed, device="cpu")
    except ftw.NotEligibleError as error:
        check_message(error)
        require(embed == "host", f"embed={embed!r} is refused: {error}")
        return
    except ftw.FtwError as error:
        check_message(error)
        return
    with model:
        tables = {table.name: table for table in model.verdict.tables}
        is_moved = model.verdict.token_embedding.name in model.tables
        require(is_moved == (embed != "gpu" and model.verdict.token_embedding.eligible), "moved, or not, against it")
        for name, embedding in model.tables.items():
            _compare_rows(embedding, tables[name], contents)
        if not is_moved:
            with contextlib.suppress(ftw.NotEligibleError, ftw.CheckpointError):
                _compare_rows(model.embedding, model.verdict.token_embedding, contents)
        try:
            for name, weight in model.weights():
                require(_bytes_of(weight) == contents[name], f"{name!r}: weight of other bytes")
        except ftw.CheckpointError as error:
            check_message(error)  # a dtype that torch has not


def check_part(path: Path, table: TableVerdict, contents: Contents) -> None:
    """Load a part of the token embedding for other ids and another type."""
    wanted = _rows(table, contents)
    first, length = len(wanted) // 3, len(wanted) // 2
    ids = torch.arange(-1, len(wanted) + 1)
    own = (ids >= first) & (ids < first + length)
    expected = wanted[ids[own]].to(torch.float32)
    with ftw.load(path, embed="host", device="cpu", dtype=torch.float32, vocab_range=(first, length)) as model:
        found = model.embedding(ids)
    is_right = _is_same(found[own], expected) and not found[~own].any()
    require(bool(is_right), f"{table.name!r}: a part has other rows")


def check_dummy(path: Path, table: TableVerdict) -> None:
    """Load random contents, of which the shapes are known."""
    with ftw.load(path, embed="auto", device="cpu", dummy=True) as model:
        shapes = {name: tuple(tensor.shape) for name, tensor in model.weights()}
        require(shapes == {name: model.tensors[name].shape for name in shapes}, "dummy weights of other shapes")
        row = model.embedding(torch.tensor([0]))
    require(row.shape == (1, table.columns), f"{table.name!r}: dummy rows of another width")


def _compare_rows(embedding: Any, table: TableVerdict, contents: Contents) -> None:
    wanted = _rows(table, contents)
    rows = len(wanted)
    ids = torch.tensor([[0, rows - 1, rows // 2, 0], [-1, rows, rows + 1, -rows], [1, 2**31, -(2**31), 2**62]])
    found = embedding(ids)
    require(found.shape == (3, 4, wanted.shape[1]), f"{table.name!r}: rows of shape {tuple(found.shape)}")
    for number, row in zip(ids.reshape(-1).tolist(), found.reshape(12, -1), strict=True):
        expected = wanted[number] if 0 <= number < rows else torch.zeros_like(wanted[0])
        same = _is_same(row, expected.to(row.dtype))
        require(same, f"{table.name!r}: row {number} is {row[:8].tolist()}, not {expected[:8].tolist()}")


def _rows(table: TableVerdict, contents: Contents) -> torch.Tensor:
    """Return all rows of a table, without the padding after them, made from its bytes."""
    data = bytearray(b"".join(contents[name] for name in table.tensors))
    if table.dtype not in PACKED_TYPES:
        dtype = getattr(torch, str(DTYPES[table.dtype].torch_name))
        return torch.frombuffer(data, dtype=dtype).reshape(-1, table.columns or 1)[: table.rows]
    kind = GGMLQuantizationType[table.dtype]
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(data, np.uint8).reshape(-1, (table.columns or 1) // block_size * type_size)[: table.rows]
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.ascontiguousarray(quants.dequantize(blocks, kind), np.float32))


def _is_same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Compare bit by bit; only which NaN a NaN is may differ."""
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    found, wanted = found.reshape(-1), wanted.reshape(-1)
    is_nan = (found.double().isnan() & wanted.double().isnan()).unsqueeze(1)
    same = (found.view(torch.uint8) == wanted.view(torch.uint8)).reshape(len(found), found.element_size())
    return bool((same | is_nan).all())


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
