"""DF11: lookup tables that dfloat11 has compressed, as plain bf16 tables.

A compressed module stores six tensors in place of its weight. Their sizes, with `blocks` for the number of blocks of
4096 bytes in the stream:

    luts               U8 [tables + 1, 256]       lookup tables of the Huffman code (`huffman_code`)
    encoded_exponent   U8 [stream]                bf16 exponents, Huffman-coded, first bits highest
    sign_mantissa      U8 [elements]              sign, bit 7, and mantissa, bits 6 to 0, of each element
    output_positions   U8 [4 * (blocks + 1)]      little-endian u32: the element that begins each block first, and
                                                  the number of elements
    gaps               U8 [320 * blocks]          5 bits for every 8 bytes of the stream: where the first code begins
    split_positions    I64 [0]                    of several weights in one stream, where each ends; older files lack it

The shape is not stored. Token embeddings and per-layer ones are decoded if config.json says theirs.
A block is decoded without those before it, so that any range of bytes takes no more work than its blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.checkpoint.quantization_schemes import name_scheme
from ftw.checkpoint.tensor_names import PER_LAYER_EMBEDDING, TOKEN_EMBEDDING, find_other_tables, find_token_embeddings
from ftw.errors import CheckpointError
from ftw.files import short_repr
from ftw.tensors import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftw.checkpoint.config import ModelConfig
    from ftw.checkpoint.df11.blocks import Df11Blocks, Read
    from ftw.checkpoint.stored_modules import StoredModule

DECODED_ROLES = frozenset({TOKEN_EMBEDDING, PER_LAYER_EMBEDDING})
_BLOCK_NBYTES = 4096
_GAPS_NBYTES = 320  # of a block
_MAX_TABLES = 17  # a byte can point to 16, beside the first one
_MAX_TAIL_NBYTES = 3  # of a last block that no code begins in, for which dfloat11 may write no position
_STORED = ("luts", "encoded_exponent", "sign_mantissa", "output_positions", "gaps")
_OPTIONAL = "split_positions"
_CONFIG_KEY = "dfloat11_config"
_DIVISION = {"threads_per_block": [512], "bytes_per_thread": 8}  # of a stream into blocks and chunks
_TOKEN_COLUMNS = ("embedding_size", "word_embed_proj_dim")  # of models whose table is not as wide as their layers


class Df11Table:
    """A compressed table.

    Attributes:
        tensor: The plain table that it decodes to, BF16 `[rows, columns]`.
        parts: The tensors that it is stored as, by what follows the module's path.
    """

    def __init__(self, source: str, tensor: TensorInfo, parts: Mapping[str, TensorInfo]) -> None:
        self.tensor = tensor
        self.parts = parts
        self._source = source
        self._blocks: Df11Blocks | None = None

    def read_into(self, view: memoryview, offset: int, read: Read) -> None:
        """Fill a writable view of bytes with those of the plain table, from its byte `offset` on.

        Memory: 3 MiB and 8 bytes for each block are kept; 5 MiB more are taken while it decodes, 30 by a file that is
        made to harm.

        Args:
            view: Of the caller; it must not reach past the end.
            offset: Of its first byte.
            read: Fills a view with the bytes of a stored tensor, which is told by its name, from an offset on.

        Raises:
            CheckpointError: What is stored contradicts itself.
        """
        if self._blocks is None:
            from ftw.checkpoint.df11.blocks import Df11Blocks  # numpy, which a look at headers does without

            self._blocks = Df11Blocks(self._source, self.parts, read)
        if view:
            self._blocks.read_into(view, offset, read)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the tensors that it is stored as."""
        return tuple(part.name for part in self.parts.values())


def find_df11_tables(source: str, tensors: Mapping[str, TensorInfo], config: ModelConfig) -> list[Df11Table]:
    """Find the compressed tables of a checkpoint whose shape a configuration can tell; reads nothing.

    Raises:
        CheckpointError: A tensor of one is missing or has another size than the rest need, its shape is not told, or
            there are more tables than in any model.
    """
    tables = []
    for role, module in _iter_modules(source, tensors):
        stored = {suffix: tensors[name] for suffix, name in module.tensors.items()}
        if name_scheme(stored, stored) == "DF11":
            _check_names(source, module)
            _check_division(source, config)
            _check_sizes(source, stored)
            shape = _shape_of(source, module.path, role, stored["sign_mantissa"].nbytes, config)
            nbytes = 2 * stored["sign_mantissa"].nbytes
            tensor = TensorInfo(f"{module.path}.weight", "BF16", shape, 0, nbytes, stored["sign_mantissa"].shard)
            tables.append(Df11Table(source, tensor, stored))
    return tables


