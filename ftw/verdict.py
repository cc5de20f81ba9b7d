"""Verdicts: may a lookup table leave the GPU?

It may if a forward pass reads single rows of it and nothing else: the LM head must not share it, and its rows must lie
plain in the file. A wrong "eligible" breaks a model without a word, a wrong "tied" costs its user the table's VRAM, so
each verdict carries the evidence that it rests on.

    reason                may leave   meaning
    ok                    yes
    tied                  no          the LM head reads the whole table at every step
    tie_conflict          no          config.json claims a tie, two different weights are stored
    df11                  no          Huffman-coded exponents: a row cannot be found without decoding
    unsupported_encoding  no          packed or scaled in a way that no lookup reads
    no_table              no          nothing in the checkpoint has the name of a token embedding
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftw.dtypes import FLOAT8_DTYPES, FLOAT_DTYPES
from ftw.names import find_heads, find_token_embeddings
from ftw.tie import Tie, judge_tie, read_claim

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.names import StoredModule

TOKEN_EMBEDDING = "token_embedding"  # noqa: S105 - a role, not a secret

_DF11_SUFFIXES = frozenset({"encoded_exponent", "sign_mantissa", "luts"})


@dataclass(frozen=True, slots=True)
class TableVerdict:
    """One lookup table and whether it may leave the GPU.

    Attributes:
        name: Its tensor, or the path of its module where no single tensor holds it; empty for "no_table".
        role: "token_embedding".
        rows: Rows of the stored table, None where the encoding hides them.
        columns: Elements of one row.
        dtype: Element type as stored.
        row_bytes: Bytes of one row.
        nbytes: Bytes of the table, of all tensors of a packed one.
        eligible: Whether it may leave the GPU.
        reason: A word of the module's table.
        detail: The evidence, for people.
        unreadable: Why no lookup reads its rows, wherever the table is; empty where one does.
    """

    name: str
    role: str
    rows: int | None
    columns: int | None
    dtype: str
    row_bytes: int | None
    nbytes: int
    eligible: bool
    reason: str
    detail: str
    unreadable: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """All lookup tables of a checkpoint, the token embedding that a model reads first at the front.

    Attributes:
        tables: At least one: where no token embedding was found, an entry says so.
        tied: Whether the first table and the LM head are one weight; None where the evidence does not tell.
        tie_evidence: What that rests on.
        warnings: What a user should know besides.
    """

    tables: tuple[TableVerdict, ...]
    tied: bool | None
    tie_evidence: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def token_embedding(self) -> TableVerdict:
        """The table that a model reads first."""
        return self.tables[0]

    @property
    def eligible_tables(self) -> tuple[TableVerdict, ...]:
        """The tables that may leave the GPU."""
        return tuple(table for table in self.tables if table.eligible)


_NO_TABLE = TableVerdict(
    name="",
    role=TOKEN_EMBEDDING,
    rows=None,
    columns=None,
    dtype="",
    row_bytes=None,
    nbytes=0,
    eligible=False,
    reason="no_table",
    detail="no tensor has the name of a token embedding",
    unreadable="no tensor has the name of a token embedding",
)


def judge(checkpoint: Checkpoint) -> Verdict:
    """Judge the lookup tables of a checkpoint; reads bytes only where a stored LM head may be a copy of the table."""
    modules = find_token_embeddings(checkpoint.tensors)
    heads = find_heads(checkpoint.tensors)
    if not modules and heads and read_claim(checkpoint.config).v5:  # a tied pair, stored under the head's name
        modules = heads[:1]
    ties = [judge_tie(checkpoint, module, heads) for module in modules]
    tables = tuple(_judge_table(checkpoint, module, tie) for module, tie in zip(modules, ties, strict=True))
    warnings = _warnings(checkpoint, tables)
    if not ties:
        return Verdict((_NO_TABLE,), None, (), warnings)
    return Verdict(tables, ties[0].value, ties[0].evidence, warnings)


def _judge_table(checkpoint: Checkpoint, module: StoredModule, tie: Tie) -> TableVerdict:
    tensors = [checkpoint.tensors[name] for name in module.tensors.values()]
    weight = checkpoint.tensors.get(module.tensors.get("weight", ""))
    is_matrix = weight is not None and len(weight.shape) == 2
    shown = weight or max(tensors, key=lambda tensor: tensor.nbytes)
    rows, columns = shown.shape if is_matrix else (None, None)
    encoding = _encoding_problem(checkpoint, module)
    reason, detail = encoding if encoding and tie.reason == "ok" else (tie.reason, tie.detail)
    return TableVerdict(
        name=shown.name if is_matrix else module.path,
        role=TOKEN_EMBEDDING,
        rows=rows,
        columns=columns,
        dtype=shown.ggml_type or shown.dtype,
        row_bytes=shown.nbytes // rows if rows else rows,
        nbytes=sum(tensor.nbytes for tensor in tensors),
        eligible=reason == "ok",
        reason=reason,
        detail=detail,
        unreadable=encoding[1] if encoding else "",
    )


def _encoding_problem(checkpoint: Checkpoint, module: StoredModule) -> tuple[str, str] | None:
    """Return the reason and detail for a table whose rows do not lie plain, None for one whose rows do."""
    if _DF11_SUFFIXES & set(module.packed):
        return "df11", "DF11 stores Huffman-coded exponents, so single rows cannot be read"
    if module.packed:
        return "unsupported_encoding", f"{', '.join(sorted(module.packed))} lie beside it, so its rows are not plain"
    weight = checkpoint.tensors[module.tensors["weight"]]
    if weight.ggml_type:
        return "unsupported_encoding", f"its rows are packed as {weight.ggml_type}, which this release does not look up"
    if len(weight.shape) != 2:
        return "unsupported_encoding", f"its shape is {list(weight.shape)}, [rows, columns] is needed"
    if not weight.nbytes:
        return "unsupported_encoding", f"its shape is {list(weight.shape)}, which has no elements"
    if weight.dtype not in FLOAT_DTYPES | FLOAT8_DTYPES:
        return "unsupported_encoding", f"its elements are {weight.dtype} without scales, floating point is needed"
    return None


def _warnings(checkpoint: Checkpoint, tables: tuple[TableVerdict, ...]) -> tuple[str, ...]:
    vocab_size = checkpoint.config.vocab_size
    return tuple(
        f"{table.name} has {table.rows} rows, fewer than the vocab_size {vocab_size} of config.json"
        for table in tables[:1]
        if table.rows is not None and vocab_size is not None and table.rows < vocab_size
    )
