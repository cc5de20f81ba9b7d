"""Rows: how the rows of a table lie in its tensors, and whether a lookup can read them.

A lookup reads plain floating-point rows, of a GGUF integers too, and those of a packed GGUF type that it decodes; one
table, or several shards of the same width that follow each other. Anything beside the weight that a packed or scaled
module has makes the rows something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftw.checkpoint import TOKEN_EMBEDDING, name_scheme
from ftw.checkpoint.df11 import DECODED_ROLES
from ftw.dtypes import FLOAT8_DTYPES, FLOAT_DTYPES, INTEGER_DTYPES
from ftw.errors import printable
from ftw.readers.safetensors import is_of_a_rank
from ftw.verdict.packing import Packing, UnknownPackingError, find_packing

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint, ModelConfig, StoredModule
    from ftw.tensors import TensorInfo

_MAX_NAMED = 8
_MAX_SUFFIX = 80  # characters of what is named


class Rows(NamedTuple):
    """How a table's rows lie: in `weights`, in order; `reason` is "ok", or a verdict's, which `problem` explains."""

    weights: tuple[TensorInfo, ...]
    reason: str = "ok"
    problem: str = ""
    packing: Packing | None = None


def find_rows(checkpoint: Checkpoint, module: StoredModule, role: str) -> Rows:
    """Return how the rows of a module's table lie."""
    weights = _weights(checkpoint, module)
    reason, problem = _problem_beside(checkpoint, module, weights, role)
    if reason == "ok":
        problem = _problem_of_shapes(module, weights, checkpoint.config)
    if problem:
        return Rows(tuple(weights), "unsupported_encoding" if reason == "ok" else reason, problem)
    try:
        packing = _packing_of_all(weights, checkpoint.config)
    except UnknownPackingError as error:
        return Rows(tuple(weights), "unsupported_encoding", str(error))
    problem = _problem_of_values(weights, packing, checkpoint.config)
    if not problem and role == TOKEN_EMBEDDING:
        problem = _problem_of_width(weights[0], packing, checkpoint.config)
        problem = problem or _problem_of_parts(module, weights, checkpoint.config)
    if problem:
        return Rows(tuple(weights), "unsupported_encoding", problem)
    return Rows(tuple(weights), packing=packing)


def _weights(checkpoint: Checkpoint, module: StoredModule) -> list[TensorInfo]:
    """Return the tensors that hold a module's rows, in order; FreeToken 0.1.2 named packed ones `qweight`."""
    suffixes = module.shards or [suffix for suffix in module.tensors if suffix == "weight"]
    if not suffixes and checkpoint.config.is_gguf and list(module.tensors) == ["qweight"]:
        suffixes = ["qweight"]
    return [checkpoint.tensors[module.tensors[suffix]] for suffix in suffixes]


def _problem_beside(
    checkpoint: Checkpoint, module: StoredModule, weights: list[TensorInfo], role: str
) -> tuple[str, str]:
    """Return reason and problem of a module that stores more than its weight, or something in place of it."""
    names = {weight.name for weight in weights}
    beside = sorted(suffix for suffix, name in module.tensors.items() if name not in names)
    if weights and weights[0].dtype in FLOAT8_DTYPES:  # which rarely comes without scales, whatever they are called
        start = f"{module.path}."
        stored = (name for name in checkpoint.names_below(module.path) if name not in names)
        beside = sorted({*beside, *(name[len(start) :] for name in stored)})
    if weights and not beside:
        return "ok", ""
    tensors = {suffix: checkpoint.tensors[name] for suffix, name in module.tensors.items()}
    scheme = name_scheme(module.tensors, tensors)
    if scheme == "DF11":
        option = "; --decode-df11 (decode_df11=True) makes a plain bf16 table of it" if role in DECODED_ROLES else ""
        return "df11", f"DF11 stores Huffman-coded exponents, so single rows cannot be read{option}"
    named = f"{scheme}: " if scheme else ""
    more = f" and {len(beside) - _MAX_NAMED} more" if len(beside) > _MAX_NAMED else ""
    problem = f"{named}{', '.join(map(_cut, beside[:_MAX_NAMED]))}{more} lie beside it, so its rows are not plain"
    return "unsupported_encoding", problem


def _cut(suffix: str) -> str:
    """Return a suffix for a message: of names that nest, one may be in the message of each table."""
    return suffix if len(suffix) <= _MAX_SUFFIX else f"{suffix[: _MAX_SUFFIX - 3]}..."


