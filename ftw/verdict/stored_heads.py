"""Stored heads: which of the modules that are called like one can be the LM head of a model with a given table.

name                          shape                                               it is
a head's, where models have   a row for at least half of the table's tokens,      an LM head
one                           or packed; in a form that is not known a matrix
lm_head                       fewer rows, and a flag or a family tells the tie    an LM head: of codes, of a draft
lm_head                       one row                                             none: it scores
a head's, somewhere else      the table's, and the configuration says untied      an LM head
in the table's part
a head's, somewhere else      as many columns and about as many values            named: it may be the head
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftw.checkpoint import find_possible_heads, is_beside

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint, StoredModule

_MOST_SPECIFIC = "lm_head"  # never the name of a classifier's or a pooler's module
_STATE = re.compile(r"(?:^|[._])(?:mask|grad|ema|momentum|exp_avg\w*|weight_g)(?:$|[._])|\x00")
DRAFT_VOCABULARY = "d2t"  # of a draft model with a vocabulary of its own (EAGLE-3): maps its tokens to the target's


def keep_lm_heads(
    checkpoint: Checkpoint, table: StoredModule, heads: list[StoredModule], *, is_tie_told: bool
) -> list[StoredModule]:
    """Return those of the stored heads that map to the tokens of a table; a classifier's or a pooler's does not.

    Args:
        checkpoint: What they are stored in.
        table: A token embedding.
        heads: What `find_heads` found.
        is_tie_told: Whether a flag or the family tells if there is a tie. Then an `lm_head` may have any number of
            rows but one.
    """
    return [
        head
        for head in heads
        if is_beside(head, table) and _maps_to_tokens(checkpoint, table, head, of_any_size=is_tie_told)
    ]


def find_unplaced_heads(checkpoint: Checkpoint, table: StoredModule, heads: list[StoredModule]) -> list[StoredModule]:
    """Return the modules, those of `heads` first, that may be the LM head by their names and sizes."""
    known = {head.path for head in heads}
    others = find_possible_heads(checkpoint.tensors, checkpoint.source)
    candidates = [*heads, *(other for other in others if other.path not in known)]
    return [head for head in candidates if head.path != table.path and _resembles(checkpoint, table, head)]


def is_like(checkpoint: Checkpoint, table: StoredModule, head: StoredModule) -> bool:
    """Return whether a head is one plain weight with the shape of a plain table, in the same part of the model."""
    if not is_beside(head, table) or list(table.tensors) != ["weight"] or list(head.tensors) != ["weight"]:
        return False
    rows, outputs = (checkpoint.find_tensor(module.tensors["weight"]) for module in (table, head))
    return len(rows.shape) == 2 and rows.shape == outputs.shape and rows.nbytes > 0


def name_of(head: StoredModule) -> str:
    """Return the name of the tensor that a head is known by."""
    return head.tensors.get("weight") or next(iter(head.tensors.values()))


def _maps_to_tokens(checkpoint: Checkpoint, table: StoredModule, head: StoredModule, *, of_any_size: bool) -> bool:
    if not head.is_of_known_form:
        return _holds_as_much(checkpoint, table, head)
    rows, outputs = (checkpoint.tensors.get(module.tensors.get("weight", "")) for module in (table, head))
    if outputs is None:
        return _holds_as_much(checkpoint, table, head)
    if rows is None or len(rows.shape) != 2:
        return True
    if len(table.own_tensors) > 1 or len(head.own_tensors) > 1:
        return True
    if len(outputs.shape) != 2 or not outputs.nbytes:
        return False
    is_lm_head = head.bare_path.rpartition(".")[2] == _MOST_SPECIFIC
    # Mllama's table has eight rows more than its head.
    return outputs.shape[0] * 2 >= rows.shape[0] or (of_any_size and is_lm_head and outputs.shape[0] > 1)


def _resembles(checkpoint: Checkpoint, table: StoredModule, head: StoredModule) -> bool:
    """Return whether a module can be the table's head by its size."""
    rows, outputs = (checkpoint.tensors.get(module.tensors.get("weight", "")) for module in (table, head))
    if outputs is None or len(head.own_tensors) > 1 or rows is None or len(rows.shape) != 2:
        return _holds_as_much(checkpoint, table, head)
    if len(outputs.shape) != 2 or outputs.shape[1] != rows.shape[1] or not outputs.nbytes:
        return False
    return outputs.shape[0] * 2 >= rows.shape[0] or head.bare_path.rpartition(".")[2] == _MOST_SPECIFIC


def _holds_as_much(checkpoint: Checkpoint, table: StoredModule, head: StoredModule) -> bool:
    """Return whether a packed head has at least a bit for each of half of a table's values.

    In a form that is not known only matrices count, which no mask, list of tokens or state of training is.
    """
    stored = [checkpoint.tensors[name] for suffix, name in head.tensors.items() if not _STATE.search(suffix)]
    if not head.is_of_known_form:
        stored = [tensor for tensor in stored if len(tensor.shape) > 1 and min(tensor.shape) > 1]
    held = sum(tensor.nbytes for tensor in stored if tensor.dtype != "BOOL")
    weight = checkpoint.tensors.get(table.tensors.get("weight", ""))
    if weight is None or not weight.shape:
        return held > 0
    values = 1
    for size in weight.shape:
        values *= size
    return held > 0 and held * 8 * 2 >= values
