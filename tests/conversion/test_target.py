"""Which targets a conversion takes, and what it does with what is there. Failures and kills: test_convert_failures."""

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw
from folders import tree

import ftw
from ftw.errors import OutputError
from ftw.host import OpenFolder

INDEX = "freetoken_weight.json"
TENSORS = {"matrix": torch.arange(5000, dtype=torch.float32).reshape(50, 100), "scalar": torch.tensor(1.5)}


def llama(folder: Path, **overrides) -> Path:
    return write_checkpoint(folder, llama_tensors(), llama_config(**overrides))


@pytest.mark.parametrize("overwrite", [False, True], ids=["plain", "overwrite"])
@pytest.mark.parametrize("dry_run", [False, True], ids=["write", "dry"])
@pytest.mark.parametrize("case", ["foreign", "file", "inside", "source", "contains", "link_to_source"], ids=str)
def test_convert_refuses_a_target_and_changes_nothing(tmp_path, case, dry_run, overwrite):
    source = llama(tmp_path / "models" / "src")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    (tmp_path / "link").symlink_to(source)
    target = {
        "foreign": foreign,
        "file": foreign / "thesis.txt",
        "inside": source / "sub" / "out",
        "source": source,
        "contains": tmp_path / "models",
        "link_to_source": tmp_path / "link",
    }[case]
    before, names = tree(tmp_path), sorted(tmp_path.rglob("*"))
    with pytest.raises(
        OutputError, match=r"must not contain each other|is the source itself|is a file|not an FTW|not empty"
    ) as caught:
        ftw.convert(source, target, overwrite=overwrite, dry_run=dry_run)
    assert str(caught.value).startswith(f"{target}: target: ")
    assert (tree(tmp_path), sorted(tmp_path.rglob("*"))) == (before, names)


@pytest.mark.parametrize("opened", ["folder", "index"], ids=str)
def test_convert_never_overwrites_its_own_source(tmp_path, opened):
    source = write_ftw(tmp_path / "src", TENSORS)
    before = tree(tmp_path)
    with pytest.raises(OutputError):
        ftw.convert(source if opened == "folder" else source / INDEX, source, overwrite=True)
    assert tree(tmp_path) == before


def test_convert_of_a_single_file_may_go_beside_it(tmp_path, monkeypatch):
    llama(tmp_path)
    monkeypatch.chdir(tmp_path)
    ftw.convert("model.safetensors", "out")
    assert ftw.verify("out", against="model.safetensors").is_ok


def test_convert_keeps_an_existing_ftw_without_overwrite(tmp_path):
    source = llama(tmp_path / "src")
    ftw.convert(source, tmp_path / "out")
    before = tree(tmp_path)
    with pytest.raises(OutputError, match="exists and is not empty; overwrite=True replaces an FTW folder"):
        ftw.convert(source, tmp_path / "out", embed="host")
    assert tree(tmp_path) == before


def test_convert_overwrite_replaces_the_whole_folder(tmp_path):
    old = write_ftw(tmp_path / "out", TENSORS)
    (old / "stale.txt").write_text("of the old one")
    source = llama(tmp_path / "src")
    ftw.convert(source, tmp_path / "out", overwrite=True)
    assert ftw.verify(tmp_path / "out", against=source).is_ok
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "freetoken-00000.ftw", INDEX]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


@pytest.mark.parametrize("overwrite", [False, True], ids=["plain", "overwrite"])
def test_convert_takes_an_empty_folder(tmp_path, overwrite):
    (tmp_path / "out").mkdir()
    ftw.convert(llama(tmp_path / "src"), tmp_path / "out", overwrite=overwrite)
    assert ftw.verify(tmp_path / "out").is_ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


@pytest.mark.parametrize("content", ["dangling", "empty", "ftw"], ids=str)
def test_convert_through_a_link_fills_what_it_points_to(tmp_path, content):
    """Twice, since what the first conversion leaves behind would break the second."""
    disk = tmp_path / "disk" / "model"
    disk.parent.mkdir()
    if content != "dangling":
        disk.mkdir()
    if content == "ftw":
        write_ftw(disk, TENSORS)
    (tmp_path / "out").symlink_to(disk)
    source = llama(tmp_path / "src")
    for _ in range(2):
        ftw.convert(source, tmp_path / "out", overwrite=True)
        assert (tmp_path / "out").is_symlink()
        assert ftw.verify(disk, against=source).is_ok
        assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out", "src"]
        assert [path.name for path in disk.parent.iterdir()] == ["model"]


