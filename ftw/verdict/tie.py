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

from ftw.checkpoint import config_parts
from ftw.ggml_types import gguf_architectures
from ftw.verdict import families
from ftw.verdict.stored_heads import DRAFT_VOCABULARY, find_unplaced_heads, is_like, keep_lm_heads, name_of
from ftw.verdict.tie_claim import read_claim

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint, ModelConfig, StoredModule
    from ftw.verdict.tensor_equality import TensorEquality
    from ftw.verdict.tie_claim import TieClaim


_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
GGUF_TABLE, _GGUF_HEAD = "token_embd", "output"


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
    if config.model_class and families.class_with_head(config) is None:
        return _judge_headless(checkpoint, table)
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
            return _judge_without_head(checkpoint, table, claim, unplaced)
    copy = next((head for head in heads if _equal_modules(checkpoint, table, head, equality)), None)
    equal, head = copy is not None, copy or heads[0]
    name = name_of(head)
    evidence: tuple[str, ...] = (*claim.evidence, f"tensor:{name}")
    if equal or claim.contradicts_two_weights or not config.is_present:
        evidence = (*evidence, "bytes:equal" if equal else "bytes:differ")
    if equal and (claim.has_tie or not config.is_present):
        nbytes = sum(checkpoint.tensors[tensor].nbytes for tensor in head.tensors.values())
        return Tie(True, "tied", evidence, f"tied to the LM head; {name} is an identical copy of {nbytes} bytes")
    if equal:
        return Tie(False, "ok", evidence, f"untied: {claim.words}, though {name} holds the same bytes")
    if claim.contradicts_two_weights and config.is_present and _could_be_shared(checkpoint, claim, table, head):
        claimed = ", ".join(word for word in claim.evidence if not word.endswith("=false"))
        detail = f"a tie is claimed by {claimed or claim.words}, but {name} is stored with other bytes"
        return Tie(None, "tie_conflict", evidence, detail)
    if config.is_unread:
        detail = f"{name} is stored with other bytes, but config.json, which may claim a tie, is not read"
        return Tie(None, "tied", evidence, detail)
    if not config.is_present:
        detail = f"{name} is stored with other bytes, and there is no config.json to claim a tie"
        return Tie(None, "ok", evidence, detail)
    return Tie(False, "ok", evidence, f"untied: {claim.words} and {name} is stored")


def _judge_without_head(
    checkpoint: Checkpoint, table: StoredModule, claim: TieClaim, unplaced: list[StoredModule]
) -> Tie:
    config, name = checkpoint.config, families.class_with_head(checkpoint.config)
    if claim.family in families.NEVER_TIED:
        own = (f"family:{claim.family}", "no LM head stored")
        return Tie(False, "ok", own, f"untied: no head of {claim.family} shares its table")
    if name is None and config.architectures:
        return _judge_headless(checkpoint, table)
    if unplaced:
        return _judge_unplaced(config, claim, name_of(unplaced[0]))
    evidence = (*claim.evidence, "no LM head stored")
    if not config.is_present:
        why = "is not read" if config.is_unread else "is not there"
        return Tie(None, "tied", evidence, f"no LM head is stored, and config.json, which may say it has none, {why}")
    if name is None:
        return Tie(None, "tied", evidence, "no LM head is stored, and config.json names no architecture that has none")
    if not families.is_known(config.model_type) and not claim.is_stated:
        words = f"no LM head is stored, and whether {name} has one is not known"
        return Tie(None, "tied", evidence, words)
    words = f"tied to the LM head: {name} has one, and none is stored"
    if not claim.has_tie:
        words += f", although {claim.words}"
    return Tie(True, "tied", evidence, words)


def _judge_unplaced(config: ModelConfig, claim: TieClaim, name: str) -> Tie:
    """Judge where a stored tensor may be the LM head, or may not."""
    evidence = (*claim.evidence, f"tensor:{name} may be the head")
    if claim.contradicts_two_weights:
        detail = f"tied to the LM head by {', '.join(claim.evidence)}; {name}, which may be a head too, is stored"
        return Tie(True, "tied", evidence, detail)
    beside = "" if config.is_present else ", and there is no config.json"
    return Tie(None, "tied", evidence, f"{name} is stored and may be the head, or this table is{beside}")


