"""Which entries of a folder can be weight files of a format, by their names; and what a file is, by its first bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.errors import printable
from ftw.files import is_debris, original_of
from ftw.readers.base import LeftOut

if TYPE_CHECKING:
    from ftw.hub import Place

HEAD_NBYTES = 4096  # of a file, to know it by
_MAX_ODD = 256  # files that are looked into where no name says what they are


def list_weight_files(place: Place, suffix: str) -> tuple[list[str], tuple[LeftOut, ...]]:
    """Return the names of a folder's files that end in `suffix`, whatever its letters' case, in order; and copies.

    A folder is none of them, nor is a hidden file, or what an editor or a download left. A file that is called a copy
    of another one that is there is left out.
    """
    names = [path.name for path in place.folder.iterdir() if path.name.lower().endswith(suffix)]
    names = sorted(name for name in names if not (_is_passed_over(name) or (place.folder / name).is_dir()))
    present = set(names)
    copies = {name: original for name in names if (original := original_of(name)) in present}
    left_out = tuple(
        LeftOut("file", name, f"called a copy of {printable(original)}") for name, original in copies.items()
    )
    return [name for name in names if name not in copies], left_out


def list_odd_files(place: Place) -> list[str]:
    """Return the names of files whose kind no name says: the file itself, or those of a folder, if they are few.

    Files on the hub are not looked into.
    """
    if not place.is_folder:
        return [place.path.name]
    if place.roots is None:
        return []
    names = sorted(path.name for path in place.folder.iterdir() if not _is_passed_over(path.name) and path.is_file())
    return names if len(names) <= _MAX_ODD else []


def _is_passed_over(name: str) -> bool:
    return name.startswith(".") or is_debris(name)
