"""What a checkpoint from a stranger may not do with names and links: read elsewhere, write elsewhere, run anything."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw, write_sharded
from ftw.cli.main import main
from gguf_builder import ARCHITECTURE, gguf_bytes
from inspecting import assert_names_file, stored_bytes, tensor_bytes

import ftw
from ftw.conversion import metadata_files
from ftw.errors import CheckpointError
from ftw.files.links import Roots, is_inside
from ftw.host import OpenFolder
from ftw.hub import Place

TENSORS = {"a": torch.arange(3), "b": torch.arange(5)}


def sharded(folder: Path) -> Path:
    return write_sharded(folder, {f"{name}.safetensors": {name: tensor} for name, tensor in TENSORS.items()})


def sided(folder: Path) -> Path:
    write_ftw(folder, {"a": TENSORS["a"]}, side_files=["b.safetensors"])
    return write_checkpoint(folder, {"b": TENSORS["b"]}, file="b.safetensors")


def move_out(path: Path, outside: Path) -> None:
    outside.mkdir()
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


WRITERS = {
    "safetensors": (sharded, "b.safetensors"),
    "ftw": (lambda folder: write_ftw(folder, TENSORS), "freetoken-00000.ftw"),
    "ftw-side-file": (sided, "b.safetensors"),
}


@pytest.mark.parametrize(("write", "name"), WRITERS.values(), ids=WRITERS)
def test_named_file_that_is_a_link_out_of_the_folder_is_refused(
    tmp_path: Path, write: Callable[[Path], Path], name: str
) -> None:
    source = write(tmp_path / "m")
    move_out(source / name, tmp_path / "outside")
    for open_source in (ftw.open_checkpoint, ftw.inspect):
        with pytest.raises(ftw.CheckpointError, match=r"is a link to '.*', a file inside the") as caught:
            open_source(source)
        assert_names_file(caught.value, source / name)
    with pytest.raises(ftw.CheckpointError):
        ftw.convert(source, tmp_path / "out")


@pytest.mark.parametrize(("write", "name"), WRITERS.values(), ids=WRITERS)
def test_named_file_that_is_a_link_within_the_folder_is_read(
    tmp_path: Path, write: Callable[[Path], Path], name: str
) -> None:
    source = write(tmp_path / "m")
    move_out(source / name, source / "sub")
    with ftw.open_checkpoint(source) as checkpoint:
        assert {name: stored_bytes(checkpoint, name) for name in TENSORS} == {
            name: tensor_bytes(tensor) for name, tensor in TENSORS.items()
        }


@pytest.mark.parametrize(("write", "name"), WRITERS.values(), ids=WRITERS)
def test_folder_that_is_itself_a_link_is_read(tmp_path: Path, write: Callable[[Path], Path], name: str) -> None:
    write(tmp_path / "m")
    (tmp_path / "link").symlink_to("m")
    with ftw.open_checkpoint(tmp_path / "link") as checkpoint:
        assert set(checkpoint.tensors) == set(TENSORS)


def hub_cache(root: Path, write: Callable[[Path], Path]) -> Path:
    """Lay a checkpoint out as huggingface_hub does, and return its snapshot."""
    plain, entry = write(root / "plain"), root / "models--org--name"
    snapshot = entry / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (entry / "blobs").mkdir()
    for number, path in enumerate(sorted(plain.iterdir())):
        path.rename(entry / "blobs" / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    return snapshot


@pytest.mark.parametrize(("write", "name"), WRITERS.values(), ids=WRITERS)
def test_links_of_a_hub_cache_are_followed_into_its_own_blobs_alone(
    tmp_path: Path, write: Callable[[Path], Path], name: str
) -> None:
    snapshot = hub_cache(tmp_path, write)
    with ftw.open_checkpoint(snapshot) as checkpoint:
        assert set(checkpoint.tensors) == set(TENSORS)
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    blob = (snapshot / name).resolve()
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(blob.rename(other / blob.name))
    with pytest.raises(ftw.CheckpointError, match="is a link to"):
        ftw.open_checkpoint(snapshot)


def test_file_that_a_user_names_may_be_a_link(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", TENSORS)
    (tmp_path / "mine.safetensors").symlink_to(source / "model.safetensors")
    with ftw.open_checkpoint(tmp_path / "mine.safetensors") as checkpoint:
        assert set(checkpoint.tensors) == set(TENSORS)


NAMES = [
    "/etc/passwd.safetensors", "//x.safetensors", "../x.safetensors", "a/../../x.safetensors", "..\\x.safetensors",
    "C:\\x.safetensors", "x.safetensors\0", "x\0.safetensors", "x\n.safetensors", "\x1b[2J.safetensors",
    "x\u202e.safetensors", "x\u2028.safetensors", "", ".", "..", "/", "x.bin", "x.pt", "x.safetensors/",
    "\ufeff.safetensors", "model.safetensors.index.json", "config.json", ".safetensors/..", "~/x.bin", "nul",
    "\udcff.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_name_in_an_index_that_is_no_file_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    source = sharded(tmp_path)
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": name}}))
    with pytest.raises(ftw.CheckpointError) as caught:
        ftw.open_checkpoint(source)
    assert_names_file(caught.value, index)
    assert "a path of a .safetensors file" in str(caught.value) or "surrogate" in str(caught.value)


@pytest.mark.parametrize("name", [*NAMES, "sub/x.ftw"], ids=ascii)
@pytest.mark.parametrize("key", ["shards", "side_files"])
def test_name_in_an_ftw_that_is_no_file_of_the_folder_is_refused(tmp_path: Path, key: str, name: str) -> None:
    source = write_ftw(tmp_path, TENSORS)
    path = source / "freetoken_weight.json"
    index = json.loads(path.read_text())
    if key == "shards":
        index["shards"][0]["file"] = name
    else:
        index["side_files"] = [name]
    path.write_text(json.dumps(index))
    with pytest.raises(ftw.CheckpointError) as caught:
        ftw.open_checkpoint(source)
    assert str(caught.value).isprintable()


def copy_metadata(files: tuple[Path, ...], source: Roots, target: Path) -> None:
    target.mkdir(exist_ok=True)
    with OpenFolder(target) as folder:
        metadata_files.copy(files, source, folder)


def test_metadata_that_becomes_a_link_is_not_copied(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", TENSORS, llama_config())
    (tmp_path / "secret").write_text("secret")
    with ftw.open_checkpoint(source) as checkpoint:
        files, _ = metadata_files.choose(checkpoint)
    (source / "config.json").unlink()
    (source / "config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ftw.CheckpointError, match="became a link that leads out of the source"):
        copy_metadata(files, Roots(source), tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_metadata_that_becomes_no_file_is_not_copied(tmp_path: Path, make: Callable[[Path], None]) -> None:
    source = write_checkpoint(tmp_path / "m", TENSORS, llama_config())
    with ftw.open_checkpoint(source) as checkpoint:
        files, _ = metadata_files.choose(checkpoint)
    (source / "config.json").unlink()
    make(source / "config.json")
    with pytest.raises(ftw.CheckpointError, match="is not a regular file any more"):
        copy_metadata(files, Roots(source), tmp_path / "out")


def test_metadata_is_not_written_through_a_link(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", TENSORS, llama_config())
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        copy_metadata((Path("config.json"),), Roots(source), tmp_path / "out")
    assert (tmp_path / "victim").read_text() == "mine"


def test_link_is_judged_by_where_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m"
    folder.mkdir(parents=True)
    for name, target in {"in": "file", "out": "../file", "back": "../m/file", "gone": "../nothing"}.items():
        (folder / name).symlink_to(target)
    (folder / "file").write_text("")
    assert [is_inside(folder / name, folder) for name in ("file", "in", "out", "back", "gone")] == [
        True, True, False, True, False,
    ]  # fmt: skip


EVENTS = """
import sys
import ftw, ftw.cli.main
seen = []
def record(event, arguments):
    name = str(arguments[0]) if arguments else ""
    if event == "open" and folder in name:
        seen.append(name.rpartition("/")[2])
    elif event.startswith(("pickle", "marshal", "subprocess", "os.system", "os.exec", "os.posix_spawn", "socket")):
        seen.append(event)
    elif event == "import" and arguments[0] in ("modeling_x", "pickle", "torch"):
        seen.append(event + " " + arguments[0])
