"""Systems without locks, open folders and an exchange of names, as Windows is one: conversions work, unprotected."""

import os
from pathlib import Path

import pytest
from builders import llama_config, llama_tensors, write_checkpoint

import ftw
from ftw.conversion import target
from ftw.host import atomic_write, file_lock

STAGING = ".out.ftw-partial"


@pytest.fixture(autouse=True)
def bare_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what other systems lack; no name is given to a folder that another has, even if that is empty."""
    real = os.rename

    def rename(path: str, other: str, **options: None) -> None:
        if os.path.isdir(other):
            raise FileExistsError(17, "File exists", str(other))
        real(path, other, **options)

    monkeypatch.setattr(file_lock, "fcntl", None)
    for module in (target, atomic_write):
        monkeypatch.setattr(module, "fsync_folder", lambda folder: None)
    for name in ("O_DIRECTORY", "O_NOFOLLOW"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(os, "rename", rename)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "src", llama_tensors(), llama_config())
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_convert_replaces_and_verifies(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for overwrite in (False, True):
        ftw.convert(source, out, embed="host", overwrite=overwrite)
        assert ftw.verify(out, against=source).is_ok
    assert ftw.convert(source, out, embed="host", resume=True).was_complete
    assert ftw.convert(source, out, embed="host", resume=True, dry_run=True).was_complete
    assert sorted(os.listdir(tmp_path)) == ["out", "src"]


def test_convert_resumes(source: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ftw.convert(source, tmp_path / "out", progress=interrupt)
    foreseen = ftw.convert(source, tmp_path / "out", resume=True, dry_run=True)
    assert ftw.convert(source, tmp_path / "out", resume=True).resumed_nbytes == foreseen.resumed_nbytes > 0
    assert ftw.verify(tmp_path / "out", against=source).is_ok


def test_link_or_file_named_like_the_staging_folder_is_refused(source: Path, tmp_path: Path) -> None:
    staging = tmp_path / STAGING
    staging.symlink_to(source)
    for dry_run in (False, True):
        with pytest.raises(NotADirectoryError, match="ftw-partial"):
            ftw.convert(source, tmp_path / "out", dry_run=dry_run)
    staging.unlink()
    staging.write_text("")
    with pytest.raises(NotADirectoryError, match="ftw-partial"):
        ftw.convert(source, tmp_path / "out")
    assert len(list(source.iterdir())) == 3