def test_convert_does_not_replace_a_folder_that_appeared_meanwhile(tmp_path):
    source = llama(tmp_path / "src")
    target = tmp_path / "out"

    def appear(done: int, total: int) -> None:
        target.mkdir(exist_ok=True)
        (target / "thesis.txt").write_text("years of work")

    with pytest.raises(OutputError, match="exists and is not empty"):
        ftw.convert(source, target, progress=appear)
    assert (target / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.ftw-partial", "out", "src"]
    shutil.rmtree(target)
    assert ftw.convert(source, target, resume=True).resumed_nbytes  # nothing that was written is lost


def test_convert_does_not_empty_what_a_link_named_like_its_staging_folder_points_to(tmp_path):
    source = llama(tmp_path / "src")
    precious = write_ftw(tmp_path / "precious", TENSORS)
    before = tree(precious)
    (tmp_path / ".out.ftw-partial").symlink_to(precious)
    with pytest.raises(OSError, match="ftw-partial"):
        ftw.convert(source, tmp_path / "out")
    assert tree(precious) == before


def test_convert_refuses_a_mount_point_before_it_writes(tmp_path, monkeypatch):
    """An empty volume of a container, say: no folder can take its name."""
    source = llama(tmp_path / "src")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(tmp_path / "out"))
    with pytest.raises(OutputError, match="out: target: is a mount point, which cannot be renamed"):
        ftw.convert(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def test_convert_of_file_names_that_are_no_utf8_makes_an_index_that_opens(tmp_path):
    source = llama(tmp_path / "src\udcff")
    (source / "model.safetensors").rename(source / "model\udcfe.safetensors")
    (source / "notes\udcfd.txt").touch()
    ftw.convert(source, tmp_path / "out")
    assert ftw.verify(tmp_path / "out", against=source).is_ok
    index = json.loads((tmp_path / "out" / INDEX).read_bytes())
    assert index["source_model_path"] == "src\\udcff"
    assert index["copied_metadata"] == ["config.json", "notes\\udcfd.txt"]
    assert index["ftw"]["source"]["files"][0]["name"] == "model\\udcfe.safetensors"


def test_convert_makes_missing_parents_of_the_target(tmp_path):
    ftw.convert(llama(tmp_path / "src"), tmp_path / "a" / "b" / "out")
    assert ftw.verify(tmp_path / "a" / "b" / "out").is_ok


def test_convert_result_still_opens_after_it_was_moved(tmp_path):
    source = llama(tmp_path / "src")
    ftw.convert(source, tmp_path / "out", embed="host")
    shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    assert ftw.verify(tmp_path / "elsewhere", against=source).is_ok


def test_target_that_is_a_link_to_itself_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputError, match="loop: target: is a link that leads back to itself"):
        ftw.convert(llama(tmp_path / "src"), tmp_path / "loop")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "src"]


def test_target_whose_name_leaves_no_room_is_refused(tmp_path):
    source = llama(tmp_path / "src")
    for length in (243, 255):  # of the latter no other name fits
        for dry_run in (False, True):
            with pytest.raises(OutputError, match=f"its name has {length} bytes, at most 242 are allowed"):
                ftw.convert(source, tmp_path / ("x" * length), dry_run=dry_run)
    ftw.convert(source, tmp_path / ("x" * 242))


def test_overwrite_keeps_the_mode_of_the_folder(tmp_path):
    source = llama(tmp_path / "src")
    (source / "model.safetensors").chmod(0o644)
    ftw.convert(source, tmp_path / "out")
    (tmp_path / "out").chmod(0o750)
    ftw.convert(source, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_overwrite_of_a_folder_that_somebody_has_locked(tmp_path):
    """As `flock out ftw convert src out --overwrite` does."""
    source = llama(tmp_path / "src")
    ftw.convert(source, tmp_path / "out")
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        ftw.convert(source, tmp_path / "out", overwrite=True, embed="host")
    finally:
        os.close(descriptor)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def test_old_folder_that_cannot_be_removed_is_told_of(tmp_path, monkeypatch, caplog):
    source = llama(tmp_path / "src")
    ftw.convert(source, tmp_path / "out")

    def refuse(folder, name):
        raise PermissionError(13, "Permission denied", name)

    with monkeypatch.context() as patch:
        patch.setattr(OpenFolder, "remove", refuse)
        ftw.convert(source, tmp_path / "out", overwrite=True)
    left = tmp_path / ".out.ftw-partial"
    assert f"{left}: folder: is not needed any more, and cannot be removed: Permission denied" in caplog.messages
    assert ftw.verify(tmp_path / "out", against=source).is_ok


def test_dry_run_tells_that_the_disk_has_no_room(tmp_path, monkeypatch):
    source = llama(tmp_path / "src")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5))
    result = ftw.convert(source, tmp_path / "out", dry_run=True)
    assert result.needed_nbytes > result.free_nbytes == 5
    with pytest.raises(OutputError, match="5 B free on its disk"):
        ftw.convert(source, tmp_path / "out")
