"""Places that hold no checkpoint, or none of a model: what they are, and what to do, in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint
from ftw.cli.main import main
from huggingface_hub import constants

import ftw
from ftw.hub import parse_hub_address

ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "org/base-7b"}


def write_pickle(folder: Path) -> Path:
    torch.save({"weight": torch.ones(2)}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text("{}")
    return folder


def write_legacy_pickle(folder: Path) -> Path:
    torch.save({"weight": torch.ones(2)}, folder / "weights", _use_new_zipfile_serialization=False)
    return folder / "weights"


def write_diffusers(folder: Path) -> Path:
    write_checkpoint(folder / "text_encoder", llama_tensors(), llama_config())
    write_checkpoint(folder / "transformer", {"x": torch.ones(2)})
    (folder / "scheduler").mkdir()
    (folder / "model_index.json").write_text("{}")
    return folder


def write_adapter_pickle(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    torch.save({}, folder / "adapter_model.bin")
    return folder


def write_ftw(folder: Path) -> Path:
    source = write_checkpoint(folder / "src", llama_tensors(), llama_config())
    ftw.convert(source, folder / "out")
    return folder / "out"


def write_shard(folder: Path) -> Path:
    return write_ftw(folder) / "freetoken-00000.ftw"


def write_shards_alone(folder: Path) -> Path:
    (write_ftw(folder) / "freetoken_weight.json").unlink()
    return folder / "out"


def interrupt(folder: Path) -> Path:
    """Leave an unfinished conversion, whose target is returned."""

    def end(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ftw.convert(write_checkpoint(folder / "src", llama_tensors(), llama_config()), folder / "out", progress=end)
    return folder / "out"


def write_file(name: str, content: bytes = b"{}") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder

    return write


NO_CHECKPOINTS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "pickle": (write_pickle, "pickle", "holds PyTorch pickles (pytorch_model.bin), which are never opened; save the"),
    "legacy-pickle": (write_legacy_pickle, "pickle", "is a pickle, which is never opened; save the model as safetens"),
    "pickle-file": (lambda folder: write_pickle(folder) / "pytorch_model.bin", "pickle", "PyTorch pickle, which is"),
    "diffusers": (write_diffusers, "diffusers", "its sub-folders that can be opened: text_encoder, transformer"),
    "adapter": (write_adapter_pickle, "adapter", "of 'org/base-7b', no model; name the base model"),
    "shard": (write_shard, "ftw_shard", "is a shard of an FTW; name its folder, which holds freetoken_weight.json"),
    "shards": (write_shards_alone, "ftw_shard", "holds shards of an FTW without their index"),
    "unfinished": (interrupt, "unfinished", "is an unfinished conversion; --resume with its source and this target"),
    "unfinished-folder": (
        lambda folder: interrupt(folder).with_name(".out.ftw-partial"), "unfinished", "is an unfinished conversion",
    ),
    "empty": (lambda folder: folder, "empty", "is an empty folder"),
    "config": (write_file("config.json"), "no_weights", "holds a config.json and no weights"),
    "config-file": (lambda folder: write_file("config.json")(folder) / "config.json", "no_weights", "name its folder"),
    "sub-folders": (lambda folder: write_diffusers(folder / "a").parent / "a", "diffusers", "text_encoder"),
    "onnx": (write_file("model.onnx"), "other_format", "holds weights of ONNX (model.onnx)"),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_CHECKPOINTS, ids=str)
def test_what_is_no_checkpoint_says_what_it_is(capsys: Any, tmp_path: Path, case: str) -> None:
    write, reason, words = NO_CHECKPOINTS[case]
    (tmp_path / "a").mkdir() if case == "sub-folders" else None
    path = write(tmp_path)
    capsys.readouterr()
    assert main(["inspect", str(path), "--json"]) == 1
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (list(told), told["reason"]) == (["error", "reason", "subject"], reason)
    assert (words in told["error"], told["error"].isprintable()) == (True, True), told["error"]
    assert err == f"ftw: error: {told['error']}\n"
    with pytest.raises(ftw.SourceNotFoundError) as caught:
        ftw.inspect(path)
    assert "--" not in str(caught.value)


def test_folder_of_checkpoints_names_them(tmp_path: Path) -> None:
    for name in ("snapshot-1", "snapshot-2"):
        write_checkpoint(tmp_path / name, llama_tensors(), llama_config())
    with pytest.raises(ftw.SourceNotFoundError, match=r"sub-folders that can be opened: snapshot-1, snapshot-2$"):
        ftw.inspect(tmp_path)


def write_gguf(path: Path, architecture: str, kind: str | None, tensors: dict[str, Any]) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    if kind is not None:
        writer.add_type(kind)
    if kind is None:
        writer.add_token_list(["a", "b"])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_adapter(folder: Path) -> Path:
    """As peft writes one; its own tests are where peft is installed."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    written = write_checkpoint(folder, {"base_model.model.q_proj.lora_A.weight": torch.ones(2, 2)})
    (written / "model.safetensors").rename(folder / "adapter_model.safetensors")
    return folder


