"""Whether the LM head and a token embedding are one weight: what config.json claims, and what the tensors show.

    head stored   bytes     the flag claims  outcome
    no            -         anything         tied, unless the architecture has no LM head
    yes           equal     tied             tied, stored twice
    yes           equal     untied           untied, a note
    yes           differ    tied             conflict: transformers 4 shares the weights, transformers 5 does not
    yes           differ    untied           untied

A GGUF has no flag, and its readers take the LM head from `output.weight` where that is stored: then it is untied, with
equal bytes too.

Of several stored heads a copy of the table counts, else the first; `ftw.verdict.stored_heads` says which modules are LM
heads. One that may be is named, and the tie is not known then. Without a config.json the tensors alone are evidence,
and nothing is called untied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftw.checkpoint import TIE_KEY, config_parts
from ftw.ggml_types import is_known_architecture
from ftw.verdict import families
from ftw.verdict.stored_heads import DRAFT_VOCABULARY, find_unplaced_heads, has_shape_of, keep_lm_heads, name_of

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint, ModelConfig, StoredModule
    from ftw.verdict.tensor_equality import TensorEquality


_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
GGUF_TABLE, _GGUF_HEAD = "token_embd", "output"


class TieClaim(NamedTuple):
    """What config.json claims about the tie: by transformers 5, by transformers 4, and whether a flag in it says so."""

    v5: bool
    v4: bool
    contradicts_two_weights: bool
    evidence: tuple[str, ...]


class Tie(NamedTuple):
    """Outcome for one table: `value` is None where the evidence does not tell.

    `reason` is what a verdict makes of it: "ok", "tied" (or perhaps tied), or "tie_conflict", the fourth row above.
    """

    value: bool | None
    reason: str
    evidence: tuple[str, ...]
    detail: str


# Tables that no LM head shares: one whose rows are looked up, and one that the model reads as a head would.
NOT_SHARED = Tie(False, "ok", (), "read row by row, and no LM head shares it")
READ_WHOLE = Tie(False, "tied", (), "read whole, as an LM head would: the model computes with all of it")


def read_claim(config: ModelConfig) -> TieClaim:
    """Read what a configuration claims about the tie, an absent flag by its family's default."""
    model_type, text_type = config.model_type, config.text_model_type
    top, text = config.tie_flag, config.text_tie_flag
    top_or_default = _default(model_type, unknown=False) if top is None else top
    text_or_default = _default(text_type, unknown=False) if text is None else text
    if model_type in families.FLAG_FORCED:
        v5 = True
    elif model_type in families.FLAG_WITHOUT_EFFECT:
        v5 = False
    elif model_type in families.FLAG_IN_TEXT and config.has_text_part:
        v5 = text_or_default
    elif model_type in families.FLAG_AT_TOP_OR_IN_TEXT and config.has_text_part:
        v5 = top_or_default or text_or_default
    else:
        v5 = top_or_default
    inner, inner_type = (text, text_type) if config.has_text_part else (top, model_type)
    v4 = _default(inner_type, unknown=True) if inner is None else inner
    if model_type in families.NEVER_TIED:
        v4 = False
    if top is None:
        contradicts = v4 and (v5 or text is not None)
    elif model_type in families.FLAG_FORCED:  # there, false says that head and table are two weights
        contradicts = top
    else:
        contradicts = v5 or (top and v4)
    return TieClaim(v5, v4, contradicts, _claim_evidence(config))


def judge_tie(
    checkpoint: Checkpoint,
    table: StoredModule,
    tables: list[StoredModule],
    heads: list[StoredModule],
    equality: TensorEquality,
) -> Tie:
    """Decide whether `table` and the LM head are one weight, from the flag, the names and, where needed, the bytes.

    `tables` are all token embeddings; `equality` remembers what it has read of the checkpoint for another of them.
    """
    tie = _judge_shared(checkpoint, table, tables, heads, equality)
    if tie.reason == "ok" and is_read_whole(checkpoint.config, table):
        return READ_WHOLE._replace(value=tie.value, evidence=tie.evidence)
    return tie


def is_read_whole(config: ModelConfig, table: StoredModule) -> bool:
    """Return whether a model computes with a whole table besides looking rows up in it."""
    if config.model_type == "ibert":  # quantised, it takes the least and the greatest of all elements first
        return config.raw.get("quant_mode") is True
    return config.model_type in families.DECODER_TABLE_READ_WHOLE and "decoder" in table.path.split(".")


