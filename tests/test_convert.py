"""Conversion: what lands in the folder, and which targets are refused. Failures and kills: test_convert_failures."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from builders import (
    llama_config,
    llama_tensors,
    safetensors_bytes,
    tensor_entry,
    write_checkpoint,
    write_ftw,
    write_sharded,
)

import ftw
from ftw.errors import CheckpointError, NotEligibleError, OutputError, SourceNotFoundError

INDEX = "freetoken_weight.json"
TABLE = "model.embed_tokens.weight"
MIXED = {
    "bf16": torch.arange(5000, dtype=torch.float32).to(torch.bfloat16).reshape(50, 100),
    "f8": torch.arange(-60, 60, dtype=torch.float32).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 7),
    "bool": torch.tensor([True, False, True]),
    "i64": torch.arange(600, dtype=torch.int64),
    "block": torch.arange(4096, dtype=torch.int32).to(torch.uint8),
    "näme with spaces [red]": torch.ones(3, dtype=torch.float16),
    "u16": torch.arange(9, dtype=torch.int16).view(torch.uint16),
}


def read_all(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with ftw.open_checkpoint(path) as checkpoint:
        found = {}
        for name, tensor in checkpoint.tensors.items():
            buffer = bytearray(tensor.nbytes)
            checkpoint.read_into(name, buffer)
            found[name] = (tensor.dtype, tensor.shape, bytes(buffer))
        return found


def read_index(folder: Path) -> dict:
    return json.loads((folder / INDEX).read_text())


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def llama(folder: Path, **overrides) -> Path:
    return write_checkpoint(folder, llama_tensors(), llama_config(**overrides))


# what is written


def test_convert_keeps_every_byte_of_a_single_file(tmp_path):
    source = write_checkpoint(tmp_path / "src", MIXED)
    result = ftw.convert(source, tmp_path / "out")
    assert read_all(tmp_path / "out") == read_all(source)
    assert result.to_dict()["num_tensors"] == len(MIXED)
    assert ftw.verify(tmp_path / "out", against=source).is_ok


@pytest.mark.parametrize("shard_limit", [4096, 8192, 3 * 4096, 1 << 30], ids=["4Ki", "8Ki", "12Ki", "1Gi"])
def test_convert_keeps_every_byte_of_a_sharded_checkpoint(tmp_path, shard_limit):
    names = list(MIXED)
    shards = {
        "model-00001-of-00002.safetensors": {name: MIXED[name] for name in names[::2]},
        "model-00002-of-00002.safetensors": {name: MIXED[name] for name in names[1::2]},
    }
    source = write_sharded(tmp_path / "src", shards)
    ftw.convert(source, tmp_path / "out", shard_limit=shard_limit)
    assert read_all(tmp_path / "out") == read_all(source)
    index = read_index(tmp_path / "out")
    assert index["shard_limit"] == shard_limit
    assert all(0 < shard["nbytes"] <= shard_limit for shard in index["shards"])
    assert sum(shard["nbytes"] for shard in index["shards"]) == index["total_bytes"]


def test_convert_reshards_an_ftw_and_keeps_what_it_does_not_know(tmp_path):
    source = write_ftw(tmp_path / "src", MIXED, quant_format="bf16", fingerprint="abc", layer_quant_formats={"0": "x"})
    index = read_index(source)
    index["tensors"][0] |= {"kind": "experts_bank", "name": "gate_up#L00000"}
    index["tensors"][-1] |= {"ggml_type": "Q4_0", "logical_shape": [3, 32]}
    (source / INDEX).write_text(json.dumps(index))
    ftw.convert(source, tmp_path / "one", shard_limit=4096)
    ftw.convert(tmp_path / "one", tmp_path / "two", shard_limit=1 << 20)
    assert read_all(tmp_path / "two") == read_all(tmp_path / "one") == read_all(source)
    found = read_index(tmp_path / "two")
    for key in ("quant_format", "fingerprint", "layer_quant_formats"):
        assert found[key] == index[key]
    by_name = {entry["name"]: entry for entry in found["tensors"]}
    assert by_name["gate_up#L00000"]["kind"] == "experts_bank"
    assert by_name["bf16" if "bf16" in by_name else "f8"]["kind"] == "weight"
    last = by_name[index["tensors"][-1]["name"]]
    assert (last["ggml_type"], last["logical_shape"]) == ("Q4_0", [3, 32])
    assert len(found["shards"]) == 1
    assert len(read_index(tmp_path / "one")["shards"]) > 1


def test_convert_takes_the_tensors_of_side_files_into_the_region(tmp_path):
    source = write_ftw(tmp_path / "src", {"a": torch.ones(5)}, side_files=["ple-table-00000.safetensors"])
    write_checkpoint(source, {"ple": torch.arange(10.0)}, file="ple-table-00000.safetensors")
    ftw.convert(source, tmp_path / "out")
    assert read_all(tmp_path / "out") == read_all(source)
    assert "side_files" not in read_index(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_convert_lays_the_host_table_out_first(tmp_path):
    tensors = {"a.first": torch.ones(4), **llama_tensors()}
    source = write_checkpoint(tmp_path / "src", tensors, llama_config())
    result = ftw.convert(source, tmp_path / "out", embed="host")
    index = read_index(tmp_path / "out")
    table = index["tensors"][0]
    assert (table["name"], table["global_off"]) == (TABLE, 0)
    assert (table["role"], table["placement"]) == ("token_embedding", "host")
    assert all("placement" not in entry for entry in index["tensors"][1:])
    assert index["ftw"]["embed"] == {"placement": "host", "tables": [TABLE]}
    assert result.plan.placement.placement == "host"
    assert read_all(tmp_path / "out") == read_all(source)


def test_convert_drops_the_placement_that_a_source_recorded(tmp_path):
    llama(tmp_path / "src")
    ftw.convert(tmp_path / "src", tmp_path / "host", embed="host")
    ftw.convert(tmp_path / "host", tmp_path / "gpu", embed="gpu")
    index = read_index(tmp_path / "gpu")
    assert all("placement" not in entry for entry in index["tensors"])
    assert index["ftw"]["embed"] == {"placement": "gpu", "tables": []}


def test_convert_writes_the_index_as_the_format_wants(tmp_path):
    source = llama(tmp_path / "Llama-tiny")
    (source / "tokenizer.json").write_text("{}")
    ftw.convert(source, tmp_path / "out", embed="host")
    index = read_index(tmp_path / "out")
    head = {key: index[key] for key in ("format", "version", "align", "shard_limit", "source_model_path")}
    assert head == {
        "format": "freetoken_weight",
        "version": 1,
        "align": 4096,
        "shard_limit": 8 << 30,
        "source_model_path": "Llama-tiny",
    }
    assert index["copied_metadata"] == ["config.json", "tokenizer.json"]
    assert index["ftw"] == {
        "producer": f"ftw {ftw.__version__}",
        "source": {
            "format": "safetensors",
            "files": [{"name": "model.safetensors", "bytes": (source / "model.safetensors").stat().st_size}],
        },
        "embed": {"placement": "host", "tables": [TABLE]},
    }
    assert index["total_bytes"] == os.stat(tmp_path / "out" / "freetoken-00000.ftw").st_size
    for entry in index["tensors"]:
        assert entry["global_off"] % 4096 == 0
        assert entry["kind"] == "weight"
        assert entry["dtype"] == "bfloat16"
        assert len(entry["xxh3_64"]) == 16
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == llama_config()


@pytest.mark.parametrize("spelling", ["absolute", "relative", "dot", "file", "trailing"], ids=str)
def test_convert_index_holds_no_path_of_this_machine(tmp_path, monkeypatch, spelling):
    source = llama(tmp_path / "model")
    monkeypatch.chdir(source if spelling == "dot" else tmp_path)
    given = {"absolute": str(source), "relative": "model", "dot": ".", "trailing": f"{source}/"}
    ftw.convert(given.get(spelling, source / "model.safetensors"), tmp_path / "out")
    text = (tmp_path / "out" / INDEX).read_text()
    assert str(tmp_path) not in text
    assert os.path.expanduser("~") + "/" not in text
    assert read_index(tmp_path / "out")["source_model_path"] == "model"


def test_convert_writes_the_same_bytes_twice(tmp_path):
    source = llama(tmp_path / "src")
    ftw.convert(source, tmp_path / "one", embed="host")
    ftw.convert(source, tmp_path / "two", embed="host")
    assert listing(tmp_path / "one") == listing(tmp_path / "two")


def test_convert_takes_a_checkpoint_without_bytes(tmp_path):
    source = write_checkpoint(tmp_path / "src", {"empty": torch.empty(0, 4)})
    ftw.convert(source, tmp_path / "out")
    assert read_all(tmp_path / "out") == {"empty": ("F32", (0, 4), b"")}
    assert ftw.verify(tmp_path / "out", against=source).is_ok


def test_convert_reports_progress_up_to_all_bytes(tmp_path):
    source = write_checkpoint(tmp_path / "src", {"a": torch.zeros(9 << 20), "b": torch.ones(3)})
    calls: list[tuple[int, int]] = []
    ftw.convert(source, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == ((36 << 20) + 12, (36 << 20) + 12)
    assert len(calls) >= 3
    assert all(0 < after[0] - before[0] <= 16 << 20 for before, after in itertools.pairwise(calls))


# embed, dtypes, arguments


def test_convert_host_is_refused_on_a_tied_checkpoint(tmp_path):
    source = write_checkpoint(tmp_path / "src", llama_tensors(head=False), llama_config(tie_word_embeddings=True))
    with pytest.raises(NotEligibleError, match=r"model\.embed_tokens\.weight: tied"):
        ftw.convert(source, tmp_path / "out", embed="host")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_convert_auto_falls_back_and_says_why(tmp_path):
    source = write_checkpoint(tmp_path / "src", llama_tensors(head=False), llama_config(tie_word_embeddings=True))
    found = ftw.convert(source, tmp_path / "out", embed="auto").to_dict()["embed"]
    assert (found["placement"], found["tables"]) == ("gpu", [])
    assert "tied" in found["reason"]


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"], ids=str)
def test_convert_refuses_a_dtype_that_ftw_has_no_name_for(tmp_path, dtype):
    nbytes = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}[dtype]
    header = {"model.odd": tensor_entry(dtype, [8], 0, nbytes)}
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "model.safetensors").write_bytes(safetensors_bytes(header, bytes(nbytes)))
    with pytest.raises(CheckpointError, match=f"src: model\\.odd: dtype is {dtype}"):
        ftw.convert(tmp_path / "src", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("shard_limit", [0, -4096, 1, 4095, 4097, 10_000], ids=str)
def test_convert_refuses_a_shard_limit_off_the_alignment(tmp_path, shard_limit):
    with pytest.raises(ValueError, match="shard_limit is"):
        ftw.convert(llama(tmp_path / "src"), tmp_path / "out", shard_limit=shard_limit)
    assert not (tmp_path / "out").exists()


def test_convert_refuses_an_unknown_embed(tmp_path):
    with pytest.raises(ValueError, match="embed is 'cpu', allowed are host, gpu, auto"):
        ftw.convert(llama(tmp_path / "src"), tmp_path / "out", embed="cpu")


def test_convert_refuses_an_empty_source_name(tmp_path, monkeypatch):
    monkeypatch.chdir(llama(tmp_path / "src"))
    with pytest.raises(SourceNotFoundError):
        ftw.convert("", tmp_path / "out")


def test_convert_dry_run_writes_nothing(tmp_path):
    source = llama(tmp_path / "src")
    before = listing(tmp_path)
    planned = ftw.convert(source, tmp_path / "deep" / "out", embed="host", dry_run=True)
    assert listing(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    assert ftw.convert(source, tmp_path / "deep" / "out", embed="host").to_dict() == planned.to_dict()


# the target


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
    before, names = listing(tmp_path), sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputError, match=r"none may|is a file|not an FTW|not empty") as caught:
        ftw.convert(source, target, overwrite=overwrite, dry_run=dry_run)
    assert str(caught.value).startswith(f"{os.path.realpath(target)}: target: ")
    assert (listing(tmp_path), sorted(tmp_path.rglob("*"))) == (before, names)


@pytest.mark.parametrize("opened", ["folder", "index"], ids=str)
def test_convert_never_overwrites_its_own_source(tmp_path, opened):
    source = write_ftw(tmp_path / "src", MIXED)
    before = listing(tmp_path)
    with pytest.raises(OutputError):
        ftw.convert(source if opened == "folder" else source / INDEX, source, overwrite=True)
    assert listing(tmp_path) == before


def test_convert_of_a_single_file_may_go_beside_it(tmp_path, monkeypatch):
    llama(tmp_path)
    monkeypatch.chdir(tmp_path)
    ftw.convert("model.safetensors", "out")
    assert ftw.verify("out", against="model.safetensors").is_ok


def test_convert_keeps_an_existing_ftw_without_overwrite(tmp_path):
    source = llama(tmp_path / "src")
    ftw.convert(source, tmp_path / "out")
    before = listing(tmp_path)
    with pytest.raises(OutputError, match="exists and is not empty; --overwrite replaces an FTW folder"):
        ftw.convert(source, tmp_path / "out", embed="host")
    assert listing(tmp_path) == before


def test_convert_overwrite_replaces_the_whole_folder(tmp_path):
    old = write_ftw(tmp_path / "out", MIXED)
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
        write_ftw(disk, MIXED)
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def test_convert_does_not_empty_what_a_link_named_like_its_staging_folder_points_to(tmp_path):
    source = llama(tmp_path / "src")
    precious = write_ftw(tmp_path / "precious", MIXED)
    before = listing(precious)
    (tmp_path / ".out.ftw-partial").symlink_to(precious)
    with pytest.raises(OSError, match="ftw-partial"):
        ftw.convert(source, tmp_path / "out")
    assert listing(precious) == before


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
    index = read_index(tmp_path / "out")
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
