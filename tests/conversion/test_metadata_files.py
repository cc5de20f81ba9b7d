"""Which files go along with the weights, and which are left out."""

import json
import os
from pathlib import Path

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw, write_sharded
from gguf_builder import ARCHITECTURE, gguf_bytes, kv

import ftw

WEIGHTS = [
    "pytorch_model.bin", "model.pth", "model.pt", "model.ckpt", "model.onnx", "model.onnx_data", "tf_model.h5",
    "flax_model.msgpack", "model-q4.gguf", "model.ggml", "rust_model.ot", "weights.npz", "weights.npy", "data.pkl",
    "model.tflite", "model.llamafile", "model.nemo", "model.keras", "rank0.engine", "__0_0.distcp", "MODEL.BIN",
    "pytorch_model.bin.index.json", "consolidated.safetensors", "adapter_model.safetensors",
]  # fmt: skip
KEPT = [
    "README.md", "tokenizer.json", "vocab.txt", "merges.txt", "modeling_custom.py", "chat_template.jinja", "LICENSE",
    "img/plot.png", "original/params.json", "a/b/c/deep.txt", ".gitattributes", "with space.txt", "größe.json",
    "[red]x.json", "-dash.json", "binary.binx", "index.json",
]  # fmt: skip


def model(folder: Path) -> Path:
    return write_checkpoint(folder, llama_tensors(), llama_config())