def _judge_shared(
    checkpoint: Checkpoint,
    table: StoredModule,
    tables: list[StoredModule],
    heads: list[StoredModule],
    equality: TensorEquality,
) -> Tie:
    config = checkpoint.config
    heads = [head for head in heads if head.path != table.path]
    if config.is_gguf:
        return _judge_gguf(checkpoint, table, heads, equality)
    claim = read_claim(config)
    if _is_encoders_alone(checkpoint, table, tables, claim, equality):
        beside = (*claim.evidence, "the decoder's table has other bytes")
        return Tie(False, "ok", beside, "untied: the LM head can share the decoder's table, and this is the encoder's")
    if config.model_type in families.DECODER_TABLE_IS_HEAD:
        return Tie(
            True, "tied", claim.evidence, f"tied: in {config.model_type} the LM head is the decoder's table itself"
        )
    stored = heads
    heads = keep_lm_heads(checkpoint, table, stored, is_tie_told=_is_tie_told(config, claim))
    if not heads:
        unplaced = find_unplaced_heads(checkpoint, table, stored)
        heads = [head for head in unplaced if _is_own_head(checkpoint, table, head, claim, equality)]
        if not heads:
            return _judge_without_head(config, claim, unplaced)
    copy = next((head for head in heads if _equal_modules(checkpoint, table, head, equality)), None)
    equal, head = copy is not None, copy or heads[0]
    name = name_of(head)
    evidence: tuple[str, ...] = (*claim.evidence, f"tensor:{name}")
    if equal or claim.contradicts_two_weights or not config.is_present:
        evidence = (*evidence, "bytes:equal" if equal else "bytes:differ")
    if equal and (claim.v5 or claim.v4 or not config.is_present):
        nbytes = sum(checkpoint.tensors[tensor].nbytes for tensor in head.tensors.values())
        return Tie(True, "tied", evidence, f"tied to the LM head; {name} is an identical copy of {nbytes} bytes")
    if equal:
        return Tie(False, "ok", evidence, f"untied: config says {TIE_KEY}=false, though {name} holds the same bytes")
    if claim.contradicts_two_weights and config.is_present and _could_be_shared(checkpoint, table, head):
        detail = f"a tie is claimed by {', '.join(claim.evidence)}, but {name} is stored with other bytes"
        return Tie(None, "tie_conflict", evidence, detail)
    if not config.is_present:
        detail = f"{name} is stored with other bytes, and there is no config.json to claim a tie"
        return Tie(None, "ok", evidence, detail)
    return Tie(False, "ok", evidence, f"untied: {_claim_words(config)} and {name} is stored")


def _judge_without_head(config: ModelConfig, claim: TieClaim, unplaced: list[StoredModule]) -> Tie:
    if families.is_headless(config.architecture, config.model_type):
        headless = (f"architecture:{config.architecture}", "no LM head stored")
        return Tie(False, "ok", headless, f"untied: {config.architecture} has no LM head")
    if unplaced:
        name = name_of(unplaced[0])
        evidence = (*claim.evidence, f"tensor:{name} may be the head")
        if claim.contradicts_two_weights:
            detail = f"tied to the LM head by {', '.join(claim.evidence)}; {name}, which may be a head too, is stored"
            return Tie(True, "tied", evidence, detail)
        beside = "" if config.is_present else ", and there is no config.json"
        return Tie(None, "tied", evidence, f"{name} is stored and may be the head, or this table is{beside}")
    evidence = (*claim.evidence, "no LM head stored")
    if not config.is_present:
        return Tie(None, "tied", evidence, "no LM head is stored, and there is no config.json that says it has none")
    if config.architecture is None:
        return Tie(None, "tied", evidence, "no LM head is stored, and config.json names no architecture that has none")
    words = f"tied to the LM head: {config.architecture} has one, and none is stored"
    if not (claim.v5 or claim.v4):
        words += f", although {_claim_words(config)}"
    return Tie(True, "tied", evidence, words)


def _is_encoders_alone(
    checkpoint: Checkpoint, table: StoredModule, tables: list[StoredModule], claim: TieClaim, equality: TensorEquality
) -> bool:
    """Return whether a table is the encoder's alone, in a family whose LM head shares the decoder's at most."""
    config = checkpoint.config
    has_two_vocabularies = config.raw.get(families.SHARED_VOCABULARY_KEY) is False
    is_free = config.model_type in families.ENCODER_TABLE_FREE or (
        config.model_type in families.ENCODER_TABLE_FREE_IF_NOT_SHARED and has_two_vocabularies
    )
    if not is_free or "encoder" not in table.path.split("."):
        return False
    if config.raw.get("tie_encoder_decoder") or (config.model_type == "fsmt" and (claim.v5 or claim.v4)):
        return False
    others = (other for other in tables if "decoder" in other.path.split("."))
    return any(not _equal_modules(checkpoint, table, other, equality) for other in others)


def _could_be_shared(checkpoint: Checkpoint, table: StoredModule, head: StoredModule) -> bool:
    """Return whether a release shares two stored weights; where 5 never ties, another shape makes 4 refuse the file."""
    if checkpoint.config.model_type not in families.FLAG_WITHOUT_EFFECT:
        return True
    rows, outputs = (checkpoint.tensors.get(module.tensors.get("weight", "")) for module in (table, head))
    return rows is None or outputs is None or rows.shape == outputs.shape


