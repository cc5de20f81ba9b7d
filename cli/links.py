"""The option that lets links lead out of a checkpoint's folder, for every command that opens one."""

from __future__ import annotations

from typing import Annotated

import typer

FollowLinksOption = Annotated[
    bool, typer.Option("--follow-links", help="Follow links that lead out of the source's folder; know who made them.")
]
