"""Findings: what is raised where results cannot be right."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ftw


class FindingError(Exception):
    """Results that cannot be right."""


def require(condition: bool, problem: str) -> None:
    """Raise a finding where a condition does not hold."""
    if not condition:
        raise FindingError(problem)


def check_message(error: ftw.FtwError) -> str:
    """Check that a message is one line, and return the words of it that do not depend on the checkpoint."""
    text = str(error)
    require("\n" not in text and text.isprintable(), f"message is no printable line: {text!r}")
    return words_of(text.rpartition(": ")[2])


def words_of(text: str) -> str:
    """Return the words of a message without names and numbers."""
    return " ".join(word for word in text.split() if re.fullmatch(r"[a-z_]+[,;]?", word))
