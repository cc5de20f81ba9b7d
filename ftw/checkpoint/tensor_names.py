"""Names of tensors: which module of a checkpoint is a token embedding or another lookup table, which is an LM head.

A module is found by the last part of its path where that is telling (`embed_tokens`), by its whole path where it is not
(`embeddings`), never by its shape: position tables, vision towers and codebooks can have any shape.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Key = TypeVar("Key")

# Wrappers that training code leaves in front of every name.
_WRAPPERS = ("module.", "_orig_mod.", "base_model.model.")

_EMBEDDING_LEAVES = """
    embed_tokens word_embeddings shared wte tok_embeddings token_embedding token_embeddings embed_in
    tokens_embed word_embedding input_embeds_layer in_out_embed
    """.split()
_EMBEDDING_PATHS = frozenset(
    """
    embed model.embed model.llm.embed language_model.embed embeddings backbone.embeddings rwkv.embeddings
    model.embeddings transformer.embeddings language_model.embeddings model.language_model.embeddings
    language_model.backbone.embeddings
    transformer.w w cpmant.input_embedding input_embedding model.embedding backbone.embedding embed_text_tokens
    embedding.word_embeddings token_embd
    """.split()
)
_HEAD_LEAVES = """
    lm_head embed_out generator_lm_head unembed vocab_projector
    """.split()
_HEAD_PATHS = frozenset(
    """
    cls cls.predictions.decoder predictions.decoder mlm_score.decoder lm_head.decoder head.decoder decoder head
    decoder.cls.predictions.decoder decoder.lm_head.decoder
    proj_out output_projection output output_layer pred_layer.proj lm_head.out_proj lm_head.linear
    log_softmax.mlp.layer0 lm_loss transformer.output_layer model.transformer.ff_out transformer.lm_head
    """.split()
)
# Roles of lookup tables.
TOKEN_EMBEDDING = "token_embedding"  # noqa: S105 - a role, not a secret
PER_LAYER_EMBEDDING = "per_layer_embedding"
NGRAM_EMBEDDING = "ngram_embedding"
POSITION_EMBEDDING = "position_embedding"
TOKEN_TYPE_EMBEDDING = "token_type_embedding"  # noqa: S105
# Of tables that go to host memory. The others stay: a few MiB at most, and read at every step.
MOVED_ROLES = frozenset({TOKEN_EMBEDDING, PER_LAYER_EMBEDDING, NGRAM_EMBEDDING})
# Tables beside the token embedding, by role: what ends the path of their module.
_OTHER_TABLES = {
    PER_LAYER_EMBEDDING: r"(?:.+\.)?embed_tokens_per_layer|per_layer_token_embd",
    NGRAM_EMBEDDING: r"(?:.+\.)?(?:ngram_embedding|engram\.embed)|(?:blk\.\d+\.)?ple_ngram_embd",
    POSITION_EMBEDDING: r"(?:.+\.)?(?:position_embeddings?|embed_positions|wpe|positions_embed|position_embeds_layer)"
    r"|position_embd",
    TOKEN_TYPE_EMBEDDING: r"(?:.+\.)?token_type_embeddings(?:_\d+)?|token_types",
}
# These two occur in towers of other senses too: they count where they lie beside a token embedding.
_BESIDE_TOKENS = frozenset({POSITION_EMBEDDING, TOKEN_TYPE_EMBEDDING})
# Words in the names of modules that look up where a token stands, or of what kind it is, not what it is; or that are
# read as a whole, as the codebooks of vector quantisers are.
_STEADY_WORDS = frozenset(
    """
    bias codebook codebooks column pe pos position positional positions quantize quantizer rel relative row seg segment
    segments time timestep timesteps type types vq wpe
    """.split()
)
_SHARD = re.compile(r"(?:shard_)?\d+\.weight")  # one part of an n-gram table, cut along its rows
# Parts of a model that look up other things than its text: their tables are not the token embedding.
_OTHER_PARTS = frozenset(
    """
    audio audio_model audio_tower blk code2wav code_predictor conditioning_encoder depth_decoder dit
    entity_embeddings exp_avg exp_avg_sq gemma_expert image_encoder layers medusa_head mtp mtp_head nextn optim
    optimizer patcher protein_encoder qformer speech_decoder_model speech_encoder_model t2u_model talker token2wav
    vision_encoder vision_model vision_tower visual vq_model vqmodel
    """.split()
)
# The two sides of an encoder-decoder, beside the table that both share.
_SIDES = ("encoder", "decoder", "text_encoder", "text_decoder")
# What a packed or scaled module stores beside its weight, and what it stores in place of one.
_BESIDE_WEIGHT = (
    r"(?:weight[._])?(?:.*_)?(?:scales?|scale_\w+|descale|shift|zeros?|zero_point|qzeros|biases|qbiases|SCB|absmax|shape"
    r"|g_idx)|weight_(?:meta|norm|qscale|zp)|lora_.+|_?amax|.+_amax|.+_quantizer\..+|.*zp|scaling|wscale"
    r"|additional_embedding\.weight"  # Idefics: rows of the tokens added last
)
_IN_PLACE_OF_WEIGHT = (
    r"(?:weight[._])?(?:.*_)?(?:quant_map|quant_state\..+|packed|W_q|q?data|qweight|luts|encoded_exponent|sign_mantissa"
    r"|output_positions|gaps|split_positions|embedding_quantized|codes|codebooks)"
    r"|dqweight|dense_weights|indices|centroids\.weight|tables2|weight\..+"
)
_SCALES = re.compile(_BESIDE_WEIGHT)
_PACKED = re.compile(f"{_BESIDE_WEIGHT}|{_IN_PLACE_OF_WEIGHT}")
MAX_MODULES = 4096  # of one kind; models have some hundred tables, and each costs memory wherever it is judged
# No module's name is longer; matching a hostile one of megabytes would take hours.
_MAX_NAME = 512


def _leaf_pattern(leaves: list[str]) -> re.Pattern[str]:
    return re.compile(rf"(?P<module>(?:.+\.)?(?:{'|'.join(leaves)}))\.(?P<suffix>.+)")


_EMBEDDING = _leaf_pattern(_EMBEDDING_LEAVES)
_HEAD = _leaf_pattern(_HEAD_LEAVES)


_OTHER_TABLE = re.compile(
    rf"(?:{'|'.join(f'(?P<{role}>{paths})' for role, paths in _OTHER_TABLES.items())})"
    rf"\.(?:weight|{_SHARD.pattern}|{_PACKED.pattern})"
)


class StoredModule(NamedTuple):
    """A module of a checkpoint: its path as stored, and the names of its tensors by what follows the path."""

    path: str
    tensors: Mapping[str, str]

    @property
    def shards(self) -> list[str]:
        """What follows its path in the names of its parts, in the order of its rows."""
        shards = [suffix for suffix in self.tensors if _SHARD.fullmatch(suffix)]
        return sorted(shards, key=lambda suffix: int(re.sub(r"\D", "", suffix)))


def find_token_embeddings(names: Iterable[str], source: str = "model") -> list[StoredModule]:
    """Find the modules that look up tokens, the one that a model reads first at the front.

    Raises:
        CheckpointError: `source` has more of them than any model.
    """
    modules = _find(names, _EMBEDDING, _EMBEDDING_PATHS, "token embeddings", source)
    paths = {module.path for module in modules}
    return sorted(modules, key=lambda module: (_rank(module.path, paths), module.path))


def find_other_tables(
    names: Iterable[str], embeddings: list[StoredModule], source: str = "model"
) -> list[tuple[str, StoredModule]]:
    """Find the further lookup tables, each with its role; `embeddings` are the token embeddings.

    An n-gram table may be cut into shards; `tensors` then has all of them.

    Raises:
        CheckpointError: `source` has more of them than any model.
    """
    parents = {module.path.rpartition(".")[0] for module in embeddings}
    beside = parents | {f"{parent}.{side}".lstrip(".") for parent in parents for side in _SIDES}
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        if not ("emb" in name or "wpe" in name or "token_types" in name or "position" in name) or len(name) > _MAX_NAME:
            continue
        match = _OTHER_TABLE.fullmatch(name)
        role = match and match.lastgroup
        if not match or not role:
            continue
        module, suffix = match[role], name[len(match[role]) + 1 :]
        if role not in _BESIDE_TOKENS or module.rpartition(".")[0] in beside:
            _note(found, (role, module), suffix, name, "lookup tables", source)
    return [(role, StoredModule(module, tensors)) for (role, module), tensors in found.items()]


def is_position_like(path: str) -> bool:
    """Return whether a module is by its name one of positions, segments, times or codes, which every step reads.

    The last two parts of its path tell: `pos_embed`, `positional_embedding.embedding`.
    """
    words = "_".join(path.lower().split(".")[-2:]).split("_")
    return not _STEADY_WORDS.isdisjoint(words)


def find_heads(names: Iterable[str], source: str = "model") -> list[StoredModule]:
    """Find the modules that map hidden states to tokens. A bias or a scale alone is not a head.

    Raises:
        CheckpointError: `source` has more of them than any model.
    """
    heads = _find(names, _HEAD, _HEAD_PATHS, "LM heads", source)
    return [head for head in heads if not all(_SCALES.fullmatch(suffix) for suffix in head.tensors)]


def _find(
    names: Iterable[str], leaves: re.Pattern[str], paths: frozenset[str], kind: str, source: str
) -> list[StoredModule]:
    found: dict[str, dict[str, str]] = {}
    for name in names:
        if ".layers." in name or len(name) > _MAX_NAME:  # most names, and none of them a module that is looked for
            continue
        bare = _strip_wrappers(name)
        module, suffix = _split(bare, leaves, paths)
        if module and not _OTHER_PARTS.intersection(module.split(".")[:-1]):
            wrapper = name[: len(name) - len(bare)]
            _note(found, wrapper + module, suffix, name, kind, source)
    return [StoredModule(path, tensors) for path, tensors in found.items()]


def _note(found: dict[Key, dict[str, str]], module: Key, suffix: str, name: str, kind: str, source: str) -> None:
    """Add a tensor to its module, unless that is one too many."""
    if module not in found and len(found) == MAX_MODULES:
        problem = f"more than {MAX_MODULES} {kind} are stored, at most {MAX_MODULES} are allowed"
        raise CheckpointError(source, "tensors", problem)
    found.setdefault(module, {})[suffix] = name


def _split(name: str, leaves: re.Pattern[str], paths: frozenset[str]) -> tuple[str, str]:
    """Return `(module path, suffix)`, or `("", "")` if no pattern matches."""
    match = leaves.fullmatch(name)
    if match and (match["suffix"] == "weight" or _PACKED.fullmatch(match["suffix"])):
        return match["module"], match["suffix"]
    module, _, suffix = name.rpartition(".")
    if module in paths and (suffix == "weight" or _PACKED.fullmatch(suffix)):
        return module, suffix
    return "", ""


def _strip_wrappers(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name[len(next(wrapper for wrapper in _WRAPPERS if name.startswith(wrapper))) :]
    return name


def _rank(path: str, paths: set[str]) -> int:
    """Order the tables of an encoder-decoder: encoder, decoder, and last the one that both would share.

    A shared table that is stored beside tables of the two sides (an untied Bart) is read by neither.
    """
    parent, _, leaf = path.rpartition(".")
    parts = parent.split(".")
    if any(part.endswith("decoder") for part in parts):
        return 2
    if any(part.endswith("encoder") for part in parts):
        return 1
    start = f"{parent}." if parent else ""
    sides = {f"{start}{side}.{name}" for side in _SIDES for name in (leaf, "embed_tokens")}
    return 0 if sides.isdisjoint(paths) else 3