def add(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")


def copied(target: Path) -> list[str]:
    files = (path for path in target.rglob("*") if path.is_file())
    return sorted(path.relative_to(target).as_posix() for path in files if path.suffix != ".ftw")


def test_metadata_copies_nested_files_byte_by_byte(tmp_path):
    source = model(tmp_path / "src")
    add(source, *KEPT)
    result = ftw.convert(source, tmp_path / "out")
    assert copied(tmp_path / "out") == sorted([*KEPT, "config.json", "freetoken_weight.json"])
    for name in [*KEPT, "config.json"]:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert sorted(result.to_dict()["metadata_files"]) == sorted([*KEPT, "config.json"])
    assert result.plan.left_out == ()


def reasons(result: ftw.ConversionResult) -> dict[str, str]:
    """Return why each file was left out."""
    assert {entry.kind for entry in result.plan.left_out} <= {"file"}
    return {entry.name: entry.reason for entry in result.plan.left_out}


@pytest.mark.parametrize("folder", ["", "onnx/"], ids=["top", "nested"])
@pytest.mark.parametrize("name", WEIGHTS, ids=str)
def test_metadata_leaves_other_weights_out_and_says_so(tmp_path, name, folder):
    source = model(tmp_path / "src")
    add(source, folder + name)
    result = ftw.convert(source, tmp_path / "out")
    assert copied(tmp_path / "out") == ["config.json", "freetoken_weight.json"]
    left_out = reasons(result)
    assert list(left_out) == [folder + name]
    assert "weights" in left_out[folder + name] or "adapter" in left_out[folder + name]


def test_metadata_file_with_the_name_of_a_stale_tensor_is_copied(tmp_path):
    tensors = {name: torch.ones(2) for name in ("config.json", "t")}
    source = write_sharded(tmp_path / "src", {"a.safetensors": tensors, "b.safetensors": {"u": torch.ones(1)}}, {})
    write_checkpoint(source, {"u": torch.ones(1), "config.json": torch.ones(9)}, file="b.safetensors")
    result = ftw.convert(source, tmp_path / "out")
    assert (result.plan.metadata_names, result.plan.warnings) == (["config.json"], ())
    entry = {
        "kind": "tensor",
        "name": "config.json",
        "reason": "a copy in b.safetensors, the index names a.safetensors",
    }
    assert result.to_dict()["left_out"] == ftw.inspect(source).to_dict()["left_out"] == [entry]
    index = json.loads((tmp_path / "out" / "freetoken_weight.json").read_text())
    assert index["ftw"]["left_out"] == [entry]


def test_index_that_does_not_tell_files_from_tensors_is_read(tmp_path):
    """Earlier ones have names and reasons alone."""
    ftw.convert(model(tmp_path / "src"), tmp_path / "out")
    path = tmp_path / "out" / "freetoken_weight.json"
    index = json.loads(path.read_text())
    index["ftw"] |= {"left_out": [{"name": "x.bin", "reason": "weights in another format"}], "num_left_out": 1}
    path.write_text(json.dumps(index))
    assert ftw.verify(path.parent, against=tmp_path / "src").is_ok
    assert ftw.inspect(path.parent).left_out == ftw.convert(path.parent, tmp_path / "new").plan.left_out == ()


def test_metadata_skips_what_version_control_and_tools_leave(tmp_path):
    source = model(tmp_path / "src")
    debris = (".git/config", ".git/objects/ab/cd", ".cache/huggingface/x.metadata", "__pycache__/m.pyc")
    add(source, *debris, ".ipynb_checkpoints/a.ipynb", "sub/.git/HEAD")
    add(source, "model.safetensors.incomplete", "a.lock", ".DS_Store", "b.tmp", "c.part")
    result = ftw.convert(source, tmp_path / "out")
    assert copied(tmp_path / "out") == ["config.json", "freetoken_weight.json"]
    found = reasons(result)
    assert sorted(found) == [".DS_Store", "a.lock", "b.tmp", "c.part", "model.safetensors.incomplete"]
    assert set(found.values()) == {"left by a download or an editor"}


def test_metadata_does_not_follow_links_that_lead_out(tmp_path):
    source = model(tmp_path / "src")
    secret = tmp_path / "secret"
    add(secret, "key.txt", "more/key.txt")
    (source / "file.txt").symlink_to(secret / "key.txt")
    (source / "relative.txt").symlink_to(Path("..") / "secret" / "key.txt")
    (source / "folder").symlink_to(secret)
    (source / "dangling.txt").symlink_to(tmp_path / "nowhere")
    (source / "loop").symlink_to("loop")
    add(source, "real.txt")
    (source / "inside.txt").symlink_to("real.txt")
    result = ftw.convert(source, tmp_path / "out")
    assert copied(tmp_path / "out") == ["config.json", "freetoken_weight.json", "inside.txt", "real.txt"]
    assert not (tmp_path / "out" / "inside.txt").is_symlink()
    assert reasons(result) == {
        "file.txt": "a link that leads out of the source",
        "relative.txt": "a link that leads out of the source",
        "folder": "not a regular file",
        "dangling.txt": "not a regular file",
        "loop": "not a regular file",
    }


def test_metadata_leaves_pipes_and_sockets_out(tmp_path):
    source = model(tmp_path / "src")
    os.mkfifo(source / "pipe.json")
    result = ftw.convert(source, tmp_path / "out")
    assert reasons(result) == {"pipe.json": "not a regular file"}


def hub_entry(root: Path) -> Path:
    """Return a snapshot folder whose files are links into the entry's blobs."""
    entry = root / "models--org--name"
    plain = model(root / "plain")
    add(plain, "tokenizer.json", "sub/extra.txt")
    snapshot = entry / "snapshots" / "0123abcd"
    (entry / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in plain.rglob("*") if path.is_file())):
        link = snapshot / path.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(entry / "blobs" / f"{number:064x}")
        link.symlink_to(os.path.relpath(entry / "blobs" / f"{number:064x}", link.parent))
    return snapshot


@pytest.mark.parametrize("spelling", ["absolute", "relative", "dot", "link"], ids=str)
def test_metadata_follows_the_links_of_a_hub_cache(tmp_path, monkeypatch, spelling):
    snapshot = hub_entry(tmp_path)
    (tmp_path / "link").symlink_to(snapshot)
    monkeypatch.chdir(snapshot if spelling == "dot" else tmp_path)
    names = {"absolute": str(snapshot), "relative": os.path.relpath(snapshot), "dot": ".", "link": "link"}
    result = ftw.convert(names[spelling], tmp_path / "out")
    assert copied(tmp_path / "out") == ["config.json", "freetoken_weight.json", "sub/extra.txt", "tokenizer.json"]
    assert (tmp_path / "out" / "sub" / "extra.txt").read_text() == "content of sub/extra.txt"
    assert result.plan.left_out == ()


