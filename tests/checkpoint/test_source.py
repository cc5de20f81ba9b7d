"""Names that users give: paths, and hub ids through huggingface_hub's cache, without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import llama_config, llama_tensors, write_checkpoint
from inspecting import opened_path

import ftw
from ftw.errors import SourceNotFoundError

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """A hub cache that holds org/name, as snapshot_download leaves it."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    entry = cache / "models--org--name"
    plain = write_checkpoint(tmp_path / "plain", llama_tensors(), llama_config())
    for folder in ("blobs", "refs", f"snapshots/{REVISION}"):
        (entry / folder).mkdir(parents=True)
    (entry / "refs" / "main").write_text(REVISION)
    for number, path in enumerate(plain.iterdir()):
        path.rename(entry / "blobs" / f"{number:064x}")
        (entry / "snapshots" / REVISION / path.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    plain.rmdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return cache


def test_source_finds_a_hub_id_in_the_cache(hub_cache):
    assert opened_path("org/name") == hub_cache / "models--org--name" / "snapshots" / REVISION
    report = ftw.inspect("org/name")
    assert (report.source, report.num_tensors) == ("org/name", 4)


@pytest.mark.parametrize(
    "name",
    ["org/name@main", f"org/name@{REVISION}", "org/name/model.safetensors", "org/name@main/model.safetensors"],
    ids=["branch", "commit", "file", "file_of_branch"],
)
def test_source_finds_a_revision_or_a_file_of_a_hub_id_in_the_cache(hub_cache, name):
    inside = "model.safetensors" if name.endswith("model.safetensors") else ""
    snapshot = hub_cache / "models--org--name" / "snapshots" / REVISION
    assert opened_path(name) == opened_path(name, headers_only=True) == snapshot / inside
    report = ftw.inspect(name)
    assert (report.source, report.num_tensors) == (name, 4)


@pytest.mark.parametrize("name", ["org/name@v2", "org/name/absent.gguf"], ids=["revision", "file"])
def test_source_says_what_the_cache_does_not_hold(hub_cache, name):
    with pytest.raises(SourceNotFoundError, match=r"(not|nor) in the local hub cache") as caught:
        opened_path(name)
    assert str(caught.value).startswith(f"{name}: ")
    assert str(caught.value).endswith("the hub cannot be reached: HF_HUB_OFFLINE is set")


def test_source_converts_a_hub_id(hub_cache, tmp_path):
    result = ftw.convert("org/name", tmp_path / "out", embed="host")
    assert [path.name for path in result.plan.metadata_files] == ["config.json"]
    assert result.plan.left_out == ()
    with ftw.open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.metadata["source_model_path"] == "org/name"
    assert ftw.verify(tmp_path / "out", against="org/name").is_ok


def test_source_prefers_a_path_to_a_hub_id(hub_cache, tmp_path):
    write_checkpoint(tmp_path / "org" / "name", llama_tensors(head=False), llama_config())
    assert opened_path("org/name") == Path("org/name")
    assert ftw.inspect("org/name").num_tensors == 3


@pytest.mark.parametrize("name", ["org/absent", "Org/Name.v1-x_2"], ids=str)
def test_source_says_that_a_hub_id_is_not_there(hub_cache, name):
    with pytest.raises(SourceNotFoundError) as caught:
        ftw.inspect(name)
    problem = "is neither a path nor in the local hub cache, and the hub cannot be reached: HF_HUB_OFFLINE is set"
    assert str(caught.value) == f"{name}: hub id: {problem}"


@pytest.mark.parametrize("name", ["org/..", "a--b/c", "-x/y", "x/y.git", "a" * 100 + "/b"], ids=lambda name: name[:8])
def test_source_refuses_what_the_hub_would_not_name_so_on_one_line(hub_cache, name):
    with pytest.raises(SourceNotFoundError) as caught:
        ftw.inspect(name)
    assert str(caught.value).startswith(f"{name}: ")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "name",
    ["absent", "./org/name", "/org/name", "a/b/c", "org/na me", "org/name/", "", "a\nb", "a\x00b", "né\x1b[31m"],
    ids=ascii,
)  # fmt: skip
def test_source_says_that_a_path_is_not_there(hub_cache, name):
    with pytest.raises(SourceNotFoundError, match="path: does not exist, a file, a folder or a hub id is needed") as e:
        opened_path(name)
    assert str(e.value).isprintable()
    assert isinstance(e.value, FileNotFoundError)


def test_source_takes_a_path_object_for_a_path(hub_cache):
    with pytest.raises(SourceNotFoundError, match="path: does not exist"):
        opened_path(Path("org/name"))


def test_source_that_holds_no_checkpoint_is_named(hub_cache, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceNotFoundError, match="empty: checkpoint: is an empty folder; name one with weights"):
        ftw.inspect(tmp_path / "empty")


def test_source_not_found_is_one_line_of_the_command(hub_cache):
    environment = {**os.environ, "HF_HUB_CACHE": str(hub_cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "ftw.cli", "inspect"]
    done = subprocess.run([*command, "org/absent"], env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ftw: error: org/absent: hub id: ")
    assert done.stderr.count("\n") == 1
    done = subprocess.run([*command, "org/name"], env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