folder = sys.argv[1]
ftw.cli.main.main(["inspect", folder])
sys.addaudithook(record)
ftw.inspect(folder)
ftw.cli.main.main(["inspect", folder])
print("SEEN", *sorted(set(seen)))
"""


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch exploded",)


def test_nothing_of_a_checkpoint_is_run_or_unpickled(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", llama_tensors(), llama_config(auto_map={"AutoModel": "modeling_x.Model"}))
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "data.pkl", "adapter_model.bin"):
        (source / name).write_bytes(pickle.dumps(Bomb()))
    for name in ("modeling_x.py", "sitecustomize.py", "conftest.py", "json.py"):
        (source / name).write_text("raise SystemExit('was run')")
    command = [sys.executable, "-c", EVENTS, str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout.splitlines()[-1] == "SEEN config.json model.safetensors"
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("is_single", [False, True], ids=["folder", "file"])
def test_config_that_is_a_link_out_of_the_folder_is_neither_read_nor_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_single: bool
) -> None:
    source = write_checkpoint(tmp_path / "m", llama_tensors(), llama_config())
    move_out(source / "config.json", tmp_path / "outside")
    path = source / "model.safetensors" if is_single else source
    report = ftw.inspect(path)
    assert (report.config.is_present, report.verdict.tied) == (False, None)
    warning = "config.json is a link that leads out of the folder, and is not read"
    assert report.verdict.warnings == (warning,)
    plan = ftw.convert(path, tmp_path / "out").plan
    assert [entry.name for entry in plan.left_out] == ["config.json"]
    assert warning in plan.warnings
    assert plan.tables == report.verdict.tables
    assert not (tmp_path / "out" / "config.json").exists()
    assert main(["inspect", str(path)]) == 0
    assert f"ftw: warning: {warning}" in capsys.readouterr().err


def test_config_that_is_a_link_within_the_folder_is_read(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m", llama_tensors(), llama_config())
    move_out(source / "config.json", source / "sub")
    assert ftw.inspect(source).config.is_present


@pytest.mark.parametrize("recorded", [False, True], ids=["unrecorded", "recorded"])
def test_copy_of_a_ggufs_metadata_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path, recorded: bool) -> None:
    source = write_ftw(tmp_path / "m", llama_tensors())
    content = gguf_bytes(kvs=[ARCHITECTURE])
    copy = source / "source_metadata.gguf"
    copy.write_bytes(content)
    if recorded:
        index = json.loads((source / "freetoken_weight.json").read_text())
        index["ftw"] = {"derived": [{"name": copy.name, "xxh3_64": xxhash.xxh3_64_hexdigest(content)}]}
        (source / "freetoken_weight.json").write_text(json.dumps(index))
    assert ftw.inspect(source).config.architecture == "llama"
    move_out(copy, tmp_path / "outside")
    for function in (ftw.open_checkpoint, ftw.inspect, ftw.verify, lambda path: ftw.convert(path, tmp_path / "out")):
        with pytest.raises(ftw.CheckpointError, match=r"is a link to '.*', a file inside the") as caught:
            function(source)
        assert_names_file(caught.value, copy)
    assert not (tmp_path / "out").exists()


def test_copy_of_a_ggufs_metadata_that_becomes_another_file_is_not_copied(tmp_path: Path) -> None:
    source = write_ftw(tmp_path / "m", llama_tensors())
    copy = source / "source_metadata.gguf"
    copy.write_bytes(gguf_bytes(kvs=[ARCHITECTURE]))
    with ftw.open_checkpoint(source) as checkpoint:
        move_out(copy, tmp_path / "outside")
        copy.unlink()
        (tmp_path / "secret").write_text("secret")
        copy.symlink_to(tmp_path / "secret")
        (file,) = checkpoint.derived_files
        with pytest.raises(ftw.CheckpointError, match="changed while it was being read"):
            b"".join(file.read())


@pytest.mark.parametrize("entry", ["models--org--name", "datasets--org--name", "mine"], ids=str)
def test_folder_called_snapshots_is_a_hub_cache_only_in_an_entry_of_one(tmp_path: Path, entry: str) -> None:
    folder = tmp_path / entry / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    blob = tmp_path / entry / "blobs" / "x"
    blob.parent.mkdir()
    blob.write_text("")
    (folder / "x").symlink_to(blob)
    assert is_inside(folder / "x", folder) is (entry != "mine")
    assert Place(folder).leads_out("x") is (entry == "mine")


COPIED = {
    "../outside": "the path of a file inside",
    "sub/../../outside": "the path of a file inside",
    "/etc/passwd": "the path of a file inside",
    "sub//x": "the path of a file inside",
    "": "the path of a file inside",
    "n" * 256: "the path of a file inside",
    "a\0b": "the path of a file inside",
    "n" * 255: "is missing",
    "sub/secret": "is a link that leads out",
    "link": "is a link that leads out",
    "loop": "the index says that it was copied",
    "/".join(["n" * 255] * 17): "cannot be looked for",
}


@pytest.mark.parametrize(("name", "problem"), COPIED.items(), ids=[ascii(name)[:20] for name in COPIED])
def test_verify_looks_for_copied_files_in_the_folder_alone(tmp_path: Path, name: str, problem: str) -> None:
    source = write_ftw(tmp_path / "m", TENSORS)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("")
    for link, target in {"sub": "../outside", "link": "../outside/secret", "loop": "loop"}.items():
        (source / link).symlink_to(target)
    path = source / "freetoken_weight.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "copied_metadata": [name]}))
    (line,) = ftw.verify(source).problems
    assert problem in line
    assert line.isprintable()


# Files that no index names


def link_out(folder: Path, name: str) -> None:
    """Put a file elsewhere and a link in its place."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    (folder / name).rename(elsewhere / name)
    (folder / name).symlink_to(elsewhere / name)


