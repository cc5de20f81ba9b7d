"""What other users put at a target, at the name of its old folder, or on the way to it: none of it is trusted.

The hidden folder in which a conversion writes: test_other_users.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from folders import tree
from other_user import OTHER_UID, needs_other_user, run_as_other
from shared_folder import (
    IMPORTS,
    WAYS,
    give_to_other,
    link_as_other,
    make_as_other,
    mode_of,
    refusal,
    shared_folder,
    write_open_source,
)

import ftw
from ftw.conversion import strangers, target
from ftw.host import OpenFolder

ASIDE, INDEX = ".out.ftw-old", "freetoken_weight.json"

pytestmark = needs_other_user


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_open_source(tmp_path / "src")


# The folder that was put aside


def test_folder_of_another_user_does_not_take_the_targets_place(source: Path, shared: Path) -> None:
    ftw.convert(source, shared / "theirs")
    give_to_other(shared / "theirs")
    (shared / "theirs").rename(shared / ASIDE)
    before = tree(shared / ASIDE)
    assert not ftw.convert(source, shared / "out", resume=True, dry_run=True).was_complete
    assert not ftw.convert(source, shared / "out", resume=True).was_complete
    assert (shared / "out").stat().st_uid == os.geteuid()
    assert ftw.verify(shared / "out", against=source).is_ok
    assert tree(shared / ASIDE) == before  # nor is it removed


def test_own_old_folder_with_a_file_of_another_user_is_not_restored(source: Path, shared: Path) -> None:
    ftw.convert(source, shared / "out")
    give_to_other(shared / "out" / "freetoken_weight.json")
    (shared / "out").rename(shared / ASIDE)
    assert f"belongs to uid {OTHER_UID}" in refusal(source, shared / "out")
    assert not (shared / "out").exists()
    assert ftw.convert(source, shared / "out", overwrite=True).needed_nbytes
    assert ftw.verify(shared / "out", against=source).is_ok


def test_folder_of_another_user_where_the_old_one_is_put_aside_is_refused(
    source: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ftw.convert(source, shared / "out")
    before = tree(shared / "out")
    aside = make_as_other(shared / ASIDE)
    monkeypatch.setattr(OpenFolder, "exchange", lambda folder, one, other: False)
    message = refusal(source, shared / "out", overwrite=True)
    assert f"{aside} belongs to uid {OTHER_UID}, and the old folder needs its name" in message
    assert tree(shared / "out") == before
    aside.rmdir()
    assert ftw.convert(source, shared / "out", overwrite=True, resume=True).was_complete


# The target


@pytest.mark.parametrize("dry_run", [False, True], ids=["write", "dry"])
@pytest.mark.parametrize("part", ["", INDEX, "freetoken-00000.ftw", "config.json", "sub/tokenizer.json"], ids=str)
def test_resume_does_not_call_complete_what_another_user_can_change(
    source: Path, shared: Path, part: str, dry_run: bool
) -> None:
    ftw.convert(source, shared / "out")
    os.chown(shared / "out" / part, OTHER_UID, OTHER_UID)
    message = refusal(source, shared / "out", resume=True, dry_run=dry_run)
    assert message.startswith(
        f"{shared / 'out'}: target: exists and is not empty; overwrite=True replaces an FTW folder; "
    )
    assert message.endswith(f"{shared / 'out' / part} belongs to uid {OTHER_UID}, so it is not trusted")


def test_resume_trusts_what_root_has_made(shared: Path) -> None:
    copied = write_open_source(shared / "src")
    ftw.convert(copied, shared / "out")
    code = "print(ftw.convert(sys.argv[1], sys.argv[2], resume=True).was_complete)"
    assert run_as_other(code, str(copied), str(shared / "out"), before=IMPORTS) == "True\n"


def test_overwrite_of_another_users_folder_takes_none_of_its_permissions(
    source: Path, shared: Path, tmp_path: Path
) -> None:
    ftw.convert(source, shared / "out")
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_bytes(b"mine")
    (shared / "out" / "link").symlink_to(tmp_path / "victim")
    give_to_other(shared / "out")
    (shared / "out").chmod(0o777)
    ftw.convert(source, shared / "out", overwrite=True)
    assert (mode_of(shared / "out"), (shared / "out").stat().st_uid) == (0o755, os.geteuid())
    assert os.listdir(shared) == ["out"]
    assert (tmp_path / "victim" / "file").read_bytes() == b"mine"


def test_empty_folder_of_another_user_is_replaced(source: Path, shared: Path) -> None:
    make_as_other(shared / "out", 0o777)
    ftw.convert(source, shared / "out")
    assert (mode_of(shared / "out"), (shared / "out").stat().st_uid) == (0o755, os.geteuid())


@WAYS
@pytest.mark.parametrize("below", ["", "below/it"], ids=["target", "parent"])
def test_link_of_another_user_on_the_way_to_the_target_is_refused(
    source: Path, shared: Path, tmp_path: Path, below: str, options: dict[str, bool]
) -> None:
    link_as_other(shared / "out", tmp_path / "precious")
    message = refusal(source, shared / "out" / below, **options)
    found = f"is a link that belongs to uid {OTHER_UID}, in a folder that everybody may write to"
    assert message == f"{shared / 'out'}: target: {found}; name a folder of your own"
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize("whose", ["own", "folder's", "in a closed folder"], ids=str)
def test_other_links_on_the_way_to_the_target_are_followed(
    source: Path, shared: Path, tmp_path: Path, whose: str
) -> None:
    (shared / "out").symlink_to(tmp_path / "wanted")
    if whose != "own":
        os.lchown(shared / "out", OTHER_UID, OTHER_UID)
    if whose == "folder's":
        os.chown(shared, OTHER_UID, OTHER_UID)
    elif whose != "own":
        shared.chmod(0o755)
    ftw.convert(source, shared / "out")
    assert ftw.verify(tmp_path / "wanted", against=source).is_ok


def test_links_lead_where_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "a" / "chain").symlink_to("up/a/b")
    (tmp_path / "far").symlink_to(tmp_path / "a" / "chain" / ".." / "new")
    (tmp_path / "gone").symlink_to("nothing/../here")
    monkeypatch.chdir(tmp_path / "a")
    names = ["b", "../a/up/x", "chain/../y", "../far/z/..", "../gone", "..", ".", "/", "b/../../q", "./chain//."]
    for name in names:
        assert str(strangers.follow_links(Path.cwd() / name)) == os.path.realpath(name), name


@pytest.mark.parametrize("made", ["folder", "link"], ids=str)
def test_parent_that_another_user_was_faster_to_make_is_refused(
    source: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    real = Path.mkdir

    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        if path == shared / "a" / "b":
            (shared / "a").chmod(0o777)
            if made == "folder":
                make_as_other(path)
            else:
                link_as_other(path, tmp_path)
        real(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", mkdir)
    message = refusal(source, shared / "a" / "b" / "c" / "out")
    assert f"{shared / 'a' / 'b'} was just made and belongs to uid {OTHER_UID}, which is not trusted" in message
    assert os.listdir(shared / "a") == ["b"]
    assert sorted(os.listdir(tmp_path)) == ["src"]


def test_parent_that_another_conversion_was_faster_to_make_is_used(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.mkdir

    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        real(path)
        real(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with target.parent_folders(tmp_path / "a" / "b" / "out"):
        pass
    assert (tmp_path / "a" / "b").is_dir()
