"""A folder that everybody may write to, like /tmp, and what another user does there."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import llama_config, llama_tensors, write_checkpoint
from other_user import OTHER_UID, run_as_other

import ftw
from ftw.errors import OutputError

# Ways to convert: none may trust what another user has put at a target.
WAYS = pytest.mark.parametrize(
    "options", [{}, {"resume": True}, {"overwrite": True}, {"dry_run": True}], ids=["plain", "resume", "over", "dry"]
)
IMPORTS = "import ftw, ftw.conversion.conversion"  # for conversions of the other user


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Make a folder that everybody may write to and in which nobody may rename or remove what is another's."""
    with tempfile.TemporaryDirectory(prefix="ftw-test-") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def write_open_source(folder: Path) -> Path:
    """Write a checkpoint that everybody may read, with a metadata file in a folder."""
    write_checkpoint(folder, llama_tensors(), llama_config())
    (folder / "sub").mkdir()
    (folder / "sub" / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").chmod(0o644)
    return folder


def make_as_other(path: Path, mode: int = 0o777, links: dict[str, Path] | None = None) -> Path:
    """Have the other user make a folder, with links in it."""
    run_as_other("import os, sys; os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], int(sys.argv[2]))", str(path), str(mode))
    for name, leads_to in (links or {}).items():
        link_as_other(path / name, leads_to)
    return path


def link_as_other(path: Path, leads_to: Path) -> None:
    """Have the other user make a link."""
    run_as_other("import os, sys; os.symlink(*sys.argv[1:])", str(leads_to), str(path))


def give_to_other(folder: Path) -> None:
    """Give a folder and all that it holds to the other user."""
    for path in (folder, *folder.rglob("*")):
        os.lchown(path, OTHER_UID, OTHER_UID)


def mode_of(path: Path) -> int:
    """Return the permissions of a file or a folder, no link followed."""
    return path.lstat().st_mode & 0o7777


def refusal(source: Path, target: Path, **options: object) -> str:
    """Convert, and return the line with which that is refused."""
    with pytest.raises(OutputError) as caught:
        ftw.convert(source, target, **options)  # type: ignore[arg-type]
    assert str(caught.value).isprintable()
    return str(caught.value)
