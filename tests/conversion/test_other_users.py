"""Conversions in folders that others may write to: what those put there is not trusted, what is written is private.

Another user of the same machine acts through `run_as_other`. The tests themselves run as root, to whom a sticky folder
like /tmp is no protection. What others put at the target itself, or on the way to it: test_strangers.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from folders import state, tree
from other_user import OTHER_UID, needs_other_user, run_as_other
from shared_folder import (
    IMPORTS,
    WAYS,
    link_as_other,
    make_as_other,
    mode_of,
    refusal,
    shared_folder,
    write_open_source,
)

import ftw
from ftw.conversion.writing import writer
from ftw.errors import OutputError
from ftw.host import OpenFolder

STAGING, JOURNAL, INDEX = ".out.ftw-partial", ".ftw-journal", "freetoken_weight.json"

pytestmark = needs_other_user


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion of a few KiB then takes several chunks."""
    monkeypatch.setattr(writer, "_CHUNK_NBYTES", 4 << 10)


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_open_source(tmp_path / "src")


def interrupt(source: Path, target: Path) -> Path:
    """Convert until half of the bytes have been read, and return the folder that is left."""

    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ftw.convert(source, target, progress=progress)
    assert (target.with_name(STAGING) / JOURNAL).is_file()
    return target.with_name(STAGING)


# The staging folder


@WAYS
@pytest.mark.parametrize("mode", [0o777, 0o755, 0o700], ids=oct)
def test_staging_folder_of_another_user_is_refused(
    source: Path, shared: Path, mode: int, options: dict[str, bool]
) -> None:
    staging = make_as_other(shared / STAGING, mode)
    before = state(staging)
    message = refusal(source, shared / "out", **options)
    found = f"{staging} belongs to uid {OTHER_UID}, only one's own is used; take another target"
    assert message == f"{shared / 'out'}: target: {found}"
    assert state(staging) == before
    assert os.listdir(shared) == [STAGING]


def test_owner_is_named(source: Path, shared: Path) -> None:
    (shared / STAGING).mkdir()
    os.chown(shared / STAGING, 1, 1)
    assert "belongs to uid 1 (daemon), only" in refusal(source, shared / "out")


@WAYS
@pytest.mark.parametrize(
    "name", [JOURNAL, f"{JOURNAL}.tmp", f"{INDEX}.tmp", "freetoken-00000.ftw", "config.json", "sub"], ids=str
)
def test_link_in_a_staging_folder_of_another_user_is_not_followed(
    source: Path, shared: Path, tmp_path: Path, name: str, options: dict[str, bool]
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    victim.chmod(0o600)
    make_as_other(shared / STAGING, links={name: victim})
    assert f"belongs to uid {OTHER_UID}" in refusal(source, shared / "out", **options)
    assert (victim.read_bytes(), mode_of(victim)) == (b"mine", 0o600)


@WAYS
def test_link_of_another_user_named_like_the_staging_folder_is_refused(
    source: Path, shared: Path, tmp_path: Path, options: dict[str, bool]
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / JOURNAL).write_bytes(b"plan 0\n")
    link_as_other(shared / STAGING, tmp_path / "precious")
    assert f"{STAGING} belongs to uid {OTHER_UID}" in refusal(source, shared / "out", **options)
    assert tree(tmp_path / "precious") == {JOURNAL: b"plan 0\n"}


@WAYS
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702], ids=oct)
def test_own_staging_folder_that_others_may_write_to_is_refused(
    source: Path, shared: Path, mode: int, options: dict[str, bool]
) -> None:
    left = interrupt(source, shared / "out")
    left.chmod(mode)
    before = state(left)
    message = refusal(source, shared / "out", **options)
    assert message.endswith(f"{left} can be changed by others, its mode is 0{mode:o}, 0700 is needed; remove it")
    assert (state(left), mode_of(left)) == (before, mode)


def test_own_folder_of_another_kind_that_was_given_the_name_is_refused(source: Path, shared: Path) -> None:
    """In a folder without the sticky bit anybody may rename it."""
    shared.chmod(0o777)
    (shared / "thesis").mkdir()
    (shared / "thesis" / "chapter").write_text("years of work")
    run_as_other("import os, sys; os.rename(*sys.argv[1:])", str(shared / "thesis"), str(shared / STAGING))
    for options in ({}, {"resume": True}, {"dry_run": True}):
        assert "holds none of the files that a conversion makes" in refusal(source, shared / "out", **options)
    assert tree(shared) == {f"{STAGING}/chapter": b"years of work"}
    assert mode_of(shared / STAGING) == 0o755


def test_left_part_that_others_may_read_is_taken_over_and_closed_to_them(source: Path, shared: Path) -> None:
    """As earlier releases have left it."""
    interrupt(source, shared / "out").chmod(0o755)
    modes = []
    result = ftw.convert(
        source, shared / "out", resume=True, progress=lambda done, total: modes.append(mode_of(shared / STAGING))
    )
    assert result.resumed_nbytes > 0
    assert set(modes[1:]) == {0o700}
    assert ftw.verify(shared / "out", against=source).is_ok


