"""Every malformed safetensors checkpoint of `malformed_safetensors` is refused, and what lies beside those cases."""

from pathlib import Path

import pytest
import torch
from builders import llama_tensors, write_checkpoint, write_sharded
from inspecting import assert_names_file
from malformed_safetensors import CONFIGS, GOOD, HEADERS, INDEX, INDEXES, write_index
from safetensors.torch import save

from ftw import CheckpointError, SourceNotFoundError, open_checkpoint


@pytest.mark.parametrize(("content", "problem"), HEADERS.values(), ids=HEADERS)
def test_malformed_file_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    for source in (file, tmp_path):
        with pytest.raises(CheckpointError, match=problem) as caught:
            open_checkpoint(source)
        assert_names_file(caught.value, file)


def test_file_that_the_malformed_ones_differ_from_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(GOOD)
    assert list(open_checkpoint(file).tensors) == ["t"]


@pytest.mark.parametrize(("text", "file", "problem"), INDEXES.values(), ids=INDEXES)
def test_malformed_index_is_refused(tmp_path: Path, text: str, file: str, problem: str) -> None:
    write_index(tmp_path, text)
    for source in (tmp_path / INDEX, tmp_path):
        with pytest.raises(CheckpointError, match=problem) as caught:
            open_checkpoint(source)
        assert_names_file(caught.value, tmp_path / file)


def test_index_that_names_the_wrong_one_of_two_shards_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a.safetensors": {"t": torch.arange(3)}, "b.safetensors": {"u": torch.arange(2)}})
    (tmp_path / INDEX).write_text('{"weight_map":{"t":"b.safetensors","u":"a.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"t: the index places it in 'b\.safetensors', which has no such tensor"):
        open_checkpoint(tmp_path)


def test_unlisted_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for file in "ab":
        write_checkpoint(tmp_path, {file: torch.arange(3), "twice": torch.arange(2)}, file=f"{file}.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map":{"a":"a.safetensors","b":"b.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"twice: lies in a\.safetensors too"):
        open_checkpoint(tmp_path)


def test_index_that_is_a_folder_is_none(tmp_path: Path) -> None:
    (tmp_path / INDEX).mkdir()
    (tmp_path / "model.safetensors").write_bytes(save({"t": torch.arange(3)}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert (list(checkpoint.tensors), checkpoint.warnings) == (["t"], ())


@pytest.mark.parametrize("name", ["nothing", "folder", "note.txt", "a\0b", "a\ud800"], ids=ascii)
def test_path_without_a_checkpoint_is_not_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "note.txt").write_text("no weights")
    with pytest.raises(SourceNotFoundError) as caught:
        open_checkpoint(f"{tmp_path}/{name}")
    assert str(caught.value).isprintable()
    assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize(("text", "problem"), CONFIGS.values(), ids=CONFIGS)
def test_malformed_config_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    write_checkpoint(tmp_path, llama_tensors())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_checkpoint(tmp_path)
    assert_names_file(caught.value, tmp_path / "config.json")


def test_missing_config_is_allowed(tmp_path: Path) -> None:
    with open_checkpoint(write_checkpoint(tmp_path, llama_tensors())) as checkpoint:
        assert not checkpoint.config.is_present
