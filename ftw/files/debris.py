"""What other programs leave beside the files of a checkpoint, known by its name.

unfinished   of downloads and editors: .part, .crdownload, .incomplete, .aria2, .swp, ~, …
private      of systems, editors and version control: ._NAME, .DS_Store, Thumbs.db, .nfs…, .git, …
copies       of browsers, file managers and synchronisers: NAME (1), NAME - Copy, Copy of NAME, NAME.sync-conflict-…
"""

from __future__ import annotations

import re

DEBRIS_FOLDERS = frozenset({".git", ".cache", "__pycache__", ".ipynb_checkpoints", "__macosx"})

# All in lower case.
_ENDINGS = (
    ".incomplete", ".lock", ".tmp", ".temp", ".part", ".partial", ".filepart", ".crdownload", ".download",
    ".opdownload", ".aria2", ".!qb", ".!ut", ".swp", ".swo", "~",
)  # fmt: skip
_BEGINNINGS = ("._", ".#", ".~", "~$", ".nfs", ".fuse_hidden", ".goutputstream-", ".trash-")
_NAMES = frozenset({".ds_store", ".directory", ".localized", "desktop.ini", "thumbs.db", "ehthumbs.db"})
_COPY = re.compile(
    r"Copy of (?P<one>.+)|(?P<other>.+?)(?: ?\([0-9]{1,3}\)| - Copy(?: \([0-9]{1,3}\))?| copy(?: [0-9]{1,3})?"
    r"|\.sync-conflict-[0-9]{8}-[0-9]{6}-[A-Z0-9]{7}| \([^()]*conflicted copy[^()]*\))",
    re.DOTALL,
)


def is_debris(name: str) -> bool:
    """Tell whether a file of that name is what a system, a download or an editor left, and nobody's content."""
    lower = name.lower()
    return lower.endswith(_ENDINGS) or lower.startswith(_BEGINNINGS) or lower in _NAMES


def original_of(name: str) -> str | None:
    """Return the name of the file that this one is called a copy of; None if it is not called so."""
    stem, dot, suffix = name.rpartition(".")
    match = _COPY.fullmatch(stem)
    return f"{match['one'] or match['other']}{dot}{suffix}" if match else None
