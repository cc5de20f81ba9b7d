"""HubId: what a user names on the hub.

org/name                     the repository, of its main branch
org/name@revision            of another branch, a tag or a commit
org/name/sub/file.gguf       a folder or a file of it; with a revision: org/name@revision/sub/file.gguf
"""

from __future__ import annotations

import re
from typing import NamedTuple

_HUB_ID = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)"  # "./name" is a path
    r"(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|\w[\w.+-]*))?"
    r"(?P<inside>(?:/[^/]+)*)"
)


class HubId(NamedTuple):
    """What a user names on the hub: a repository, perhaps one state of it, and perhaps a folder or a file in it."""

    repo_id: str
    revision: str | None
    inside: str

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        inside = f"/{self.inside}" if self.inside else ""
        return f"{self.repo_id}{revision}{inside}"


def parse_hub_id(text: str) -> HubId | None:
    """Return what `text` names on the hub; None if it cannot be there."""
    match = _HUB_ID.fullmatch(text)
    if match is None or not text.isprintable() or {".", ".."} & set(text.split("/")):
        return None
    return HubId(match["repo"], match["revision"], match["inside"].removeprefix("/"))