def _judge_headless(checkpoint: Checkpoint, table: StoredModule) -> Tie:
    """Judge where every class has no LM head, and none is stored; what tensors are called can tell of another class."""
    config = checkpoint.config
    name = families.classes_of(config)[0]
    headless = (f"architecture:{name}", "no LM head stored")
    strange = "" if config.model_class else _find_strange_name(checkpoint, table, name)
    if strange:
        detail = f"{name} has no LM head, but {strange}, as in a class that has one, and none is stored"
        return Tie(None, "tied", (*headless, strange), detail)
    return Tie(False, "ok", headless, f"untied: {name} has no LM head")


def _find_strange_name(checkpoint: Checkpoint, table: StoredModule, name: str) -> str:
    """Return what the names of tensors say against a class without LM head; empty where they agree."""
    if families.is_base_model(name) and not families.is_named_as_base_model(checkpoint.config, table.path):
        return f"its table is called {table.path}"
    first, _, rest = table.path.partition(".")
    others = (tensor for tensor in checkpoint.tensors if not tensor.startswith(f"{first}."))
    if families.is_for_task(name) and rest and all(map(families.is_of_no_task, others)):
        return f"all tensors are {first}.…"
    return ""


def _is_encoders_alone(
    checkpoint: Checkpoint, table: StoredModule, tables: list[StoredModule], claim: TieClaim, equality: TensorEquality
) -> bool:
    """Return whether a table is the encoder's alone, in a family whose LM head shares the decoder's at most."""
    config = checkpoint.config
    has_two_vocabularies = config.raw.get(families.SHARED_VOCABULARY_KEY) is False
    is_free = config.model_type in families.ENCODER_TABLE_FREE or (
        config.model_type in families.ENCODER_TABLE_FREE_IF_NOT_SHARED and has_two_vocabularies
    )
    if not is_free or not _is_on_side(table, "encoder"):
        return False
    if config.raw.get("tie_encoder_decoder") or (config.model_type == "fsmt" and claim.has_tie):
        return False
    others = (other for other in tables if _is_on_side(other, "decoder"))
    return any(not _equal_modules(checkpoint, table, other, equality) for other in others)


def _is_on_side(table: StoredModule, side: str) -> bool:
    """Return whether a table is the encoder's or the decoder's; BLIP has a `text_encoder` and a `text_decoder`."""
    return not {side, f"text_{side}"}.isdisjoint(table.path.split("."))


def _could_be_shared(checkpoint: Checkpoint, claim: TieClaim, table: StoredModule, head: StoredModule) -> bool:
    """Return whether a release shares two stored weights; where 5 never ties, another shape makes 4 refuse the file."""
    if claim.family not in families.FLAG_WITHOUT_EFFECT:
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
    if config.architecture not in gguf_architectures():
        words = f"no LM head is stored, and whether the architecture {config.architecture} has one is not known"
        return Tie(None, "tied", evidence, words)
    return Tie(True, "tied", evidence, f"tied to the LM head: {config.architecture} has one, and none is stored")


def _is_tie_told(config: ModelConfig, claim: TieClaim) -> bool:
    """Return whether a flag or the family's default tells that there is a tie, or that there is none."""
    return config.is_present and (claim.contradicts_two_weights or not claim.has_tie)


def _is_own_head(
    checkpoint: Checkpoint, table: StoredModule, head: StoredModule, claim: TieClaim, equality: TensorEquality
) -> bool:
    """Return whether a flag says that there is no tie, and a module without a known place is a head like the table."""
    is_said = any(not flag.value for part in checkpoint.config.parts for flag in part.flags)
    if not is_said or claim.has_tie or not is_like(checkpoint, table, head):
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
