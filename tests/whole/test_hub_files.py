"""Which files of a repository are the model, and which of them are fetched."""

import pytest
from builders import llama_config, llama_tensors, write_checkpoint, write_sharded
from layouts import INDEX, gguf, weights, write_layout

import ftw

SHARD = "model-00001-of-00001.safetensors"


def test_hub_file_is_taken_of_two_copies_and_the_other_is_not_fetched(hub, tmp_path):
    folder = write_sharded(tmp_path / "m", {SHARD: llama_tensors(seed=1)}, llama_config())
    hub.add("org/name", write_checkpoint(folder, llama_tensors()))
    words = f"and not the 1 file of {INDEX}, which vLLM and SGLang take; their bytes were not compared"
    assert [words in warning for warning in ftw.inspect("org/name").verdict.warnings] == [True]
    result = ftw.convert("org/name", tmp_path / "out")
    assert SHARD not in hub.served
    assert [words in warning for warning in result.plan.warnings] == [True]
    assert ftw.verify(tmp_path / "out", against=folder / "model.safetensors").is_ok


@pytest.mark.parametrize("name", ["model.safetensors", "x.safetensors"], ids=["whole", "several"])
def test_hub_layers_beside_the_model_are_fetched(hub, tmp_path, name):
    folder = write_checkpoint(tmp_path / "m", llama_tensors(), llama_config(), name)
    modules = [{"path": ""}, {"path": "2_Dense"}]
    hub.add("org/name", write_layout(folder, {"modules.json": modules, "2_Dense/model.safetensors": weights("w")}))
    assert "2_Dense/model.safetensors holds a layer" in ftw.inspect("org/name").verdict.warnings[0]
    ftw.convert("org/name", tmp_path / "out")
    assert (tmp_path / "out" / "2_Dense" / "model.safetensors").read_bytes() == weights("w")


def test_hub_file_of_an_odd_name_is_known_when_it_is_named(hub, tmp_path):
    hub.add("org/name", write_layout(tmp_path / "m", {"weights.bin": gguf(), "README.md": ""}))
    assert ftw.inspect("org/name/weights.bin").format == "gguf"
    with pytest.raises(ftw.SourceNotFoundError, match="holds PyTorch pickles"):
        ftw.inspect("org/name")


def test_hub_names_that_only_look_like_weights_are_none(hub, tmp_path):
    files = {"model-f16.gguf": gguf(), "X.mmproj.gguf": gguf(), "._model-f16.gguf": b"x", "model-f16 (1).gguf": gguf()}
    hub.add("org/name", write_layout(tmp_path / "m", files))
    report = ftw.inspect("org/name")
    assert sorted(entry.name for entry in report.left_out) == ["X.mmproj.gguf", "model-f16 (1).gguf"]
