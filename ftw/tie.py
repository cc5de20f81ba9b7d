"""Whether the LM head and a token embedding are one weight: what config.json claims, and what the tensors show.

    head stored   bytes     the flag claims  outcome
    no            -         anything         tied, unless the architecture has no LM head
    yes           equal     tied             tied, stored twice
    yes           equal     untied           untied, a note
    yes           differ    tied             conflict: transformers 4 shares the weights, transformers 5 does not
    yes           differ    untied           untied

Of several stored heads a copy of the table counts, else the first. Where a tie is claimed, one with fewer than half as
many rows as the table is a classifier's, and no LM head. Without a config.json the tensors alone are evidence, and
nothing is called untied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftw import families
from ftw.checkpoint import equal_tensors
from ftw.config import TIE_KEY

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.config import ModelConfig
    from ftw.names import StoredModule


class Claim(NamedTuple):
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


def read_claim(config: ModelConfig) -> Claim:
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
    if top is None:
        contradicts = v4 and (v5 or text is not None)
    elif model_type in families.FLAG_FORCED:  # there, false says that head and table are two weights
        contradicts = top
    else:
        contradicts = v5 or (top and v4)
    return Claim(v5, v4, contradicts, _claim_evidence(config))


def judge_tie(checkpoint: Checkpoint, table: StoredModule, heads: list[StoredModule]) -> Tie:
    """Decide whether `table` and the LM head are one weight, from the flag, the names and, where needed, the bytes."""
    config = checkpoint.config
    claim = read_claim(config)
    heads = [head for head in heads if head.path != table.path]
    if claim.v5 or claim.v4:  # a classifier's or a pooler's `head` must not pass for the one that shares the table
        heads = [head for head in heads if _maps_to_tokens(checkpoint, table, head)]
    if not heads:
        return _judge_without_head(config, claim)
    copy = next((head for head in heads if _equal_modules(checkpoint, table, head)), None)
    equal, head = copy is not None, copy or heads[0]
    name = head.tensors.get("weight") or next(iter(head.tensors.values()))
    evidence: tuple[str, ...] = (*claim.evidence, f"tensor:{name}")
    if equal or claim.contradicts_two_weights or not config.is_present:
        evidence = (*evidence, "bytes:equal" if equal else "bytes:differ")
    if equal and (claim.v5 or claim.v4 or not config.is_present):
        nbytes = sum(checkpoint.tensors[tensor].nbytes for tensor in head.tensors.values())
        return Tie(True, "tied", evidence, f"tied to the LM head; {name} is an identical copy of {nbytes} bytes")
    if equal:
        return Tie(False, "ok", evidence, f"untied: config says {TIE_KEY}=false, though {name} holds the same bytes")
    if claim.contradicts_two_weights and config.is_present:
        detail = f"a tie is claimed by {', '.join(claim.evidence)}, but {name} is stored with other bytes"
        return Tie(None, "tie_conflict", evidence, detail)
    if not config.is_present:
        return Tie(
            None, "ok", evidence, f"{name} is stored with other bytes, and there is no config.json to claim a tie"
        )
    return Tie(False, "ok", evidence, f"untied: {_claim_words(config)} and {name} is stored")


def _judge_without_head(config: ModelConfig, claim: Claim) -> Tie:
    if families.is_headless(config.architecture, config.model_type):
        headless = (f"architecture:{config.architecture}", "no LM head stored")
        return Tie(False, "ok", headless, f"untied: {config.architecture} has no LM head")
    evidence = (*claim.evidence, "no LM head stored")
    if not config.is_present:
        return Tie(None, "tied", evidence, "no LM head is stored, and there is no config.json that says it has none")
    if config.architecture is None:
        return Tie(None, "tied", evidence, "no LM head is stored, and config.json names no architecture that has none")
    words = f"tied to the LM head: {config.architecture} has one, and none is stored"
    if not (claim.v5 or claim.v4):
        words += f", although config says {TIE_KEY}=false"
    return Tie(True, "tied", evidence, words)


def _maps_to_tokens(checkpoint: Checkpoint, table: StoredModule, head: StoredModule) -> bool:
    """Tell whether a head can have a row for each token; that of a packed one is not known."""
    rows, outputs = (checkpoint.tensors.get(module.tensors.get("weight", "")) for module in (table, head))
    if rows is None or outputs is None or not rows.shape or not outputs.shape:
        return True
    return outputs.shape[0] * 2 >= rows.shape[0]  # Mllama's table has eight rows more than its head


def _equal_modules(checkpoint: Checkpoint, left: StoredModule, right: StoredModule) -> bool:
    if set(left.tensors) != set(right.tensors):
        return False
    pairs = [(left.tensors[suffix], right.tensors[suffix]) for suffix in left.tensors]
    return all(equal_tensors(checkpoint, one, checkpoint, other) for one, other in pairs)


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
