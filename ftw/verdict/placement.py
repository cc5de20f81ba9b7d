"""Placement: which lookup tables go to host memory, by what the caller asked for and what the verdict allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ftw.checkpoint import MOVED_ROLES
from ftw.verdict.wording import refuse

if TYPE_CHECKING:
    from ftw.verdict.verdict import TableVerdict, Verdict

Embed = Literal["host", "gpu", "auto"]
EMBED_CHOICES: tuple[str, ...] = get_args(Embed)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the lookup tables go.

    Attributes:
        placement: "host" or "gpu", of the token embedding.
        host_tables: Those that go to host memory; with "auto" others than the token embedding may, where that may not.
        reason: Why the token embedding is where it is, for people.
    """

    placement: str
    host_tables: tuple[TableVerdict, ...]
    reason: str


def plan_placement(verdict: Verdict, embed: str, source: str) -> Placement:
    """Decide where the tables of a checkpoint go.

    Args:
        verdict: What may leave the GPU.
        embed: "host" insists, "auto" does it where it is allowed, "gpu" leaves everything there.
        source: The checkpoint's name, for messages.

    Raises:
        NotEligibleError: "host" was asked for, and the token embedding may not leave the GPU.
        ValueError: `embed` is none of the three.
    """
    if embed not in EMBED_CHOICES:
        raise ValueError(f"embed is {embed!r}, allowed are {', '.join(EMBED_CHOICES)}")
    if embed == "gpu":
        return Placement("gpu", (), "embed='gpu' leaves every table on the GPU")
    table = verdict.token_embedding
    moved = moving_tables(verdict)
    if table.eligible:
        return Placement("host", moved, table.detail)
    if embed == "auto":
        return Placement("gpu", moved, table.detail)
    raise refuse(verdict, source)


def moving_tables(verdict: Verdict) -> tuple[TableVerdict, ...]:
    """Return the tables that move to host memory where they may."""
    return tuple(table for table in verdict.eligible_tables if table.role in MOVED_ROLES)
