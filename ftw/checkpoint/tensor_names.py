"""Names of tensors: which module of a checkpoint is a token embedding or another lookup table, which is an LM head.

A module is found by the last part of its path where that is telling (`embed_tokens`), by its whole path where it is not
(`embeddings`), never by its shape: position tables, vision towers and codebooks can have any shape.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftw.checkpoint.stored_modules import (
    MAX_NAME,
    PACKED,
    SCALES,
    SHARD,
    ModuleCollection,
    StoredModule,
    is_part,
    stored_path,
    without_wrappers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Parts of a model that hold a language model, whose modules are called there as they are when it stands alone; what
# a decoder that is no language model looks up can have the names of its tables, but not of its head.
_LANGUAGE_PARTS = "backbone base_model language_model llm lm model text_model thinker transformer".split()
_DECODER_PARTS = ["decoder", "text_decoder"]
_EMBEDDING_LEAVES = """
    embed_tokens word_embeddings shared wte tok_embeddings token_embedding token_embeddings embed_in
    tokens_embed word_embedding input_embeds_layer in_out_embed transformer.w cpmant.input_embedding
    """.split()
_EMBEDDING_PATHS = """
    embed embeddings rwkv.embeddings w input_embedding model.embedding backbone.embedding embed_text_tokens
    embedding.word_embeddings token_embd
    """.split()
_HEAD_LEAVES = """
    lm_head embed_out generator_lm_head unembed vocab_projector
    """.split()
_HEAD_PATHS = """
    cls cls.predictions.decoder predictions.decoder mlm_score.decoder lm_head.decoder head.decoder decoder head
    proj_out output_projection output output_layer pred_layer.proj lm_head.out_proj lm_head.linear
    log_softmax.mlp.layer0 lm_loss transformer.ff_out
    """.split()
# What a module is called that may be a head too, wherever it is: `mlm_head`, `codebook0_head`, `to_logits`.
_LIKE_HEAD = re.compile(
    r"(?:\w{1,64}_)?(?:head|logits|unembed|output_layer|output_proj|lm_loss)(?:ding|ection)?(?:_?\d{1,4})?"
    r"|decoder|output|proj_out"
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


def _leaf_pattern(leaves: list[str]) -> re.Pattern[str]:
    """Return the pattern of modules that the end of their path tells."""
    ends = "|".join(leaf.replace(".", r"\.") for leaf in leaves)
    return re.compile(rf"(?P<module>(?:.+\.)?(?:{ends}))\.(?P<suffix>.+)")


def _path_pattern(paths: list[str], parts: list[str]) -> re.Pattern[str]:
    """Return the pattern of modules that their whole path tells, but for the parts that they may be in."""
    whole = "|".join(path.replace(".", r"\.") for path in sorted(paths, key=len, reverse=True))
    return re.compile(rf"(?P<module>(?:(?:{'|'.join(parts)})\.)*(?:{whole}))\.(?P<suffix>.+)")


_EMBEDDING = (_leaf_pattern(_EMBEDDING_LEAVES), _path_pattern(_EMBEDDING_PATHS, _LANGUAGE_PARTS))
_HEAD = (_leaf_pattern(_HEAD_LEAVES), _path_pattern(_HEAD_PATHS, _LANGUAGE_PARTS + _DECODER_PARTS))
_OTHER_TABLE = re.compile(
    rf"(?:{'|'.join(f'(?P<{role}>{paths})' for role, paths in _OTHER_TABLES.items())})"
    rf"\.(?P<suffix>weight|{SHARD.pattern}|{PACKED.pattern})"
)


def find_token_embeddings(names: Iterable[str], source: str = "model") -> list[StoredModule]:
    """Find the modules that look up tokens, the one that a model reads first at the front.

    Raises:
        CheckpointError: `source` has more of them than any model.
    """
    modules = _find(names, _split_embedding, "token embeddings", source)
    paths = {module.bare_path for module in modules}
    return sorted(modules, key=lambda module: (_rank(module.bare_path, paths), _is_replaced(module), module.path))


def find_other_tables(
    names: Iterable[str], embeddings: list[StoredModule], source: str = "model"
) -> list[tuple[str, StoredModule]]:
    """Find the further lookup tables, each with its role; `embeddings` are the token embeddings.

    An n-gram table may be cut into shards; `tensors` then has all of them.

    Raises:
        CheckpointError: `source` has more of them than any model.
    """
    parents = {module.bare_path.rpartition(".")[0] for module in embeddings}
    beside = parents | {f"{parent}.{side}".lstrip(".") for parent in parents for side in _SIDES}
    found = ModuleCollection("lookup tables", source)
    for name in names:
        if not ("emb" in name or "wpe" in name or "token_types" in name or "position" in name) or len(name) > MAX_NAME:
            continue
        match = _OTHER_TABLE.fullmatch(without_wrappers(name))
        if match is None:
            continue
        role = next(role for role in _OTHER_TABLES if match[role])
        module = match[role]
        if role not in _BESIDE_TOKENS or module.rpartition(".")[0] in beside:
            found.add(stored_path(name, len(module)), match["suffix"], name, role)
    return found.modules()


def is_beside(head: StoredModule, table: StoredModule) -> bool:
    """Return whether a head belongs to the language model whose table is given, as far as their paths tell.

    Its path has no parts but those of language models, and those that the table's has too: a draft, a decoder of speech
    or a critic is a part of its own, whatever it is called.
    """
    known = {*_LANGUAGE_PARTS, *_DECODER_PARTS, *table.bare_path.split(".")}
    return known.issuperset(head.bare_path.split(".")[: -_num_own_parts(head)])


def _num_own_parts(head: StoredModule) -> int:
    """Return how many parts a head's own name has at the end of its path: two of `lm_head.decoder`."""
    path = head.bare_path
    return max((leaf.count(".") + 1 for leaf in _HEAD_PATHS if f".{path}".endswith(f".{leaf}")), default=1)