def _problem_of_shapes(module: StoredModule, weights: list[TensorInfo], config: ModelConfig) -> str:
    first = weights[0]
    if len(first.shape) != 2:
        return f"its shape is {list(first.shape)}, [rows, columns] is needed"
    if not first.nbytes:
        return f"its shape is {list(first.shape)}, which has no elements"
    if any(
        (other.dtype, other.ggml_type, other.shape[1:]) != (first.dtype, first.ggml_type, first.shape[1:])
        for other in weights
    ):
        return "its shards have different dtypes or widths"
    return _missing_shard(module, config)


def _packing_of_all(weights: list[TensorInfo], config: ModelConfig) -> Packing | None:
    """Return how the shards of a table are packed: all alike, with rows of padding after the last one alone."""
    packings = [packing for packing in (find_packing(weight, config) for weight in weights) if packing]
    if not packings:
        return None
    for weight, packing in zip(weights[:-1], packings, strict=False):
        if packing.rows != weight.shape[0]:
            raise UnknownPackingError(f"its shard {weight.name} has rows of padding, which only the last one may have")
    if any(packing.columns != packings[0].columns for packing in packings):
        raise UnknownPackingError("its shards hold rows of different numbers of values")
    return packings[0]._replace(rows=sum(packing.rows for packing in packings))


def _problem_of_values(weights: list[TensorInfo], packing: Packing | None, config: ModelConfig) -> str:
    # A GGUF has no scales beside its tensors, so integers in one stand for themselves.
    plain = FLOAT_DTYPES | FLOAT8_DTYPES | (INTEGER_DTYPES if config.is_gguf else frozenset())
    if packing is None and weights[0].dtype not in plain:
        return f"its elements are {weights[0].dtype} without scales, floating point is needed"
    return "" if packing else next(filter(None, (_problem_of_plain_shape(weight, weights) for weight in weights)), "")


def _problem_of_plain_shape(weight: TensorInfo, shards: list[TensorInfo]) -> str:
    """Check the shape that an FTW's index tells besides the stored one: of a whole table it may leave out rows."""
    rows, columns = weight.shape
    told = weight.logical_shape
    least = 1 if len(shards) == 1 else rows
    if told is None or (len(told) == 2 and least <= told[0] <= rows and told[1] == columns):
        return ""
    return f"its logical_shape is {list(told)}, but it is {weight.dtype} {list(weight.shape)} and not packed"


def _problem_of_width(weight: TensorInfo, packing: Packing | None, config: ModelConfig) -> str:
    """Check a token embedding's width against a GGUF's metadata: of an FTW, its index might tell another one."""
    width = packing.columns if packing else weight.shape[1]
    allowed = (config.hidden_size, config.raw.get(f"{config.architecture}.features_length"))
    if not config.is_gguf or config.hidden_size is None or width in allowed:
        return ""
    return f"its rows hold {width} values, but the metadata's embedding_length is {config.hidden_size}"


def _problem_of_parts(module: StoredModule, weights: list[TensorInfo], config: ModelConfig) -> str:
    """Say that a table may be one rank's part of it: by the file's name, or since it is a half, a quarter and so on."""
    if config.is_gguf or "encoder" in module.path:  # an encoder's vocabulary may be another one than vocab_size says
        return ""
    rows, wanted = sum(weight.shape[0] for weight in weights), config.vocab_size
    file = next((weight.shard for weight in weights if is_of_a_rank(weight.shard)), "")
    if file and (wanted is None or rows < wanted):
        told = (
            f"its {rows} rows are fewer than vocab_size, {wanted}" if wanted else "no vocab_size says of how many rows"
        )
        return f"it lies in {printable(file)}, which may hold one rank's part of it, and {told}"
    times, rest = divmod(wanted or 0, rows)
    if not rest and times > 1 and not times & (times - 1):
        return f"its {rows} rows are one part in {times} of vocab_size, {wanted}, as a rank of a parallel model has it"
    return ""


def _missing_shard(module: StoredModule, config: ModelConfig) -> str:
    """Name the first shard of a table that is not stored; the last ones are missed by the configuration alone."""
    numbers = [int("".join(filter(str.isdigit, suffix))) for suffix in module.shards]
    if not numbers:
        return ""
    count = max(config.count("split_ngram_parts") or 0, len(numbers))
    missing = next((place for place in range(count) if numbers[place : place + 1] != [place]), None)
    return "" if missing is None else f"its shard {missing} is missing"