def test_index_in_a_folder_that_is_a_link_out_is_refused(tmp_path: Path) -> None:
    tensors = llama_tensors()
    folder = write_sharded(tmp_path / "src", {"model-00001-of-00001.safetensors": tensors}, llama_config())
    link_out(folder, "model.safetensors.index.json")
    with pytest.raises(
        CheckpointError, match=r"index\.json: file: is a link that leads out of the folder; --follow-links"
    ):
        ftw.open_checkpoint(folder)


def test_several_weight_files_may_not_be_links_out_and_a_single_one_may(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "src", {"a": torch.ones(3)}, llama_config(), "one.safetensors")
    link_out(folder, "one.safetensors")
    with ftw.open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == {"a"}
    write_checkpoint(folder, {"b": torch.ones(3)}, file="two.safetensors")
    with pytest.raises(CheckpointError, match=r"one\.safetensors: file: is a link to"):
        ftw.open_checkpoint(folder)


def test_config_that_is_a_link_out_does_not_tell_that_a_folder_is_df11(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "src", {"a": torch.ones(3)}, llama_config(dfloat11_config={}))
    write_checkpoint(folder, {"b": torch.ones(3)}, file="module.safetensors")
    with ftw.open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b"}
    link_out(folder, "config.json")
    with ftw.open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == {"a"}