def _iter_modules(source: str, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, StoredModule]]:
    embeddings = find_token_embeddings(tensors, source)
    yield from ((TOKEN_EMBEDDING, module) for module in embeddings)
    others = find_other_tables(tensors, embeddings, source)
    yield from ((role, module) for role, module in others if role in DECODED_ROLES)


def _check_names(source: str, module: StoredModule) -> None:
    missing = [suffix for suffix in _STORED if suffix not in module.tensors]
    if missing:
        raise CheckpointError(source, f"{module.path}.{missing[0]}", f"is missing, DF11 needs {', '.join(_STORED)}")
    added = sorted(set(module.tensors) - {*_STORED, _OPTIONAL})
    if added:
        problem = f"lies beside the module's DF11, which can have {', '.join((*_STORED, _OPTIONAL))} alone"
        raise CheckpointError(source, module.tensors[added[0]], problem)


def _check_division(source: str, config: ModelConfig) -> None:
    division = config.raw.get(_CONFIG_KEY)
    for key, needed in _DIVISION.items():
        found = division.get(key, needed) if isinstance(division, dict) else needed
        if found != needed:
            subject = f"config.json: {_CONFIG_KEY}.{key}"
            raise CheckpointError(source, subject, f"is {short_repr(found)}, {needed} is needed")


def _check_sizes(source: str, stored: Mapping[str, TensorInfo]) -> None:
    def check(suffix: str, needed: str, *, is_right: bool) -> None:
        tensor = stored[suffix]
        if not is_right or tensor.dtype != ("I64" if suffix == _OPTIONAL else "U8"):
            raise CheckpointError(source, tensor.name, f"is {tensor.describe()}, {needed} is needed")

    luts, stream, elements = (stored[suffix] for suffix in _STORED[:3])
    is_table = len(luts.shape) == 2 and luts.shape[1] == 256 and 1 < luts.shape[0] <= _MAX_TABLES + 1
    check("luts", f"U8 [2 to {_MAX_TABLES + 1}, 256]", is_right=is_table)
    check("encoded_exponent", "U8 [1 or more]", is_right=len(stream.shape) == 1 and stream.nbytes > 0)
    blocks = -(-stream.nbytes // _BLOCK_NBYTES)
    most = f"U8 [1 to {8 * stream.nbytes}], as many as the bits of {stream.name},"
    check("sign_mantissa", most, is_right=len(elements.shape) == 1 and 0 < elements.nbytes <= 8 * stream.nbytes)
    has_tail = blocks > 1 and stream.nbytes - (blocks - 1) * _BLOCK_NBYTES <= _MAX_TAIL_NBYTES
    allowed = ((4 * blocks + 4,), (4 * blocks,)) if has_tail else ((4 * blocks + 4,),)
    is_one = stored["output_positions"].shape in allowed
    check("output_positions", f"for {blocks} blocks U8 [{4 * blocks + 4}]", is_right=is_one)
    needed = (_GAPS_NBYTES * blocks,)
    check("gaps", f"for {blocks} blocks U8 {list(needed)}", is_right=stored["gaps"].shape == needed)
    if _OPTIONAL in stored:
        check(_OPTIONAL, "for a table, which is one weight, I64 [0]", is_right=stored[_OPTIONAL].shape == (0,))


def _shape_of(source: str, path: str, role: str, elements: int, config: ModelConfig) -> tuple[int, int]:
    """Return `[rows, columns]` of a table, as config.json says.

    Raises:
        CheckpointError: It does not, or of another number of elements.
    """
    names = "vocab_size and hidden_size"
    if role == TOKEN_EMBEDDING:
        rows = config.vocab_size
        columns = [config.hidden_size, *(config.count(name) for name in _TOKEN_COLUMNS)]
    else:
        names = "vocab_size_per_layer_input, num_hidden_layers and hidden_size_per_layer_input"
        rows = config.count("vocab_size_per_layer_input") or config.vocab_size
        columns = [(config.num_layers or 0) * (config.count("hidden_size_per_layer_input") or 0)]
    told = [(rows, width) for width in columns if rows and width]
    for shape in told:
        if shape[0] * shape[1] == elements:
            return shape
    found = ", ".join(str(list(shape)) for shape in told) or "nothing"
    problem = f"DF11 does not store the shape of its {elements} elements and config.json tells {found}"
    raise CheckpointError(source, path, f"{problem}, {names} are needed")
