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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ftw.dtypes import FLOAT8_DTYPES, FLOAT_DTYPES, INTEGER_DTYPES
from ftw.encodings import name_scheme
from ftw.errors import CheckpointError
from ftw.kv_cache import first_count
from ftw.names import StoredModule, find_heads, find_other_tables, find_token_embeddings
from ftw.packing import Packing, UnknownPackingError, find_packing
from ftw.tie import GGUF_TABLE, NOT_SHARED, READ_WHOLE, Tie, is_read_whole, judge_tie, read_claim

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.config import ModelConfig
    from ftw.tensors import TensorInfo

_MAX_PAIRS = 10_000
TOKEN_EMBEDDING = "token_embedding"  # noqa: S105 - a role, not a secret


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
    """Judge the lookup tables of a checkpoint; reads bytes only where a stored LM head may be a copy of the table."""
    modules = find_token_embeddings(checkpoint.tensors)
    if checkpoint.format == "gguf":  # which has its own names; FreeToken's FTWs of one have others
        modules = [module for module in modules if module.path == GGUF_TABLE]
    heads = find_heads(checkpoint.tensors)
    config = checkpoint.config
    if (
        not modules and heads and not config.is_gguf and read_claim(config).v5
    ):  # a tied pair, stored under the head's name
        modules = heads[:1]
    if len(modules) * len(heads) > _MAX_PAIRS:  # each pair may be compared, byte for byte
        problem = f"{len(modules)} token embeddings and {len(heads)} LM heads are stored, no model has so many"
        raise CheckpointError(checkpoint.source, "tensors", problem)
    ties = [judge_tie(checkpoint, module, heads) for module in modules]
    tables = [_judge_table(checkpoint, module, tie) for module, tie in zip(modules, ties, strict=True)]
    for role, module in find_other_tables(checkpoint.tensors, modules):
        tie = READ_WHOLE if is_read_whole(config, module) else NOT_SHARED
        tables.append(_judge_table(checkpoint, module, tie, role))
    warnings = (*checkpoint.warnings, *_warnings(checkpoint, tables))
    if not ties:
        return Verdict((_NO_TABLE, *tables), None, (), warnings)
    return Verdict(tuple(tables), ties[0].value, ties[0].evidence, warnings)


class _Encoding(NamedTuple):
    """How a table's rows lie in its tensors: `reason` and `detail` say why they cannot be looked up."""

    reason: str = "ok"
    detail: str = ""
    packing: Packing | None = None


def _judge_table(checkpoint: Checkpoint, module: StoredModule, tie: Tie, role: str = TOKEN_EMBEDDING) -> TableVerdict:
    tensors = [checkpoint.tensors[name] for name in module.tensors.values()]
    weights = _weights(checkpoint, module)
    is_matrix = bool(weights) and all(len(weight.shape) == 2 for weight in weights)
    shown = weights[0] if weights else max(tensors, key=lambda tensor: tensor.nbytes)
    encoding = _judge_encoding(checkpoint, module, weights)
    if role == TOKEN_EMBEDDING and encoding.reason == "ok":
        encoding = _check_width(checkpoint.config, weights, encoding)
    rows, columns = (sum(weight.shape[0] for weight in weights), shown.shape[1]) if is_matrix else (None, None)
    if encoding.packing:
        rows, columns = encoding.packing.rows, encoding.packing.columns
    elif len(weights) == 1 and shown.logical_shape is not None and len(shown.logical_shape) == 2:
        rows, columns = shown.logical_shape
    reason, detail = (tie.reason, tie.detail) if tie.reason != "ok" or encoding.reason == "ok" else encoding[:2]
    return TableVerdict(
        name=shown.name if is_matrix and len(weights) == 1 else module.path,
        tensors=tuple(weight.name for weight in weights),
        role=role,
        rows=rows,
        columns=columns,
        dtype=encoding.packing.ggml_type if encoding.packing else shown.ggml_type or shown.dtype,
        row_bytes=shown.nbytes // shown.shape[0] if is_matrix and shown.shape[0] else None,
        nbytes=sum(tensor.nbytes for tensor in tensors),
        eligible=reason == "ok",
        reason=reason,
        detail=detail,
        unreadable=encoding.detail,
    )


def _weights(checkpoint: Checkpoint, module: StoredModule) -> list[TensorInfo]:
    """Return the tensors that hold a module's rows, in order; FreeToken 0.1.2 named packed ones `qweight`."""
    suffixes = module.shards or [suffix for suffix in module.tensors if suffix == "weight"]
    if not suffixes and checkpoint.config.is_gguf and list(module.tensors) == ["qweight"]:
        suffixes = ["qweight"]
    return [checkpoint.tensors[module.tensors[suffix]] for suffix in suffixes]


