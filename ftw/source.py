"""Turn what a user names, a path or a hub id, into a local path."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ftw.errors import SourceNotFoundError, printable

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # "./name" is a path
# What a conversion needs of a repository; weights in other formats are never fetched.
_HUB_PATTERNS = [
    "*.safetensors", "*.ftw", "*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py", "*.md",
]  # fmt: skip


def resolve_source(source: str | os.PathLike[str]) -> Path:
    """Return the local file or folder that `source` names; a hub id is fetched into huggingface_hub's cache.

    Raises:
        SourceNotFoundError: There is no such path, and no such repository in the cache or on the hub.
    """
    path, name = Path(source), os.fspath(source)
    if name and path.exists():  # Path("") would be the current folder
        return path
    if not isinstance(source, str) or not _HUB_ID.fullmatch(name):
        raise SourceNotFoundError(f"{printable(name)}: path: does not exist, a file, a folder or a hub id is needed")
    return _fetch_from_hub(name)


def _fetch_from_hub(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repo_id, allow_patterns=_HUB_PATTERNS))
    except LocalEntryNotFoundError as error:
        problem = "is neither a path nor in the local hub cache, and the hub cannot be reached"
        raise SourceNotFoundError(f"{repo_id}: hub id: {problem}") from error
    except RepositoryNotFoundError as error:
        problem = "the hub has no such repository, or it is gated and needs a token ('hf auth login')"
        raise SourceNotFoundError(f"{repo_id}: hub id: {problem}") from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise SourceNotFoundError(f"{repo_id}: hub id: {str(error).splitlines()[0]}") from error
