"""Where ftw may answer otherwise than other code: a table for each format, which its reader's docstring tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fuzz.findings import FindingError, check_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import ftw


class Difference(NamedTuple):
    """A difference that is allowed.

    Attributes:
        words: Part of the message of whoever refuses.
        is_here: Whether what the message says is true of a file; told by code that is not ftw's.
    """

    words: str
    is_here: Callable[[bytes], bool]


def compare_answers(
    content: bytes,
    ours: ftw.FtwError | None,
    theirs: str,
    *,
    read_here: Iterable[Difference],
    read_there: Iterable[Difference],
) -> None:
    """Compare whether a file was refused.

    Args:
        content: The file.
        ours: Why ftw refuses it; None if it does not.
        theirs: Why the other one refuses it; empty if it does not.
        read_here: What ftw may read and the other one not.
        read_there: The reverse.

    Raises:
        FindingError: One refuses and the other reads, and no difference of the table says so.
    """
    if ours is not None:
        check_message(ours)
    if (ours is None) == (not theirs):
        return
    refusal, allowed = (theirs, read_here) if ours is None else (str(ours), read_there)
    if not any(one.words in refusal and one.is_here(content) for one in allowed):
        who = "the other reader" if ours is None else "ftw"
        raise FindingError(f"{who} alone refuses it: {refusal}")
