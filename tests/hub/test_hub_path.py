"""Hub ids, the listing of a repository, and paths in it."""

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint
from inspecting import assert_same_report

from ftw.errors import CheckpointError
from ftw.hub import HubPath, list_repository, parse_hub_id
from ftw.hub import repository as hub_repository
from ftw.hub.place import open_weight_file


def test_hub_path_is_like_a_path(hub, tmp_path):
    folder = tmp_path / "name"
    write_checkpoint(folder / "a" / "b", {"t": torch.ones(1)}, {})
    (folder / "x.json").write_text("{}")
    (folder / "empty.gguf").touch()
    hub.add("org/name", folder)
    root = HubPath(list_repository(parse_hub_id("org/name")))
    for inside in ("", "a", "a/b", "a/b/config.json", "x.json", "absent", "a/absent/x", "x.json/y"):
        there, here = root / inside, folder / inside
        assert str(there) == f"org/name/{inside}".rstrip("/")
        assert (there.name, str(there.parent.inside)) == (here.name, inside.rpartition("/")[0])
        for question in ("exists", "is_file", "is_dir", "is_symlink"):
            assert getattr(there, question)() == getattr(here, question)(), (inside, question)
        if here.is_dir():
            assert sorted(path.name for path in there.iterdir()) == sorted(path.name for path in here.iterdir())
            for pattern in ("*", "*.json", "b"):
                names = sorted(path.name for path in here.glob(pattern))
                assert [path.name for path in sorted(there.glob(pattern))] == names
    with (root / "x.json").open("rb") as file:
        assert file.read() == b"{}"
    assert open_weight_file((root / "empty.gguf").as_path()).read(0, 0) == b""
    for inside, problem in (("absent", "is missing"), ("a", "is not a regular file")):
        with pytest.raises(CheckpointError, match=f"^org/name/{inside}: file: {problem}$"):
            open_weight_file((root / inside).as_path())


def test_hub_huge_listing_is_taken_from_the_tree(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_repository, "_LIST_TREE_FROM", 2)
    folder = write_checkpoint(tmp_path / "m", llama_tensors(), llama_config())
    hub.add("org/name", folder)
    assert_same_report("org/name", folder)
    assert any("/tree/" in request.path for request in hub.requests)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", ("org/name", None, "")),
        ("org/name@v1.0", ("org/name", "v1.0", "")),
        ("org/name@refs/pr/7/a", ("org/name", "refs/pr/7", "a")),
        ("org/name@main/a b/c.gguf", ("org/name", "main", "a b/c.gguf")),
        ("org/name/a/b", ("org/name", None, "a/b")),
        *((text, None) for text in ("org", "./a/b", "a/../b", "a/b/..", "a/b/./c", "a/b//c", "a/b/", "a/b@", "a/b@/c",
                                    "/a/b", "a/b/c\n", "-a/b", "~/a/b")),
    ],
    ids=ascii,
)  # fmt: skip
def test_hub_id_names_a_repository_a_revision_and_a_place(text, expected):
    found = parse_hub_id(text)
    assert found == expected
    assert found is None or str(found) == text
