"""Which names, by their text alone, are those of files in a checkpoint's folder."""

import pytest

from ftw.files import is_name_inside

# Who asks, and what differs.
SHARD_OF_FTW = {"is_flat": True}
SHARD_OF_SAFETENSORS = {"is_canonical": False}
FILE_OF_REPOSITORY: dict[str, bool] = {}
COPIED_FILE = {"is_printable": False}
ASKING = (SHARD_OF_FTW, SHARD_OF_SAFETENSORS, FILE_OF_REPOSITORY, COPIED_FILE)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a", (True, True, True, True)),
        ("a b-é…", (True, True, True, True)),
        ("..a", (True, True, True, True)),
        ("n" * 255, (True, True, True, True)),
        ("n" * 256, (False, True, False, False)),
        ("é" * 128, (False, True, False, False)),
        ("a/b", (False, True, True, True)),
        ("a/" + "n" * 256, (False, True, False, False)),
        ("a//b", (False, True, False, False)),
        ("a/", (False, True, False, False)),
        (".", (False, True, False, False)),
        ("./a", (False, True, False, False)),
        ("a/./b", (False, True, False, False)),
        ("", (False, False, False, False)),
        ("/a", (False, False, False, False)),
        ("..", (False, False, False, False)),
        ("../a", (False, False, False, False)),
        ("a/../b", (False, False, False, False)),
        ("a\\b", (False, False, False, True)),
        ("a\nb", (False, False, False, True)),
        ("a\x1bb", (False, False, False, True)),
        ("a\0b", (False, False, False, False)),
        ("a\udc80b", (False, False, False, True)),  # a byte of a name that is not UTF-8
        ("a\ud800b", (False, False, False, False)),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_name_is_inside_by_its_text(name, expected):
    assert tuple(is_name_inside(name, **options) for options in ASKING) == expected
