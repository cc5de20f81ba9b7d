"""What a hostile checkpoint may not make of a few bytes: hours of reading, folders without end, endless lines."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from builders import llama_config, llama_tensors, safetensors_bytes, tensor_entry, write_checkpoint, write_ftw
from ftw.cli.main import main
from gguf_builder import ARCHITECTURE, gguf_bytes

import ftw
from ftw.files.weight_file import WeightFile
from ftw.readers import problems
from ftw.readers.ftw_format import MAX_GGUF_METADATA_NBYTES

COPY, INDEX = "source_metadata.gguf", "freetoken_weight.json"
HEADER = gguf_bytes(kvs=[ARCHITECTURE])


def ftw_of_gguf(folder: Path, copy: bytes = HEADER, **recorded: Any) -> Path:
    """Write an FTW with the copy of a GGUF's metadata, which its index records where that is wanted."""
    write_ftw(folder, llama_tensors())
    (folder / COPY).write_bytes(copy)
    if recorded:
        change_index(folder, derived=[{"name": COPY, **recorded}])
    return folder


def change_index(folder: Path, **own: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "ftw": {**index.get("ftw", {}), **own}}))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each read of a weight file from now on."""
    sizes: list[int] = []
    real = WeightFile.read_into

    def read_into(file: Any, offset: int, view: memoryview) -> None:
        sizes.append(len(view))
        real(file, offset, view)

    monkeypatch.setattr("ftw.files.weight_file.WeightFile.read_into", read_into)
    return sizes


def test_copy_of_the_metadata_that_is_recorded_twice_is_refused_before_it_is_read(tmp_path: Path) -> None:
    source = ftw_of_gguf(tmp_path)
    recorded = {"name": COPY, "bytes": len(HEADER), "xxh3_64": xxhash.xxh3_64_hexdigest(HEADER)}
    change_index(source, derived=[recorded])
    with ftw.open_checkpoint(source) as checkpoint:
        assert checkpoint.config.architecture == "llama"
    change_index(source, derived=[recorded] * 1000)
    with pytest.raises(ftw.CheckpointError, match=r"derived: '.*' occurs 1000 times, names must be"):
        ftw.open_checkpoint(source)


def test_copy_of_the_metadata_of_another_size_is_refused_before_it_is_read(tmp_path: Path, counted: list[int]) -> None:
    source = ftw_of_gguf(tmp_path, bytes=len(HEADER) + 1, xxh3_64=xxhash.xxh3_64_hexdigest(HEADER))
    with pytest.raises(ftw.CheckpointError, match=rf"is {len(HEADER)} bytes long, the index says {len(HEADER) + 1}"):
        ftw.open_checkpoint(source)
    assert counted == []


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "unrecorded"])
def test_copy_of_the_metadata_of_a_terabyte_is_refused_at_once(
    tmp_path: Path, counted: list[int], is_recorded: bool
) -> None:
    source = ftw_of_gguf(tmp_path / "m", **({"xxh3_64": "0" * 16} if is_recorded else {}))
    os.truncate(source / COPY, 1 << 40)
    for function in (ftw.inspect, lambda path: ftw.convert(path, tmp_path / "out", dry_run=True)):
        with pytest.raises(ftw.CheckpointError, match=f"at most {MAX_GGUF_METADATA_NBYTES} are allowed"):
            function(source)
    assert counted == []


@pytest.mark.parametrize("num_pairs", [1, 8], ids=str)
@pytest.mark.parametrize("is_equal", [True, False], ids=["equal", "differ-at-the-end"])
def test_tables_and_heads_are_read_twice_at_most_however_many_pairs_they_make(
    tmp_path: Path, counted: list[int], num_pairs: int, is_equal: bool
) -> None:
    nbytes = 1 << 20
    tensors = {}
    for number in range(num_pairs):
        for place, name in enumerate(("embed_tokens", "lm_head")):
            tensor = torch.zeros(1024, nbytes // 1024, dtype=torch.uint8)
            tensor[-1, -1] = 0 if is_equal else 2 * number + place
            tensors[f"a{number}.{name}.weight"] = tensor
    write_checkpoint(tmp_path, tensors, llama_config(tie_word_embeddings=True))
    with ftw.open_checkpoint(tmp_path) as checkpoint:
        counted.clear()
        verdict = ftw.inspect(checkpoint).verdict
    reasons = {table.reason for table in verdict.tables}
    assert reasons == ({"tied"} if is_equal else {"tie_conflict"})
    assert sum(counted) <= 2 * num_pairs * (2 * nbytes + (64 << 10))
    assert num_pairs > 1 or sum(counted) <= 2 * (nbytes + (64 << 10))


@pytest.mark.timeout(300)  # it took hours
@pytest.mark.parametrize("is_equal", [True, False], ids=["equal", "differ-at-the-end"])
def test_tensors_larger_than_any_models_are_compared_by_samples(
    tmp_path: Path, counted: list[int], is_equal: bool
) -> None:
    nbytes = 1 << 40
    names = ("model.embed_tokens.weight", "lm_head.weight")
    entries = {
        name: tensor_entry("U8", [1 << 20, 1 << 20], number * nbytes, (number + 1) * nbytes)
        for number, name in enumerate(names)
    }
    header = safetensors_bytes(entries)
    path = tmp_path / "model.safetensors"
    path.write_bytes(header)
    os.truncate(path, len(header) + 2 * nbytes)  # a hole
    if not is_equal:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
    (tmp_path / "config.json").write_text(json.dumps(llama_config(tie_word_embeddings=True)))
    verdict = ftw.inspect(tmp_path).verdict
    assert {table.reason for table in verdict.tables} == ({"tied"} if is_equal else {"tie_conflict"})
    assert sum(counted) <= 2 * 17 * (64 << 10) + (64 << 10)


def test_folders_without_end_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "m", llama_tensors(), llama_config())
    deep = source / "/".join("a" * 64)
    deep.mkdir(parents=True)
    (deep / "x.txt").write_text("")
    assert str(Path(*"a" * 64, "x.txt")) in ftw.convert(source, tmp_path / "out", dry_run=True).plan.metadata_names
    (deep / "/".join("a" * 200)).mkdir(parents=True)  # more of them pytest could not remove
    assert main(["convert", "--dry-run", str(source), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.endswith("/a: folder: lies 65 folders deep, at most 64 are allowed\n")


def test_plan_looks_a_table_up_without_comparing_it_with_every_other(tmp_path: Path) -> None:
    tensors = {f"m{number}.embed_tokens_per_layer.weight": torch.zeros(2, 4) for number in range(50)}
    source = write_checkpoint(tmp_path / "m", tensors | llama_tensors(), llama_config())
    plan = ftw.convert(source, tmp_path / "out", embed="auto", dry_run=True).plan
    assert isinstance(plan.host_tables, frozenset)
    assert [table for table in plan.tables if plan.is_on_host(table)] == list(plan.placement.host_tables)


def test_problems_of_a_verification_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "MAX_LINES", 3)
    source = write_ftw(tmp_path, {f"t{number}": torch.zeros(1024) for number in range(5)})
    (source / "freetoken-00000.ftw").unlink()
    result = ftw.verify(source)
    assert [line.split(": ")[1:3] for line in result.problems[:2]] == [["file", "is missing"], ["t0", "cannot be read"]]
    assert result.problems[3:] == (f"{source}: problems: 3 more are not listed",)


def test_problem_is_one_printable_line(tmp_path: Path) -> None:
    name = "\x9b\nftw: error: fake\x1b[31m" + "q" * 100_000
    source = write_ftw(tmp_path, {"a": torch.zeros(4)})
    index = json.loads((source / INDEX).read_text())
    (source / INDEX).write_text(json.dumps({**index, "copied_metadata": [name, f"sub/{name[:200]}"]}))
    result = ftw.verify(source)
    assert len(result.problems) == 2
    assert all(line.isprintable() and len(line) < 25_000 for line in result.problems)
