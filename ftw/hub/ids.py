"""HubId: what a user names on the hub.

org/name                     the repository, of its main branch
org/name@revision            of another branch, a tag or a commit
org/name/sub/file.gguf       a folder or a file of it; with a revision: org/name@revision/sub/file.gguf

A browser's address of any of these is taken, too.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_HUB_ID = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)"  # "./name" is a path
    r"(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|\w[\w.+-]*))?"
    r"(?P<inside>(?:/[^/]+)*)"
)
# What an address has after its host: tree of a folder, blob and resolve of a file, others of pages about it.
_ADDRESS = re.compile(
    r"/(?P<repo>[^/]+/[^/]+)"
    r"(?:/(?:tree|blob|resolve|raw|commit)/(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+)(?P<inside>/.+?)?)?"
    r"(?:/discussions(?:/.*)?)?/?"
)
_NOT_MODELS = frozenset({"datasets", "spaces", "collections", "papers", "docs", "blog"})


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


def parse_hub_address(text: str) -> HubId | None:
    """Return what a browser's address of the hub names; None if it is no such address, or not of a model."""
    if not text.startswith(("https://", "http://")):
        return None
    from urllib.parse import unquote, urlsplit

    from huggingface_hub import constants

    address = urlsplit(text)
    hosts = {urlsplit(constants.ENDPOINT).netloc, *getattr(constants, "HF_URL_HOSTS", ())}
    match = _ADDRESS.fullmatch(unquote(address.path))
    if address.netloc not in hosts or match is None or match["repo"].split("/")[0] in _NOT_MODELS:
        return None
    revision = "" if match["revision"] in (None, "main") else f"@{match['revision']}"
    return parse_hub_id(f"{match['repo']}{revision}{match['inside'] or ''}")
