"""`ftw verify`: does a folder still hold what was written, and is that what the source holds?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import ftw
from ftw.sizes import count_of, format_size

from .exit_codes import DONE, FAILED
from .links import FollowLinksOption
from .output import QuietOption, describe_failure, print_error, print_json, print_line
from .progress import ProgressOption, show_progress

if TYPE_CHECKING:
    from ftw.conversion import VerifyResult


def verify_command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="FTW folder, or any checkpoint.")],
    against: Annotated[
        str | None, typer.Option("--against", metavar="SRC", help="Compare with the source, byte by byte.")
    ] = None,
    follow_links: FollowLinksOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    progress: ProgressOption = "bar",
    quiet: QuietOption = False,
) -> int:
    """Check header, checksums and padding; with --against compare every byte."""
    with show_progress("verify", "none" if quiet and progress == "bar" else progress) as update:
        result = ftw.verify(path, against=against, follow_links=follow_links, progress=update)
    if as_json:
        failure = {} if result.is_ok else describe_failure(result.problems[0])
        print_json({**result.to_dict(), **failure})
    for problem in result.problems:
        print_error(problem)
    if result.is_ok and not as_json and not quiet:
        print_line(f"{path}: {_words(result, against)}")
    return DONE if result.is_ok else FAILED


def _words(result: VerifyResult, against: str | None) -> str:
    """Say what was found right, and of what nothing can be said."""
    tensors = f"{count_of(result.num_tensors, 'tensor')}, {format_size(result.nbytes)}"
    compared = f", {result.num_compared} equal to those of {against}" if against else ""
    sha256 = f", {result.num_sha256} SHA-256" if result.num_sha256 else ""
    if result.is_content_checked and result.num_tensors:
        return f"ok, {tensors}, {count_of(result.num_checksums, 'checksum')}{sha256}{compared}"
    of_all = f"{result.num_checksums} of {count_of(result.num_tensors, 'tensor')} have checksums"
    rest = "contents were not compared" if not result.num_checksums else "the contents of the others were not compared"
    return f"readable, {format_size(result.nbytes)}; {of_all}{sha256}{compared}, so {rest}"