def test_metadata_of_a_hub_cache_stays_in_its_entry(tmp_path):
    snapshot = hub_entry(tmp_path)
    add(tmp_path, "models--org--other/blobs/secret")
    (snapshot / "notes.txt").symlink_to(tmp_path / "models--org--other" / "blobs" / "secret")
    result = ftw.convert(snapshot, tmp_path / "out")
    assert reasons(result) == {"notes.txt": "a link that leads out of the source"}


def test_metadata_follows_the_links_of_a_folder_inside_a_hub_snapshot(tmp_path):
    """As a diffusers repository has them: text_encoder/model.safetensors."""
    snapshot = hub_entry(tmp_path)
    part = snapshot / "text_encoder"
    part.mkdir()
    for name in ("model.safetensors", "config.json"):
        (snapshot / name).rename(part / name)
        (part / name).unlink()
    blobs = snapshot.parent.parent / "blobs"
    model(blobs)
    for name in ("model.safetensors", "config.json"):
        (part / name).symlink_to(Path("..", "..", "..", "blobs", name))
    ftw.convert(part, tmp_path / "out")
    assert copied(tmp_path / "out") == ["config.json", "freetoken_weight.json"]


def test_metadata_of_a_single_file_is_its_well_known_neighbours(tmp_path):
    source = model(tmp_path / "downloads")
    add(source, "tokenizer.json", "chat_template.jinja", "taxes.txt", "other/config.json", "modeling_x.py", "x.gguf")
    result = ftw.convert(source / "model.safetensors", tmp_path / "out")
    wanted = ["chat_template.jinja", "config.json", "freetoken_weight.json", "tokenizer.json"]
    assert copied(tmp_path / "out") == wanted
    assert result.plan.left_out == ()


def test_metadata_of_an_ftw_goes_along_when_it_is_converted_again(tmp_path):
    source = model(tmp_path / "src")
    add(source, "tokenizer.json", "sub/extra.txt")
    ftw.convert(source, tmp_path / "one")
    add(tmp_path / "one", "source_metadata.gguf.txt")
    ftw.convert(tmp_path / "one", tmp_path / "two")
    assert copied(tmp_path / "two") == copied(tmp_path / "one")


def test_metadata_keeps_the_gguf_header_of_an_ftw(tmp_path):
    """FreeToken's reader needs it, and its name says that it holds no weights."""
    source = write_ftw(tmp_path / "src", llama_tensors())
    header = gguf_bytes(kvs=[ARCHITECTURE, kv("freetoken.output_weight_present", "bool", True)])
    (source / "source_metadata.gguf").write_bytes(header)
    result = ftw.convert(source, tmp_path / "out")
    assert copied(tmp_path / "out") == ["freetoken_weight.json", "source_metadata.gguf"]
    assert (tmp_path / "out" / "source_metadata.gguf").read_bytes() == header
    assert result.plan.left_out == ()


def test_metadata_does_not_skip_a_folder_that_it_cannot_list(tmp_path, monkeypatch):
    source = model(tmp_path / "src")
    add(source, "locked/tokenizer.json")
    real = os.scandir

    def scandir(path):
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
        if name.endswith("locked"):
            raise PermissionError(13, "Permission denied", name)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="locked"):
        ftw.convert(source, tmp_path / "out", dry_run=True)


def test_metadata_of_a_single_file_does_not_walk_the_folders_beside_it(tmp_path, monkeypatch):
    """They may be a whole home folder."""
    source = model(tmp_path / "home")
    monkeypatch.setattr(os, "walk", None)
    ftw.convert(source / "model.safetensors", tmp_path / "out")
    assert copied(tmp_path / "out") == ["config.json", "freetoken_weight.json"]