@pytest.mark.parametrize("uid", [0, OTHER_UID], ids=["own", "mapped"])
def test_left_part_on_a_file_system_without_permissions_is_taken_over(
    source: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    """There all files have the same owner and the same mode, those too that were meant to be private."""
    left = interrupt(source, shared / "out")
    left.chmod(0o777)
    os.chown(left, uid, uid)
    monkeypatch.setattr(OpenFolder, "status_of_private_file", lambda folder: left.stat())
    assert ftw.convert(source, shared / "out", resume=True).resumed_nbytes > 0


def test_user_does_not_trust_the_staging_folder_of_root_either(source: Path, shared: Path) -> None:
    interrupt(source, shared / "out")
    code = """
        try:
            ftw.convert(sys.argv[1], sys.argv[2], resume=True)
        except ftw.OutputError as error:
            print(error)
    """
    copied = write_open_source(shared / "src")
    printed = run_as_other(code, str(copied), str(shared / "out"), before=IMPORTS)
    assert f"{shared / STAGING} belongs to uid 0 (root), only one's own is used" in printed


# Nobody else reads or locks what is being written


LOCK = """
    found = []
    for path in sys.argv[1:]:
        try:
            fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(path)
        except PermissionError:
            pass
    print(found)
"""


def lock_as_other(paths: list[Path]) -> str:
    """Return which of some folders and files the other user could open and lock."""
    return run_as_other(LOCK, *map(str, paths), before="import fcntl, os")


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_nobody_else_can_read_or_lock_what_is_being_written(source: Path, shared: Path, overwrite: bool) -> None:
    if overwrite:
        ftw.convert(source, shared / "out")
    printed = []
    staging = shared / STAGING

    def progress(done: int, total: int) -> None:
        paths = [staging, *staging.iterdir()]
        printed.append((len(paths), lock_as_other(paths)))

    ftw.convert(source, shared / "out", overwrite=overwrite, progress=progress)
    assert max(number for number, _ in printed) > 3
    assert {text for _, text in printed} == {"[]\n"}
    assert mode_of(shared / "out") == 0o755


def test_nobody_else_can_read_or_lock_what_is_left(source: Path, shared: Path) -> None:
    left = interrupt(source, shared / "out")
    assert lock_as_other([left, *left.iterdir()]) == "[]\n"
    assert ftw.convert(source, shared / "out", resume=True).resumed_nbytes > 0


def test_what_could_not_be_published_is_private_again(
    source: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: OpenFolder, old: str, new: str) -> None:
        assert mode_of(shared / STAGING) == 0o755
        raise OSError(5, "broken")

    monkeypatch.setattr(OpenFolder, "rename", refuse)
    with pytest.raises(OSError, match="broken"):
        ftw.convert(source, shared / "out")
    assert mode_of(shared / STAGING) == 0o700


# Folders that change their names meanwhile, as they may in a folder without the sticky bit


SWAP = (
    "import os, sys; os.rename(sys.argv[1], sys.argv[1] + '-gone'); os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], 0o777)"
)


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_folder_that_takes_the_staging_folders_place_is_neither_filled_nor_published(
    source: Path, shared: Path, overwrite: bool
) -> None:
    shared.chmod(0o777)
    if overwrite:
        ftw.convert(source, shared / "out")
    before, swapped = tree(shared), []

    def progress(done: int, total: int) -> None:
        if not swapped:
            swapped.append(run_as_other(SWAP, str(shared / STAGING), before="import os"))

    with pytest.raises(OutputError, match=rf"{STAGING} was renamed or replaced by somebody while it was written"):
        ftw.convert(source, shared / "out", overwrite=overwrite, progress=progress)
    assert list((shared / STAGING).iterdir()) == []
    assert (shared / STAGING).stat().st_uid == OTHER_UID
    assert (shared / f"{STAGING}-gone" / INDEX).is_file()
    assert (tree(shared / "out") if overwrite else {}) == {
        name.removeprefix("out/"): data for name, data in before.items()
    }


@pytest.mark.parametrize("step", ["rename", "exchange"], ids=str)
def test_swap_at_the_last_moment_is_noticed(
    source: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    shared.chmod(0o777)
    if step == "exchange":
        ftw.convert(source, shared / "out")
    before, real, swapped = tree(shared), getattr(OpenFolder, step), []

    def swap(folder: OpenFolder, old: str, new: str) -> object:
        if not swapped:
            swapped.append(run_as_other(SWAP, str(shared / STAGING), before="import os"))
        return real(folder, old, new)

    monkeypatch.setattr(OpenFolder, step, swap)
    with pytest.raises(OutputError, match="was renamed or replaced by somebody"):
        ftw.convert(source, shared / "out", overwrite=True)
    if step == "exchange":  # the old folder has its name again
        assert {name: data for name, data in tree(shared).items() if name.startswith("out/")} == before
