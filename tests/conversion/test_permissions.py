"""What others may do with an FTW: what the umask lets them, and no more than the source does."""

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from builders import llama_config, write_sharded
from shared_folder import mode_of, write_open_source

import ftw
from ftw.host import granted_by

SHARD, INDEX, CONFIG, SUB = "freetoken-00000.ftw", "freetoken_weight.json", "config.json", "sub/tokenizer.json"


@pytest.fixture
def set_umask() -> Iterator[Callable[[int], None]]:
    before = os.umask(0o022)
    yield lambda umask: (os.umask(umask), None)[1]
    os.umask(before)


@pytest.fixture
def source(tmp_path: Path, set_umask: Callable[[int], None]) -> Path:
    return write_open_source(tmp_path / "src")


def modes_of(folder: Path) -> tuple[int, set[int]]:
    return mode_of(folder), {mode_of(folder / name) for name in (SHARD, INDEX, CONFIG, SUB)}


@pytest.mark.parametrize(
    ("umask", "folder", "weights", "expected"),
    [
        (0o022, 0o755, 0o644, (0o755, 0o644)),
        (0o022, 0o777, 0o666, (0o755, 0o644)),
        (0o002, 0o775, 0o664, (0o775, 0o664)),
        (0o002, 0o755, 0o664, (0o755, 0o664)),
        (0o002, 0o775, 0o644, (0o755, 0o644)),
        (0o077, 0o755, 0o644, (0o700, 0o600)),
        (0o027, 0o755, 0o644, (0o750, 0o640)),
        (0o022, 0o700, 0o644, (0o700, 0o600)),
        (0o022, 0o755, 0o600, (0o700, 0o600)),
        (0o022, 0o750, 0o644, (0o750, 0o640)),
        (0o022, 0o755, 0o640, (0o750, 0o640)),
        (0o022, 0o711, 0o644, (0o711, 0o644)),
        (0o022, 0o744, 0o644, (0o744, 0o600)),
        (0o022, 0o1777, 0o644, (0o755, 0o644)),
    ],
    ids=lambda value: oct(value) if isinstance(value, int) else "",
)
def test_ftw_lets_others_do_what_umask_and_source_do(
    source: Path, tmp_path: Path, set_umask: Callable[[int], None],
    umask: int, folder: int, weights: int, expected: tuple[int, int],
) -> None:  # fmt: skip
    for path in (source / "config.json", source / "sub" / "tokenizer.json"):
        path.chmod(0o666)
    (source / "sub").chmod(0o777)
    (source / "model.safetensors").chmod(weights)
    source.chmod(folder)
    set_umask(umask)
    ftw.convert(source, tmp_path / "out")
    assert modes_of(tmp_path / "out") == (expected[0], {expected[1]})
    assert mode_of(tmp_path / "out" / "sub") == expected[0]


def test_copied_files_and_folders_let_others_do_no_more_than_their_originals(source: Path, tmp_path: Path) -> None:
    (source / "config.json").chmod(0o640)
    (source / "sub").chmod(0o700)
    (source / "merges.txt").touch(mode=0o755)
    ftw.convert(source, tmp_path / "out")
    found = {name: mode_of(tmp_path / "out" / name) for name in (SHARD, INDEX, CONFIG, "sub", SUB, "merges.txt")}
    assert found == {SHARD: 0o644, INDEX: 0o644, CONFIG: 0o640, "sub": 0o700, SUB: 0o644, "merges.txt": 0o644}


@pytest.mark.parametrize("number", [1, 2])
def test_every_weight_file_counts(tmp_path: Path, set_umask: Callable[[int], None], number: int) -> None:
    shards = {f"model-0000{number}-of-00002.safetensors": {f"t{number}": torch.ones(9)} for number in (1, 2)}
    source = write_sharded(tmp_path / "src", shards, llama_config())
    for name in shards:
        (source / name).chmod(0o644)
    (source / f"model-0000{number}-of-00002.safetensors").chmod(0o640)
    ftw.convert(source, tmp_path / "out")
    assert (mode_of(tmp_path / "out"), mode_of(tmp_path / "out" / SHARD)) == (0o750, 0o640)


