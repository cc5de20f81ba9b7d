"""What the owner of a checkpoint puts in a file's place while it is used: links that lead out, pipes, devices.

At each system call that looks at the checkpoint, a name of it is another thing than before. No byte of a file that lies
elsewhere may come back or be copied, and nothing may be waited for.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, write_checkpoint, write_ftw, write_sharded
from flipping import Flip, before_each_call, patterns
from inspecting import stored_bytes

import ftw
from ftw.conversion import metadata_files
from ftw.errors import CheckpointError
from ftw.files import Roots, WeightFile, open_plain_file, read_json_file
from ftw.host import OpenFolder, open_to_read, safe_open

SECRET = "SECRET"
SHARDS = ("a.safetensors", "sub/b.safetensors")


def tensors(content: str) -> dict[str, torch.Tensor]:
    return {"t": torch.frombuffer(bytearray(content.encode() * 64), dtype=torch.uint8)}


def sharded(folder: Path, content: str) -> Path:
    """Write a folder whose every file says `content`; all have the same names and sizes, whatever it is."""
    config = llama_config(architectures=[content])
    (folder / "sub").mkdir(parents=True)
    write_sharded(folder, {SHARDS[0]: tensors(content), SHARDS[1]: {content: tensors(content)["t"]}}, config)
    for name in ("tokenizer.txt", "sub/extra.txt", f"sub/{content}.bin"):
        (folder / name).write_text(content * 100)
    return folder


def ftw_folder(folder: Path, content: str) -> Path:
    write_ftw(folder, tensors(content), **{content: content}, side_files=["side.safetensors"])
    write_checkpoint(folder, {f"{content}2": tensors(content)["t"]}, llama_config(architectures=[content]), SIDE)
    (folder / "tokenizer.txt").write_text(content * 100)
    return folder


SIDE = "side.safetensors"


def hub_snapshot(folder: Path, content: str) -> Path:
    """Lay a folder out as huggingface_hub's cache does."""
    plain = sharded(folder.with_name(f"{folder.name}-plain"), content)
    entry = folder.with_name(f"models--{folder.name}")
    snapshot = entry / "snapshots" / "0123"
    (entry / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in plain.rglob("*") if path.is_file())):
        link = snapshot / path.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(entry / "blobs" / str(number))
        link.symlink_to(os.path.relpath(entry / "blobs" / str(number), link.parent))
    return snapshot


FLIPS: list[tuple[Callable[[Path, str], Path], str]] = [
    (sharded, "sub"),
    (sharded, "sub/b.safetensors"),
    (sharded, "a.safetensors"),
    (sharded, "config.json"),
    (sharded, "tokenizer.txt"),
    (sharded, "model.safetensors.index.json"),
    (sharded, ""),
    (ftw_folder, "freetoken_weight.json"),
    (ftw_folder, "freetoken-00000.ftw"),
    (ftw_folder, SIDE),
    (hub_snapshot, "sub"),
    (hub_snapshot, "a.safetensors"),
    (hub_snapshot, "tokenizer.txt"),
    (hub_snapshot, "../../blobs"),
]


def use(source: Path, out: Path, opened: Callable[[], None] = lambda: None) -> Iterator[Any]:
    """Use a checkpoint as a conversion does; yield what came of it."""
    with ftw.open_checkpoint(source) as checkpoint:
        opened()
        yield checkpoint.config.raw, checkpoint.metadata, checkpoint.tensors.keys()
        yield from (stored_bytes(checkpoint, name) for name in checkpoint.tensors)
        files, left_out = metadata_files.choose(checkpoint)
        yield files, left_out
        out.mkdir()
        with OpenFolder(out) as folder:
            metadata_files.copy(files, checkpoint.roots or Roots(source), folder)


def outcome(source: Path, out: Path, opened: Callable[[], None] = lambda: None) -> str:
    """Return all that came of a use, as a text, with the message of what was refused."""
    found: list[str] = []
    try:
        found += map(repr, use(source, out, opened))
    except (ftw.FtwError, OSError) as error:
        found.append(str(error))
    if out.exists():
        found += (path.read_text() for path in sorted(out.rglob("*")) if path.is_file())
        shutil.rmtree(out)
    return "\n".join(found)


