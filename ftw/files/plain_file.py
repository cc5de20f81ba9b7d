"""Files that are read once, from front to back: JSON, and what a conversion copies."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError
from ftw.host import is_link, open_to_read

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO


def open_plain_file(path: Path, real: str | None) -> BinaryIO:
    """Open a file that was a regular one when somebody looked; nothing is waited for.

    Args:
        path: The file.
        real: What `Roots.locate` says of it: a path on which nothing may be a link. None follows links to anywhere.

    Raises:
        CheckpointError: It is not a regular file any more, or something on the way to it has become a link.
    """
    try:
        descriptor = open_to_read(path if real is None else real, follow_links=real is None)
    except OSError as error:
        if real is not None and is_link(error):
            raise CheckpointError(path, "file", "became a link while it was being opened") from error
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(path, "file", "is not a regular file any more")
    return os.fdopen(descriptor, "rb")