def test_single_file_counts_with_its_folder(source: Path, tmp_path: Path) -> None:
    source.chmod(0o750)
    ftw.convert(source / "model.safetensors", tmp_path / "out")
    assert (mode_of(tmp_path / "out"), mode_of(tmp_path / "out" / SHARD)) == (0o750, 0o640)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which can give files to any group")
@pytest.mark.parametrize("given", ["folder", "weights"])
def test_group_that_is_not_the_sources_counts_as_others(source: Path, tmp_path: Path, given: str) -> None:
    os.chown(source if given == "folder" else source / "model.safetensors", -1, 12345)
    for mode, expected in ((0o750, (0o700, 0o600)), (0o755, (0o755, 0o644)), (0o705, (0o700, 0o600))):
        source.chmod(mode)
        (source / "model.safetensors").chmod(mode & 0o666)
        ftw.convert(source, tmp_path / "out", overwrite=True)
        assert (mode_of(tmp_path / "out"), mode_of(tmp_path / "out" / SHARD)) == expected
        (tmp_path / "out").rename(tmp_path / f"{mode:o}")


def access_list(group: int, mask: int) -> bytes:
    """Return a list that a named user is on, as the kernel stores it (linux/posix_acl_xattr.h)."""
    entries = [(1, 6, -1), (2, 4, 12345), (4, group, -1), (16, mask, -1), (32, 0, -1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="needs Linux, whose access control lists these are")
def test_group_bits_of_a_file_with_an_access_control_list_are_not_the_groups(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    try:
        os.setxattr(path, "system.posix_acl_access", access_list(group=0, mask=4))
    except OSError:
        pytest.skip("this file system has no access control lists")
    assert mode_of(path) == 0o640
    assert granted_by(path, path.stat().st_gid) == 0


@pytest.mark.parametrize(
    ("old", "weights", "expected"),
    [(0o750, 0o644, 0o750), (0o700, 0o644, 0o700), (0o755, 0o600, 0o700), (0o2775, 0o664, 0o755)],
    ids=["narrower", "private", "private-source", "wider"],
)
def test_overwrite_takes_the_old_folders_permissions_as_far_as_the_source_lets(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, old: int, weights: int, expected: int
) -> None:
    ftw.convert(source, tmp_path / "out")
    (source / "model.safetensors").chmod(weights)
    (tmp_path / "out").chmod(old)
    ftw.convert(source, tmp_path / "out", overwrite=True)
    assert mode_of(tmp_path / "out") == expected
    line = (
        f"others may do no more with it than with the source: its mode is {expected:04o}, that of the old was {old:04o}"
    )
    told = [message for message in caplog.messages if message == f"{tmp_path / 'out'}: target: {line}"]
    assert len(told) == (old & 0o077 != expected & 0o077)


def test_folder_in_a_folder_that_hands_its_group_on_does_so_too(source: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    work.chmod(0o2755)
    ftw.convert(source, work / "out")
    assert mode_of(work / "out") == 0o2755
    assert mode_of(work / "out" / "sub") == 0o2755


def test_resumed_shards_are_narrowed_too(source: Path, tmp_path: Path) -> None:
    """Those that an earlier conversion has left, with another umask."""

    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ftw.convert(source, tmp_path / "out", progress=progress)
    left = tmp_path / ".out.ftw-partial"
    for path in left.glob("*.ftw"):
        path.chmod(0o666)
    assert ftw.convert(source, tmp_path / "out", resume=True).resumed_nbytes > 0
    assert (mode_of(tmp_path / "out"), mode_of(tmp_path / "out" / SHARD)) == (0o755, 0o644)
