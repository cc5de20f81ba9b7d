"""Files that are written whole or not at all, beside what other users may have put there."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
from other_user import needs_other_user, run_as_other

from ftw.host import write_atomically


@pytest.fixture(params=["path", "descriptor"])
def write(request, tmp_path):
    """Write a file of the folder `tmp_path`, by its path or in the open folder."""

    def by_path(name, pieces):
        write_atomically(tmp_path / name, pieces)

    def by_descriptor(name, pieces):
        folder = os.open(tmp_path, os.O_RDONLY)
        try:
            write_atomically(Path("/nowhere") / name, pieces, dir_fd=folder)
        finally:
            os.close(folder)

    return by_path if request.param == "path" else by_descriptor


def mode_of(path: Path) -> int:
    return path.lstat().st_mode & 0o777


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_new_file_has_the_permissions_of_the_umask(tmp_path, write, umask):
    write("new", [b"a", b"b"])
    assert (tmp_path / "new").read_bytes() == b"ab"
    assert mode_of(tmp_path / "new") == 0o640
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444], ids=oct)
def test_own_file_hands_its_permissions_on(tmp_path, write, umask, mode):
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "old").chmod(mode)
    write("old", [b"new"])
    assert (tmp_path / "old").read_bytes() == b"new"
    assert mode_of(tmp_path / "old") == mode
    assert os.listdir(tmp_path) == ["old"]


@needs_other_user
def test_group_of_the_replaced_file_does_not_become_another_group(tmp_path, write):
    (tmp_path / "old").write_bytes(b"old")
    os.chown(tmp_path / "old", -1, 12345)
    (tmp_path / "old").chmod(0o640)
    write("old", [b"new"])
    assert (mode_of(tmp_path / "old"), (tmp_path / "old").stat().st_gid) == (0o600, os.getegid())


@needs_other_user
def test_file_of_another_user_does_not_hand_its_permissions_on(tmp_path, write):
    (tmp_path / "theirs").write_bytes(b"old")
    os.chown(tmp_path / "theirs", 12345, 12345)
    (tmp_path / "theirs").chmod(0o666)
    write("theirs", [b"new"])
    assert (mode_of(tmp_path / "theirs"), (tmp_path / "theirs").stat().st_uid) == (0o644, os.geteuid())


def test_link_is_replaced_and_not_followed(tmp_path, write):
    (tmp_path / "victim").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("victim")
    write("link", [b"new"])
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "victim").read_bytes() == b"mine"


@needs_other_user
def test_link_that_another_user_has_put_beside_a_file_is_not_followed(tmp_path):
    """Under a name that could be foreseen, as `NAME.tmp` once could."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    with tempfile.TemporaryDirectory(prefix="ftw-test-") as name:
        shared = Path(name)
        shared.chmod(0o1777)
        run_as_other("import os, sys; os.symlink(*sys.argv[1:])", str(victim), str(shared / "file.tmp"))
        write_atomically(shared / "file", [b"new"])
        assert victim.read_bytes() == b"mine"
        assert (shared / "file").read_bytes() == b"new"
        assert sorted(os.listdir(shared)) == ["file", "file.tmp"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failure_names_the_file_and_leaves_what_was_there(tmp_path, write, monkeypatch, call):
    (tmp_path / "old").write_bytes(b"old")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        write("old", [b"new"])
    assert (caught.value.errno, Path(caught.value.filename).name) == (errno.ENOSPC, "old")
    assert (tmp_path / "old").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["old"]


def test_interrupt_leaves_what_was_there(tmp_path, write):
    def interrupt():
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write("new", interrupt())
    assert os.listdir(tmp_path) == []


def test_no_name_is_used_twice(tmp_path, write, monkeypatch):
    real, names = os.replace, []

    def replace(old, new, **options):
        names.append(Path(old).name)
        real(old, new, **options)

    monkeypatch.setattr(os, "replace", replace)
    for _ in range(3):
        write("file", [b"new"])
    assert len(set(names)) == 3
