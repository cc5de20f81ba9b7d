"""Conversion: what lands in the folder, and which targets are refused. Failures and kills: test_convert_failures."""

import errno
import itertools
import json
import os
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
from folders import read_index, tree
from safetensors.torch import save_file

import ftw
from ftw.conversion import plan as conversion_plan
from ftw.conversion.writing import writer
from ftw.errors import CheckpointError, NotEligibleError, SourceNotFoundError

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


def llama(folder: Path, **overrides) -> Path:
    return write_checkpoint(folder, llama_tensors(), llama_config(**overrides))


# what is written


@pytest.mark.oracle("safetensors", "0.7")
def test_convert_keeps_every_byte_of_a_single_file(tmp_path):
    source = write_checkpoint(tmp_path / "src", MIXED)
    result = ftw.convert(source, tmp_path / "out")
    assert read_all(tmp_path / "out") == read_all(source)
    assert result.to_dict()["num_tensors"] == len(MIXED)
    assert ftw.verify(tmp_path / "out", against=source).is_ok


@pytest.mark.oracle("safetensors", "0.7")
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
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


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
    assert len(calls) >= 2
    assert all(0 < after[0] - before[0] <= 32 << 20 for before, after in itertools.pairwise(calls))


# embed, dtypes, arguments


def test_convert_host_is_refused_on_a_tied_checkpoint(tmp_path):
    source = write_checkpoint(tmp_path / "src", llama_tensors(head=False), llama_config(tie_word_embeddings=True))
    with pytest.raises(NotEligibleError, match=r"model\.embed_tokens\.weight: refused"):
        ftw.convert(source, tmp_path / "out", embed="host")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_convert_auto_falls_back_and_says_why(tmp_path):
    source = write_checkpoint(tmp_path / "src", llama_tensors(head=False), llama_config(tie_word_embeddings=True))
    found = ftw.convert(source, tmp_path / "out", embed="auto").to_dict()["embed"]
    assert (found["placement"], found["tables"]) == ("gpu", [])
    assert "tied" in found["reason"]


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"], ids=str)
def test_convert_refuses_a_dtype_that_ftw_has_no_name_for(tmp_path, dtype):
    nbytes = 6
    header = {"model.odd": tensor_entry(dtype, [8], 0, nbytes)}
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "model.safetensors").write_bytes(safetensors_bytes(header, bytes(nbytes)))
    with pytest.raises(CheckpointError, match=f"src: model\\.odd: dtype is {dtype}"):
        ftw.convert(tmp_path / "src", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def write_narrow(folder: Path, shape: list[int], nbytes: int) -> bytes:
    """Write a model with a tensor of F4 elements, and return its bytes."""
    folder.mkdir()
    data = bytes(range(nbytes))
    (folder / "model.safetensors").write_bytes(safetensors_bytes({"odd": tensor_entry("F4", shape, 0, nbytes)}, data))
    return data


def test_convert_writes_two_narrow_elements_as_one_of_torchs(tmp_path):
    data = write_narrow(tmp_path / "src", [3, 8], 12)
    ftw.convert(tmp_path / "src", tmp_path / "out")
    [entry] = json.loads((tmp_path / "out" / "freetoken_weight.json").read_text())["tensors"]
    assert (entry["dtype"], entry["shape"], entry["nbytes"]) == ("float4_e2m1fn_x2", [3, 4], 12)
    with ftw.open_checkpoint(tmp_path / "out") as made:
        assert (made.tensors["odd"].dtype, made.tensors["odd"].shape) == ("F4", (3, 8))
        made.read_into("odd", found := bytearray(12))
        assert found == data
    assert ftw.verify(tmp_path / "out", against=tmp_path / "src").is_ok


def test_convert_refuses_rows_that_end_within_an_element_of_torchs(tmp_path):
    write_narrow(tmp_path / "src", [8, 3], 12)
    with pytest.raises(CheckpointError, match=r"odd: is F4 \[8, 3\], rows of a multiple of 2 elements are needed"):
        ftw.convert(tmp_path / "src", tmp_path / "out")


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
    before = tree(tmp_path)
    planned = ftw.convert(source, tmp_path / "deep" / "out", embed="host", dry_run=True)
    assert tree(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    result = ftw.convert(source, tmp_path / "deep" / "out", embed="host").to_dict()
    assert result == planned.to_dict() | {"dry_run": False, "free_bytes": result["free_bytes"]}


def test_convert_refuses_more_tensors_than_an_index_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion_plan, "MAX_NBYTES", 500)
    with pytest.raises(CheckpointError, match=r"4 of them would take an index of .* bytes, at most 500 are allowed"):
        ftw.convert(llama(tmp_path / "src"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_convert_leaves_out_folders_with_the_names_of_its_own_files(tmp_path):
    source = llama(tmp_path / "src")
    for name in ("freetoken-00000.ftw", "freetoken_weight.json.tmp"):
        (source / name).mkdir()
        (source / name / "notes.txt").write_text("x")
    result = ftw.convert(source, tmp_path / "out")
    reasons = {entry.name: entry.reason for entry in result.plan.left_out}
    assert reasons["freetoken-00000.ftw/notes.txt"] == "a name that the FTW itself uses"
    assert ftw.verify(tmp_path / "out", against=source).is_ok


def test_convert_names_the_index_that_does_not_fit(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
        yield b""

    with monkeypatch.context() as patch:
        patch.setattr(writer, "iter_index", refuse)
        with pytest.raises(OSError, match=r"freetoken_weight\.json"):
            ftw.convert(llama(tmp_path / "src"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.ftw-partial", "src"]
    assert ftw.convert(tmp_path / "src", tmp_path / "out", resume=True).resumed_nbytes


def test_convert_of_side_files_warns_and_drops_what_is_no_longer_so(tmp_path):
    source = write_ftw(tmp_path / "src", {TABLE: torch.ones(4, 8)}, side_files=["ple.safetensors"], counts={})
    save_file({"ple.weight": torch.ones(9, 2)}, source / "ple.safetensors")
    result = ftw.convert(source, tmp_path / "out")
    assert any("side files" in warning for warning in result.plan.warnings)
    assert not {"counts", "side_files"} & set(json.loads((tmp_path / "out" / INDEX).read_text()))
    assert ftw.verify(tmp_path / "out", against=source).is_ok
    assert not ftw.convert(tmp_path / "out", tmp_path / "again").plan.warnings


def test_convert_of_a_damaged_ftw_does_not_give_it_new_checksums(tmp_path):
    source = llama(tmp_path / "src")
    ftw.convert(source, tmp_path / "one")
    shard = tmp_path / "one" / "freetoken-00000.ftw"
    data = bytearray(shard.read_bytes())
    data[3] ^= 1
    shard.write_bytes(data)
    damaged = json.loads((tmp_path / "one" / INDEX).read_text())["tensors"][0]["name"]
    with pytest.raises(CheckpointError, match=f"one: {damaged}: checksum of what was read is .*, its index says"):
        ftw.convert(tmp_path / "one", tmp_path / "two")
    assert not (tmp_path / "two").exists()
