"""Sizes that options take, such as 8GiB."""

from __future__ import annotations

import typer

from ftw.sizes import parse_size


def parse_size_option(text: str) -> int:
    """Return the bytes that an option's `text` names; what is not a size is wrong usage."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