def _judge_gguf(
    checkpoint: Checkpoint, table: StoredModule, heads: list[StoredModule], equality: TensorEquality
) -> Tie:
    """Decide by whether an LM head is stored; an FTW's copy of the metadata tells besides if its source had one."""
    config = checkpoint.config
    recorded = config.has_output_weight
    if table.path == GGUF_TABLE:  # under GGUF's own names; FreeToken's FTWs have others
        heads = [head for head in heads if head.path == _GGUF_HEAD and "weight" in head.tensors]
    is_any_stored = bool(heads)  # also one that can be no head, of which the metadata tell all the same
    if DRAFT_VOCABULARY not in checkpoint.tensors:
        heads = keep_lm_heads(checkpoint, table, heads, is_tie_told=False)
    evidence: tuple[str, ...] = () if recorded is None else (f"gguf:output_weight_present={str(recorded).lower()}",)
    if config.architecture in families.GGUF_WITHOUT_HEAD:
        headless = (f"architecture:{config.architecture}", "no LM head")
        return Tie(False, "ok", headless, f"untied: {config.architecture} has no LM head")
    if heads:
        name = name_of(heads[0])
        evidence = (*evidence, f"tensor:{name}")
        if recorded is False:
            return Tie(None, "tie_conflict", evidence, f"{name} is stored, but the metadata say that there was no head")
        if _equal_modules(checkpoint, table, heads[0], equality):
            evidence = (*evidence, "bytes:equal")
            return Tie(False, "ok", evidence, f"untied: {name} is stored, though with the same bytes")
        return Tie(False, "ok", evidence, f"untied: {name} is stored")
    evidence = (*evidence, "no LM head stored")
    if recorded and not is_any_stored:
        return Tie(None, "tie_conflict", evidence, "no LM head is stored, but the metadata say that there was one")
    if not is_known_architecture(config.architecture):
        problem = f"the gguf package knows no architecture {config.architecture}"
        return Tie(None, "tied", evidence, f"no LM head is stored, and {problem}, which may have none")
    return Tie(True, "tied", evidence, f"tied to the LM head: {config.architecture} has one, and none is stored")


def _is_tie_told(config: ModelConfig, claim: TieClaim) -> bool:
    """Return whether a flag or the family's default tells that there is a tie, or that there is none."""
    return config.is_present and (claim.contradicts_two_weights or not (claim.v5 or claim.v4))


def _is_own_head(
    checkpoint: Checkpoint, table: StoredModule, head: StoredModule, claim: TieClaim, equality: TensorEquality
) -> bool:
    """Return whether a flag says that there is no tie, and a module without a known place is a head like the table."""
    is_said = False in (checkpoint.config.tie_flag, checkpoint.config.text_tie_flag)
    if not is_said or claim.v5 or claim.v4 or not has_shape_of(checkpoint, table, head):
        return False
    return not _equal_modules(checkpoint, table, head, equality)


def _equal_modules(checkpoint: Checkpoint, left: StoredModule, right: StoredModule, equality: TensorEquality) -> bool:
    mine, theirs = left.own_tensors, right.own_tensors
    if "weight" not in theirs:  # a decoded table and a head that is not: they are compared as they are stored
        parts = checkpoint.decoded.get(mine.get("weight", ""), ())
        mine = {name.removeprefix(f"{left.path}."): name for name in parts} or mine
    if set(mine) != set(theirs):
        return False
    if list(mine) == ["weight"]:
        stored = [checkpoint.find_tensor(side["weight"]).dtype for side in (mine, theirs)]
        if stored[0] != stored[1]:  # a loader gives both the model's type
            return equality.is_equal_as(_dtype_of(checkpoint.config) or stored[0], mine["weight"], theirs["weight"])
    return all(equality.is_equal(mine[suffix], theirs[suffix]) for suffix in mine)


def _dtype_of(config: ModelConfig) -> str:
    """Return the type that config.json gives the model's weights; empty if it is none that they are cast to."""
    parts = config_parts(config.raw)
    names = [part.get(key) for part in reversed(parts) for key in ("dtype", "torch_dtype")]
    return next((_DTYPES[name] for name in names if isinstance(name, str) and name in _DTYPES), "")


def _default(model_type: str | None, *, unknown: bool) -> bool:
    """Return the family's default of the flag; transformers 4 ties what declares none, transformers 5 does not."""
    if model_type in families.TIED_BY_DEFAULT:
        return True
    if model_type in families.UNTIED_BY_DEFAULT:
        return False
    return unknown


def _claim_evidence(config: ModelConfig) -> tuple[str, ...]:
    if not config.is_present:
        return ("no config.json",)
    evidence = []
    if config.tie_flag is not None:
        evidence.append(f"config:{TIE_KEY}={str(config.tie_flag).lower()}")
    if config.text_tie_flag is not None:
        evidence.append(f"config:text_config.{TIE_KEY}={str(config.text_tie_flag).lower()}")
    if evidence:
        return tuple(evidence)
    if families.is_known(config.model_type):
        default = _default(config.model_type, unknown=False)
        return (f"default:{config.model_type} {TIE_KEY}={str(default).lower()}",)
    return (f"config:no {TIE_KEY}",)


def _claim_words(config: ModelConfig) -> str:
    if config.tie_flag is not None:
        return f"config says {TIE_KEY}={str(config.tie_flag).lower()}"
    if config.text_tie_flag is not None:
        return f"config says text_config.{TIE_KEY}={str(config.text_tie_flag).lower()}"
    return f"config has no {TIE_KEY}"
