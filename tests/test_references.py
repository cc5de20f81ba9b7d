"""What docstrings, comments and documents name in backticks as `ftw.x.y` or `folder/file.py` is there."""

import importlib
import re
from pathlib import Path

import pytest
from places import ROOT

TEXTS = [
    *(
        path
        for folder in ("ftw", "cli", "bench", "examples", "fuzz", "docs")
        for path in (ROOT / folder).rglob("*.[pm][yd]")
    ),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
]
DOTTED = re.compile(r"`(ftw(?:\.\w+)+)")
FILE = re.compile(r"(?<![\w./*<-])((?:ftw|cli|bench|examples|fuzz|tests|docs)/[\w./-]*\w\.(?:py|md|json))\b")


def resolves(name: str) -> bool:
    """Tell whether a dotted name is that of a module, or of something in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_in_texts_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [name for name in sorted(set(DOTTED.findall(text))) if not resolves(name)] == []
    assert [name for name in sorted(set(FILE.findall(text))) if not (ROOT / name).exists()] == []


def test_architecture_names_every_room_and_every_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./]+)`", text))
    inside = [path.relative_to(ROOT / "ftw") for path in (ROOT / "ftw").rglob("*.py") if path.name != "__init__.py"]
    rooms = {path.parent.as_posix() for path in inside} - {".", "kernels/jit", "integrations/transformers"}
    listed = [path for path in inside if path.parent.as_posix() in rooms]
    assert rooms - named == set()
    assert {path.stem for path in listed} - named == set()