def _judge_encoding(checkpoint: Checkpoint, module: StoredModule, weights: list[TensorInfo]) -> _Encoding:
    unsupported = "unsupported_encoding"
    names = {weight.name for weight in weights}
    beside = sorted(suffix for suffix, name in module.tensors.items() if name not in names)
    if weights and weights[0].dtype in FLOAT8_DTYPES:  # which rarely comes without scales, whatever they are called
        start = f"{module.path}."
        stored = (name for name in checkpoint.tensors if name.startswith(start) and name not in names)
        beside = sorted({*beside, *(name[len(start) :] for name in stored)})
    if beside or not weights:
        tensors = {suffix: checkpoint.tensors[name] for suffix, name in module.tensors.items()}
        scheme = name_scheme(module.tensors, tensors)
        if scheme == "DF11":
            return _Encoding("df11", "DF11 stores Huffman-coded exponents, so single rows cannot be read")
        named = f"{scheme}: " if scheme else ""
        shown = ", ".join(beside[:8]) + (f" and {len(beside) - 8} more" if len(beside) > 8 else "")
        return _Encoding(unsupported, f"{named}{shown} lie beside it, so its rows are not plain")
    weight = weights[0]
    if len(weight.shape) != 2:
        return _Encoding(unsupported, f"its shape is {list(weight.shape)}, [rows, columns] is needed")
    if not weight.nbytes:
        return _Encoding(unsupported, f"its shape is {list(weight.shape)}, which has no elements")
    if any((other.dtype, other.shape[1:]) != (weight.dtype, weight.shape[1:]) for other in weights):
        return _Encoding(unsupported, "its shards have different dtypes or widths")
    problem = _missing_shard(module, checkpoint.config)
    if problem:
        return _Encoding(unsupported, problem)
    try:
        packing = find_packing(weight, checkpoint.config)
    except UnknownPackingError as error:
        return _Encoding(unsupported, str(error))
    # A GGUF has no scales beside its tensors, so integers in one stand for themselves.
    plain = FLOAT_DTYPES | FLOAT8_DTYPES | (INTEGER_DTYPES if checkpoint.config.is_gguf else frozenset())
    if packing is None and weight.dtype not in plain:
        return _Encoding(unsupported, f"its elements are {weight.dtype} without scales, floating point is needed")
    return _Encoding(packing=packing)


def _check_width(config: ModelConfig, weights: list[TensorInfo], encoding: _Encoding) -> _Encoding:
    """Check a token embedding's width against a GGUF's metadata: of an FTW, its index might tell another one."""
    width = encoding.packing.columns if encoding.packing else weights[0].shape[1]
    allowed = (config.hidden_size, config.raw.get(f"{config.architecture}.features_length"))
    if not config.is_gguf or config.hidden_size is None or width in allowed:
        return encoding
    problem = f"its rows hold {width} values, but the metadata's embedding_length is {config.hidden_size}"
    return _Encoding("unsupported_encoding", problem)


def _missing_shard(module: StoredModule, config: ModelConfig) -> str:
    """Name the first shard of a table that is not stored; the last ones are missed by the configuration alone."""
    numbers = [int("".join(filter(str.isdigit, suffix))) for suffix in module.shards]
    if not numbers:
        return ""
    text = config.raw.get("text_config")
    parts = (text if isinstance(text, dict) else {}, config.raw)
    count = max(first_count(parts, ("split_ngram_parts",)) or 0, len(numbers))
    missing = next((place for place in range(count) if numbers[place : place + 1] != [place]), None)
    return "" if missing is None else f"its shard {missing} is missing"


def _warnings(checkpoint: Checkpoint, tables: list[TableVerdict]) -> tuple[str, ...]:
    config = checkpoint.config
    rows = next((table.rows for table in tables if table.role == TOKEN_EMBEDDING), None)
    if rows is None:
        return ()
    name = next(table.name for table in tables if table.role == TOKEN_EMBEDDING)
    if config.is_gguf and config.num_tokens not in (None, rows):
        return (f"{name} has {rows} rows, the tokenizer's list {config.num_tokens} tokens; the table's rows count",)
    if not config.is_gguf and config.vocab_size is not None and rows < config.vocab_size:
        return (f"{name} has {rows} rows, fewer than the vocab_size {config.vocab_size} of config.json",)
    return ()
