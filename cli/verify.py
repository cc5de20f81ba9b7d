"""`ftw verify`: does a folder still hold what was written, and is that what the source holds?"""

from __future__ import annotations

from typing import Annotated

import typer

import ftw
from ftw.sizes import format_size

from .exit_codes import DONE, FAILED
from .links import FollowLinksOption
from .output import print_error, print_json, print_line
from .progress import ProgressOption, show_progress


def verify_command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="FTW folder, or any checkpoint.")],
    against: Annotated[
        str | None, typer.Option("--against", metavar="SRC", help="Compare with the source, byte by byte.")
    ] = None,
    follow_links: FollowLinksOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    progress: ProgressOption = "bar",
) -> int:
    """Check header, checksums and padding; with --against compare every byte."""
    with show_progress("verify", progress) as update:
        result = ftw.verify(path, against=against, follow_links=follow_links, progress=update)
    if as_json:
        print_json(result.to_dict())
    for problem in result.problems:
        print_error(problem)
    if result.is_ok and not as_json:
        checked = f"{result.num_tensors} tensors, {format_size(result.nbytes)}, {result.num_checksums} checksums"
        if result.num_sha256:
            checked += f", {result.num_sha256} SHA-256"
        compared = f", {result.num_compared} equal to those of {against}" if against else ""
        print_line(f"{path}: ok, {checked}{compared}")
    return DONE if result.is_ok else FAILED
