"""Wording: why a table may or may not leave the GPU, in a sentence for people, and what to do about a refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.errors import NotEligibleError, in_python_words, printable

if TYPE_CHECKING:
    from ftw.verdict.verdict import TableVerdict, Verdict

WAY_OUT = "use embed='gpu' or 'auto'"
_TIED = "tied to the LM head"
_CONFIG = "config:"


def refusal(table: TableVerdict, source: str, why: str) -> str:
    """Return the line that says why something cannot be done with a table of a checkpoint."""
    return f"{printable(source)}: {printable(table.name) or 'token embedding'}: {printable(in_python_words(why))}"


def refuse(verdict: Verdict, source: str, why: str | None = None, *, way_out: str = f"; {WAY_OUT}") -> NotEligibleError:
    """Return the error that says that the token embedding may not leave the GPU, why, and the way out.

    `why` is what stands against it if the verdict does not.
    """
    table = verdict.token_embedding
    reason = table.reason if why is None else None
    line = refusal(table, source, f"refused: {explain(verdict, table) if why is None else why}")
    return NotEligibleError(f"{line}{way_out}", reason=reason, subject=table.name or None)


def explain(verdict: Verdict, table: TableVerdict) -> str:
    """Return why a table may leave the GPU or not, as a part of a sentence."""
    if table.reason == "tie_conflict":
        return f"configuration and tensors contradict each other: {table.detail}"
    if table.reason != "tied" or not table.detail.startswith(_TIED):
        return table.detail
    told = table.detail.removeprefix(_TIED).lstrip(":; ")
    flags = () if table is not verdict.token_embedding else verdict.tie_evidence
    claims = [_claim(entry) for entry in flags if entry.startswith(_CONFIG)]
    return f"the LM head uses this same table ({'; '.join(filter(None, (*claims, told)))})"


def _claim(evidence: str) -> str:
    """Return "tie_word_embeddings is true" of "config:tie_word_embeddings=true"; a flag that the detail has is left."""
    name, equals, value = evidence.removeprefix(_CONFIG).partition("=")
    return f"{name} is {value}" if equals and value == "true" else ""