def is_position_like(path: str) -> bool:
    """Return whether a module is by its name one of positions, segments, times or codes, which every step reads.

    The last two parts of its path tell: `pos_embed`, `positional_embedding.embedding`.
    """
    words = "_".join(path.lower().split(".")[-2:]).split("_")
    return not _STEADY_WORDS.isdisjoint(words)


def find_heads(names: Iterable[str], source: str = "model") -> list[StoredModule]:
    """Find the modules that map hidden states to tokens. A bias or a scale alone is not a head.

    Where the end of a path is telling (`lm_head`), anything that the module stores in place of a weight counts, also
    in a form that is not known.

    Raises:
        CheckpointError: `source` has more of them than any model.
    """
    return [head for head in _find(names, _split_head, "LM heads", source) if _has_values(head)]


def find_possible_heads(names: Iterable[str], source: str = "model") -> list[StoredModule]:
    """Find the modules that are called as heads are, in places where no model is known to have its LM head.

    Raises:
        CheckpointError: `source` has more of them than any model.
    """
    return [head for head in _find(names, _split_possible_head, "heads", source) if _has_values(head)]


def _find(names: Iterable[str], split: Callable[[str], tuple[str, str]], kind: str, source: str) -> list[StoredModule]:
    found = ModuleCollection(kind, source)
    for name in names:
        if ".layers." in name or len(name) > MAX_NAME:  # most names, and none of them a module that is looked for
            continue
        module, suffix = split(without_wrappers(name))
        if module and not _OTHER_PARTS.intersection(module.split(".")[:-1]):
            found.add(stored_path(name, len(module)), suffix, name)
    return [module for _, module in found.modules()]


def _split_embedding(name: str) -> tuple[str, str]:
    """Return `(module path, suffix)` of a token embedding's tensor, or `("", "")`."""
    for pattern in _EMBEDDING:
        match = pattern.fullmatch(name)
        if match and is_part(match["suffix"]):
            return match["module"], match["suffix"]
    return "", ""


def _split_head(name: str) -> tuple[str, str]:
    leaf, path = _HEAD
    match = leaf.fullmatch(name)
    if match and (is_part(match["suffix"]) or _is_odd_part(match["suffix"])):
        return match["module"], match["suffix"]
    match = path.fullmatch(name)
    return (match["module"], match["suffix"]) if match and is_part(match["suffix"]) else ("", "")


def _split_possible_head(name: str) -> tuple[str, str]:
    module, weight, rest = name.partition(".weight.")
    suffix = f"weight.{rest}"
    if not weight:
        module, _, suffix = name.rpartition(".")
    is_like = _LIKE_HEAD.fullmatch(module.rpartition(".")[2])
    return (module, suffix) if is_like and (is_part(suffix) or _is_odd_part(suffix)) else ("", "")


def _is_odd_part(suffix: str) -> bool:
    """Return whether a tensor may be a part of a weight in a form that is not known."""
    return "." not in suffix and not suffix.endswith("bias")


def _has_values(head: StoredModule) -> bool:
    return not all(SCALES.fullmatch(suffix) for suffix in head.tensors)


def _is_replaced(module: StoredModule) -> bool:
    """Return whether a module is what PEFT keeps of one that it trains a copy of: nothing reads it any more."""
    return "original_module" in module.path.split(".")


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