def write_not_a_model(folder: Path, kind: str) -> Path:
    if kind == "adapter":
        return write_adapter(folder / "lora")
    if kind == "empty":
        return write_checkpoint(folder / "empty", {})
    tensors = {"mm.weight": np.ones((2, 32), np.float32)} if kind == "mmproj" else {}
    architecture = "clip" if kind == "mmproj" else "llama"
    return write_gguf(folder / "file.gguf", architecture, kind if kind == "mmproj" else None, tensors)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("adapter", "it is an adapter (LoRA or the like) of 'org/base-7b', no model"),
     ("mmproj", "it is a projector of images or sound"), ("vocab", "it is a vocabulary alone"),
     ("empty", "it holds no tensor")],
    ids=["adapter", "mmproj", "vocab", "empty"],
)  # fmt: skip
def test_what_is_no_model_is_said_first_and_warned_of_when_converted(
    capsys: Any, tmp_path: Path, kind: str, words: str
) -> None:
    path = write_not_a_model(tmp_path, kind)
    assert ftw.inspect(path).to_dict()["not_a_model"]["kind"] == kind
    assert main(["inspect", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: no: {words}")
    assert main(["inspect", str(path), "--check"]) == 3
    capsys.readouterr()
    assert main(["convert", str(path), str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    assert f"an FTW of this is no model: {words}" in err
    assert any(words in warning for warning in json.loads(out)["warnings"])


REPOSITORY = f"{constants.ENDPOINT}/org/name"


@pytest.mark.parametrize(
    ("address", "hub_id"),
    [(REPOSITORY, "org/name"), (f"{REPOSITORY}/", "org/name"), (f"{REPOSITORY}?library=x#top", "org/name"),
     (f"{REPOSITORY}/tree/main", "org/name"), (f"{REPOSITORY}/tree/v1.0/sub", "org/name@v1.0/sub"),
     (f"{REPOSITORY}/blob/main/sub/a.gguf", "org/name/sub/a.gguf"),
     (f"{REPOSITORY}/resolve/main/a.gguf?download=true", "org/name/a.gguf"),
     (f"{REPOSITORY}/tree/refs%2Fpr%2F3", "org/name@refs/pr/3"),
     (f"{REPOSITORY}/discussions/4", "org/name"), (f"{REPOSITORY}/commit/{'0' * 40}", f"org/name@{'0' * 40}"),
     ("https://example.org/org/name", None), (f"{constants.ENDPOINT}/datasets/name", None),
     (f"{REPOSITORY}/blob/main/../../x", None), (f"{constants.ENDPOINT}/org", None), ("org/name", None)],
    ids=lambda text: str(text).removeprefix(f"{constants.ENDPOINT}/")[:30],
)  # fmt: skip
def test_address_of_a_browser_is_a_hub_id(address: str, hub_id: str | None) -> None:
    found = parse_hub_address(address)
    assert (None if found is None else str(found)) == hub_id
