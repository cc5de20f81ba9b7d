"""Verdicts: may a lookup table leave the GPU?

It may if a forward pass reads single rows of it and nothing else: the LM head must not share it, and its rows must lie
plain in the file. A wrong "eligible" breaks a model without a word, a wrong "tied" costs its user the table's VRAM, so
each verdict carries the evidence that it rests on.

    reason                may leave   meaning
    ok                    yes
    tied                  no          the LM head, or the model itself, reads the whole table at every step
    tie_conflict          no          configuration and tensors contradict each other
    df11                  no          Huffman-coded exponents: a row cannot be found without decoding
    unsupported_encoding  no          packed or scaled in a way that no lookup reads
    no_table              no          nothing in the checkpoint has the name of a token embedding
    adapter               no          it is an adapter, and no model: its base has the tables
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftw.checkpoint import TOKEN_EMBEDDING, find_heads, find_not_a_model, find_other_tables, find_token_embeddings
from ftw.errors import CheckpointError
from ftw.verdict import families
from ftw.verdict.row_encoding import find_rows
from ftw.verdict.tensor_equality import TensorEquality
from ftw.verdict.tie import GGUF_TABLE, NOT_SHARED, READ_WHOLE, Tie, is_read_whole, judge_tie
from ftw.verdict.tie_claim import read_claim

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint, ModelConfig, StoredModule

_MAX_PAIRS = 10_000
# Rows beyond the tokens that are no reason to warn: padding to a multiple of up to 1024, ids that are kept for later.
_SPARE_ROWS, _SPARE_SHARE = 1024, 16


@dataclass(frozen=True, slots=True)
class TableVerdict:
    """One lookup table and whether it may leave the GPU.

    Attributes:
        name: Its tensor, or the path of its module where no single tensor holds it; empty for "no_table".
        tensors: Names of the tensors that hold its rows, in the order of the rows: several where it is cut into shards.
        role: "token_embedding", "per_layer_embedding", "position_embedding", "token_type_embedding" and so on.
        rows: Rows of the table without padding, None where the encoding hides them.
        columns: Elements of one row.
        dtype: Element type as stored, of a packed table the GGUF type.
        row_bytes: Bytes of one row.
        nbytes: Bytes of the table, of all tensors of a packed one.
        eligible: Whether it may leave the GPU.
        reason: A word of the module's table.
        detail: The evidence, for people.
        unreadable: Why no lookup reads its rows, wherever the table is; empty where one does.
    """

    name: str
    tensors: tuple[str, ...]
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
    tensors=(),
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
    """Judge the lookup tables of a checkpoint; reads bytes only where a stored LM head may be a copy of the table.

    Raises:
        CheckpointError: It has more tables or LM heads than any model, or one cannot be read.
    """
    modules = find_token_embeddings(checkpoint.tensors, checkpoint.source)
    config = checkpoint.config
    named = [module for module in modules if module.path == GGUF_TABLE]
    if checkpoint.format == "gguf" or (config.is_gguf and named):  # FreeToken's FTWs of one have other names alone
        modules = named
    heads = find_heads(checkpoint.tensors, checkpoint.source)
    if not modules and heads and not config.is_gguf and read_claim(config).v5:
        modules = heads[:1]  # a tied pair, stored under the head's name
    # Each pair may be compared, by digests of what was read once.
    if len(modules) * max(len(modules), len(heads)) > _MAX_PAIRS:
        problem = f"{len(modules)} token embeddings and {len(heads)} LM heads are stored, no model has so many"
        raise CheckpointError(checkpoint.source, "tensors", problem)
    equality = TensorEquality(checkpoint)
    ties = [judge_tie(checkpoint, module, modules, heads, equality) for module in modules]
    tables = [_judge_table(checkpoint, module, tie) for module, tie in zip(modules, ties, strict=True)]
    for role, module in find_other_tables(checkpoint.tensors, modules, checkpoint.source):
        tie = READ_WHOLE if is_read_whole(config, module) else NOT_SHARED
        tables.append(_judge_table(checkpoint, module, tie, role))
    warnings = (*checkpoint.warnings, *_warnings(checkpoint, tables), *_warn_of_base_model(config, tables, heads))
    other = find_not_a_model(checkpoint)
    if other is not None and other.kind == "adapter":  # its tables replace those of its base
        tables = [*([] if ties else [_NO_TABLE]), *tables]
        tables = [replace(table, eligible=False, reason=other.kind, detail=other.text) for table in tables]
        return Verdict(tuple(tables), None, (other.evidence,), warnings)
    if not ties:
        return Verdict((_NO_TABLE, *tables), None, (), warnings)
    return Verdict(tuple(tables), ties[0].value, ties[0].evidence, warnings)


def _judge_table(checkpoint: Checkpoint, module: StoredModule, tie: Tie, role: str = TOKEN_EMBEDDING) -> TableVerdict:
    tensors = [checkpoint.tensors[name] for name in module.tensors.values()]
    found = find_rows(checkpoint, module, role)
    weights, packing = found.weights, found.packing
    is_matrix = bool(weights) and all(len(weight.shape) == 2 for weight in weights)
    shown = weights[0] if weights else max(tensors, key=lambda tensor: tensor.nbytes)
    rows, columns = (sum(weight.shape[0] for weight in weights), shown.shape[1]) if is_matrix else (None, None)
    if packing:
        rows, columns = packing.rows, packing.columns
    elif len(weights) == 1 and shown.logical_shape is not None and len(shown.logical_shape) == 2:
        rows, columns = shown.logical_shape
    is_the_ties = tie.reason != "ok" or found.reason == "ok"
    reason, detail = (tie.reason, tie.detail) if is_the_ties else (found.reason, found.problem)
    return TableVerdict(
        name=shown.name if is_matrix and len(weights) == 1 else module.path,
        tensors=tuple(weight.name for weight in weights),
        role=role,
        rows=rows,
        columns=columns,
        dtype=packing.ggml_type if packing else shown.ggml_type or shown.dtype,
        row_bytes=shown.nbytes // shown.shape[0] if is_matrix and shown.shape[0] else None,
        nbytes=sum(tensor.nbytes for tensor in tensors),
        eligible=reason == "ok",
        reason=reason,
        detail=detail,
        unreadable=found.problem,
    )


def _warnings(checkpoint: Checkpoint, tables: list[TableVerdict]) -> tuple[str, ...]:
    config = checkpoint.config
    rows = next((table.rows for table in tables if table.role == TOKEN_EMBEDDING), None)
    if rows is None:
        return ()
    name = next(table.name for table in tables if table.role == TOKEN_EMBEDDING)
    if config.is_gguf and config.num_tokens not in (None, rows):
        return (f"{name} has {rows} rows, the tokenizer's list {config.num_tokens} tokens; the table's rows count",)
    return () if config.is_gguf else _warnings_of_rows(checkpoint, name, rows)


def _warnings_of_rows(checkpoint: Checkpoint, name: str, rows: int) -> tuple[str, ...]:
    """Say where a table has fewer rows than there are tokens, or more than padding and reserved ids account for."""
    vocab_size, num_tokens = checkpoint.config.vocab_size or 0, checkpoint.count_tokens() or 0
    warnings = []
    if rows < vocab_size:
        warnings.append(f"{name} has {rows} rows, fewer than the vocab_size {vocab_size} of config.json")
    if rows < num_tokens:
        warnings.append(f"{name} has {rows} rows, but the tokenizer has a token with the id {num_tokens - 1}")
    known = max(vocab_size, num_tokens)
    if vocab_size and rows - known > max(known // _SPARE_SHARE, _SPARE_ROWS):
        told = f"the vocab_size {vocab_size} of config.json" if known == vocab_size else f"{known} tokens"
        warnings.append(f"{name} has {rows} rows, many more than {told}; the table's rows count")
    return tuple(warnings)


def _warn_of_base_model(config: ModelConfig, tables: list[TableVerdict], heads: list[StoredModule]) -> tuple[str, ...]:
    """Say of a base model of language models what those that make a language model of its folder do."""
    names = config.architectures
    is_base = bool(names) and all(families.is_base_model(name) for name in names) and not config.model_class
    has_lm = config.model_type in families.TIED_BY_DEFAULT or config.model_type in families.UNTIED_BY_DEFAULT
    free = next((table.name for table in tables if table.role == TOKEN_EMBEDDING and table.eligible), None)
    if free is None or heads or not is_base or not has_lm:
        return ()
    everyone = "an LM class of transformers, vLLM or llama.cpp's converter"
    who = everyone if read_claim(config).v5 else "llama.cpp's converter"
    problem = f"{names[0]} has no LM head, and none is stored: what takes the folder for a language model all the same"
    return (f"{problem}, as {who}, gives it a head that is {free}",)