@pytest.fixture(params=["at-once", "by-parts"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a path is opened without links: by openat2, or as on a kernel without it."""
    if request.param == "by-parts":
        monkeypatch.setattr(safe_open, "_has_openat2", lambda: False)


@pytest.mark.parametrize(("write", "name"), FLIPS, ids=[f"{write.__name__}-{name or '.'}" for write, name in FLIPS])
def test_name_that_is_a_link_out_for_a_moment_gives_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, str], Path], name: str
) -> None:
    """In one step where the kernel can, and, of the folder that most files are reached through, part by part too."""
    check_flip(tmp_path / "at-once", monkeypatch, write, name)
    if name == "sub":
        monkeypatch.setattr(safe_open, "_has_openat2", lambda: False)
        check_flip(tmp_path / "by-parts", monkeypatch, write, name)


def check_flip(root: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, str], Path], name: str) -> None:
    source, private = write(root / "own", "public"), write(root / "else", SECRET)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    flip = Flip(Path(os.path.normpath(source / name)), Path(os.path.normpath(private / name)))
    out = root / "out"
    good = outcome(source, out)
    assert SECRET not in good
    assert SECRET in outcome(private, out)

    def run(is_link: Callable[[int, str], bool]) -> tuple[str, int]:
        first = 1 << 30 if name == "" else 0  # a folder that the user names may lead anywhere when it is opened

        def opened() -> None:
            nonlocal first
            first = min(first, count[0])

        def act(call: int, what: str) -> None:
            flip.turn(to_link=call >= first and is_link(call - first, what))

        with before_each_call(monkeypatch, act) as count:
            found = outcome(source, out, opened)
            flip.turn(to_link=False)
        return found, count[0] - first

    found, num_calls = run(lambda call, what: False)
    assert found == good
    refused = 0
    for number, pattern in enumerate(patterns(num_calls)):
        found, _ = run(pattern)
        assert SECRET not in found, number
        refused += found != good
    assert refused > 5
    assert outcome(source, out) == good


OTHERS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(300)  # it would wait for ever
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize(
    ("write", "name", "named"),
    [
        (sharded, "a.safetensors", ""),
        (sharded, "a.safetensors", "a.safetensors"),
        (sharded, "config.json", ""),
        (sharded, "tokenizer.txt", ""),
        (sharded, "model.safetensors.index.json", ""),
        (sharded, "model.safetensors.index.json", "model.safetensors.index.json"),
        (ftw_folder, "freetoken_weight.json", "freetoken_weight.json"),
    ],
    ids=lambda value: getattr(value, "__name__", value or "."),
)
def test_file_that_becomes_something_else_is_not_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path, str], Path],
    name: str,
    named: str,
    make: Callable[[Path], object],
) -> None:
    """Replace it before the first call, the second and so on; one that the user names is opened with its links."""
    source = write(tmp_path / "own", "public")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    path, aside, out = source / name, tmp_path / "aside", tmp_path / "out"
    good = outcome(source / named, out)

    def replace(call: int, what: str) -> None:
        if call == nth:
            path.rename(aside)
            make(path)

    refused = 0
    for nth in range(1000):
        with before_each_call(monkeypatch, replace) as count:
            refused += outcome(source / named, out) != good
        if count[0] <= nth:
            break
        path.unlink()
        aside.rename(path)
    else:
        pytest.fail("calls never end")
    assert refused > 3


def test_path_without_links_is_opened_as_any_other(tmp_path: Path, way: None) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("x")
    for path in (tmp_path / "a" / "file", tmp_path / "a" / "." / "file", tmp_path / "a"):
        os.close(open_to_read(str(path), follow_links=False))
    descriptor = open_to_read(os.path.relpath(tmp_path / "a" / "file"), follow_links=False)
    assert os.read(descriptor, 9) == b"x"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_link_anywhere_on_a_path_is_not_followed(tmp_path: Path, way: None) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("x")
    (tmp_path / "first").symlink_to("a")
    (tmp_path / "a" / "middle").symlink_to("b")
    (tmp_path / "a" / "b" / "last").symlink_to("file")
    for name in ("first/b/file", "a/middle/file", "a/b/last"):
        with pytest.raises(OSError, match=name) as caught:
            open_to_read(str(tmp_path / name), follow_links=False)
        assert safe_open.is_link(caught.value)
        os.close(open_to_read(tmp_path / name, follow_links=True))


def test_path_that_is_not_there_is_an_error_that_names_it(tmp_path: Path, way: None) -> None:
    with pytest.raises(FileNotFoundError, match="absent/file") as caught:
        open_to_read(str(tmp_path / "absent" / "file"), follow_links=False)
    assert not safe_open.is_link(caught.value)
    with pytest.raises(ValueError, match="null byte"):
        open_to_read(f"{tmp_path}\0x", follow_links=False)


def test_files_below_a_folder_that_was_named_by_a_link_are_read(tmp_path: Path, way: None) -> None:
    """The user may name a link, and what is behind it may not become one."""
    folder = write_checkpoint(tmp_path / "real", tensors("public"), llama_config())
    (tmp_path / "link").symlink_to("real")
    roots = Roots(tmp_path / "link")
    (folder / "inner").symlink_to("config.json")
    (folder / "outer").symlink_to("../elsewhere")
    assert roots.locate("inner") == str(folder / "config.json")
    assert roots.locate("outer") is None
    located = roots.locate("model.safetensors")
    assert located == str(folder / "model.safetensors")
    file = WeightFile(tmp_path / "link" / "model.safetensors", located)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("nothing")
    assert file.read(8, 1) == b"{"


def test_plain_file_that_became_something_else_is_refused(tmp_path: Path, way: None) -> None:
    path = tmp_path / "x.json"
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="is not a regular file any more"):
        open_plain_file(path, str(path))
    path.unlink()
    path.symlink_to("y.json")
    (tmp_path / "y.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"x\.json: file: became a link while it was being opened"):
        open_plain_file(path, str(path))
    with pytest.raises(CheckpointError, match="became a link"):
        read_json_file(path, str(path))
    assert read_json_file(path) == {"a": 1}


def test_index_of_an_ftw_in_a_folder_that_is_a_link_out_is_refused(tmp_path: Path) -> None:
    source = ftw_folder(tmp_path / "own", "public")
    index = source / "freetoken_weight.json"
    index.rename(tmp_path / "index.json")
    index.symlink_to(tmp_path / "index.json")
    with pytest.raises(
        CheckpointError, match=r"weight\.json: file: is a link that leads out of the folder; --follow-links"
    ):
        ftw.open_checkpoint(source)
    with ftw.open_checkpoint(index) as checkpoint:  # the user's wish
        assert set(checkpoint.tensors) == {"t", "public2"}
