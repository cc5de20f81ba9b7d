"""Verification: one changed byte, wherever it is, is found and named."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw
from ftw.cli.main import main

import ftw
from ftw.errors import CheckpointError, SourceNotFoundError

INDEX = "freetoken_weight.json"
BIG = (16 << 20) + 100_000  # more than one chunk


@pytest.fixture
def source(tmp_path) -> Path:
    tensors = {**llama_tensors(), "big": torch.arange(BIG, dtype=torch.int32).to(torch.uint8)}
    return write_checkpoint(tmp_path / "src", tensors, llama_config())


@pytest.fixture
def converted(source, tmp_path) -> Path:
    ftw.convert(source, tmp_path / "out", embed="host", shard_limit=8 << 20)
    return tmp_path / "out"


def flip(folder: Path, place: int) -> None:
    """Change one byte of a region, counted over its shards."""
    for shard in json.loads((folder / INDEX).read_text())["shards"]:
        if place < shard["nbytes"]:
            with (folder / shard["file"]).open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1]))
            return
        place -= shard["nbytes"]
    raise AssertionError("outside of the region")


def entry_of(folder: Path, name: str) -> dict:
    return next(entry for entry in json.loads((folder / INDEX).read_text())["tensors"] if entry["name"] == name)


def test_verify_finds_nothing_wrong_with_a_conversion(converted, source):
    result = ftw.verify(converted, against=source)
    assert result.to_dict() == {
        "path": str(converted),
        "against": str(source),
        "num_tensors": 5,
        "num_checksums": 5,
        "num_sha256": 0,
        "num_compared": 5,
        "nbytes": BIG + 2 * 1024 + 128 + 16,
        "content_checked": True,
        "ok": True,
        "problems": [],
    }


@pytest.mark.parametrize("offset", [0, 1, 4095, (8 << 20) - 1, 8 << 20, 16 << 20, BIG - 1], ids=str)
def test_verify_names_the_tensor_of_a_changed_byte(converted, source, offset):
    flip(converted, entry_of(converted, "big")["global_off"] + offset)
    result = ftw.verify(converted)
    assert not result.is_ok
    assert len(result.problems) == 1
    problem = result.problems[0]
    recorded = entry_of(converted, "big")["xxh3_64"]
    assert problem.startswith(f"{converted}: big: checksum is ")
    assert problem.endswith(f", the index says {recorded}")
    found = ftw.verify(converted, against=source).problems
    assert found == (f"{converted}: big: differs from the source at byte {offset}", problem)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"], ids=str)
def test_verify_names_each_small_tensor_with_a_changed_byte(converted, name):
    flip(converted, entry_of(converted, name)["global_off"])
    assert [problem.split(": ")[1] for problem in ftw.verify(converted).problems] == [name]


@pytest.mark.parametrize("offset", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", ["model.norm.weight", "big"], ids=str)
def test_verify_finds_padding_that_is_not_zero(converted, name, offset):
    entry = entry_of(converted, name)
    end = entry["global_off"] + entry["nbytes"]
    flip(converted, end if offset == 0 else -(-end // 4096) * 4096 - 1)
    assert ftw.verify(converted).problems == (f"{converted}: {name}: padding after the tensor is not zero",)


def test_verify_reports_every_problem_at_once(converted):
    for name in ("big", "lm_head.weight"):
        flip(converted, entry_of(converted, name)["global_off"])
    flip(converted, entry_of(converted, "model.norm.weight")["global_off"] + 4000)
    assert sorted(problem.split(": ")[1] for problem in ftw.verify(converted).problems) == [
        "big",
        "lm_head.weight",
        "model.norm.weight",
    ]


def test_verify_of_an_index_with_another_checksum(converted):
    index = json.loads((converted / INDEX).read_text())
    index["tensors"][0]["xxh3_64"] = "0" * 16
    (converted / INDEX).write_text(json.dumps(index))
    assert [problem[-16:] for problem in ftw.verify(converted).problems] == ["0" * 16]


def variant(folder: Path, **changes) -> Path:
    tensors = {**llama_tensors(), **changes}
    return write_checkpoint(folder, {name: value for name, value in tensors.items() if value is not None})


@pytest.mark.parametrize(
    ("change", "problem", "compared"),
    [
        ({"new": torch.ones(2)}, "new: is missing, the source holds it", 4),
        ({"lm_head.weight": None}, "lm_head.weight: is not in the source", 3),
        (
            {"model.norm.weight": torch.ones(4, dtype=torch.bfloat16)},
            "model.norm.weight: is BF16 [8], the source has BF16 [4]",
            3,
        ),
        (
            {"model.norm.weight": llama_tensors()["model.norm.weight"].view(torch.float16)},
            "model.norm.weight: is BF16 [8], the source has F16 [8]",
            3,
        ),
        (
            {"model.norm.weight": llama_tensors()["model.norm.weight"].reshape(2, 4)},
            "model.norm.weight: is BF16 [8], the source has BF16 [2, 4]",
            3,
        ),
    ],
    ids=["missing", "extra", "length", "dtype", "shape"],
)
def test_verify_against_another_source_names_the_difference(tmp_path, change, problem, compared):
    variant(tmp_path / "src")
    ftw.convert(tmp_path / "src", tmp_path / "out")
    result = ftw.verify(tmp_path / "out", against=variant(tmp_path / "other", **change))
    assert result.problems == (f"{tmp_path / 'out'}: {problem}",)
    assert result.num_compared == compared


def test_verify_against_a_source_with_other_values_names_the_first_byte(tmp_path):
    variant(tmp_path / "src")
    ftw.convert(tmp_path / "src", tmp_path / "out")
    other = llama_tensors()["lm_head.weight"].clone().view(torch.uint8)
    other[3, 5] ^= 255
    other[9, 0] ^= 1
    result = ftw.verify(
        tmp_path / "out", against=variant(tmp_path / "other", **{"lm_head.weight": other.view(torch.bfloat16)})
    )
    assert result.problems == (f"{tmp_path / 'out'}: lm_head.weight: differs from the source at byte {3 * 16 + 5}",)


def test_verify_of_another_writers_ftw_counts_no_checksums(tmp_path):
    folder = write_ftw(tmp_path / "out", {**llama_tensors(), "empty": torch.empty(0, 3)})
    result = ftw.verify(folder)
    assert (result.is_ok, result.num_tensors, result.num_checksums, result.num_compared) == (True, 5, 0, 0)
    flip(folder, 1024)
    assert len(ftw.verify(folder).problems) == 1


def test_verify_reads_a_checkpoint_of_another_format(source):
    result = ftw.verify(source)
    assert (result.is_ok, result.num_tensors, result.num_checksums) == (True, 5, 0)
    assert ftw.verify(source, against=source / "model.safetensors").num_compared == 5


def test_verify_includes_side_files(tmp_path):
    folder = write_ftw(tmp_path / "out", {"a": torch.ones(5)}, side_files=["ple.safetensors"])
    write_checkpoint(folder, {"ple": torch.arange(10.0)}, file="ple.safetensors")
    result = ftw.verify(folder, against=folder / "ple.safetensors")
    assert result.num_tensors == 2
    assert result.problems == (f"{folder}: a: is not in the source",)


def test_verify_progress_reaches_the_total(converted):
    calls: list[tuple[int, int]] = []
    result = ftw.verify(converted, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (result.nbytes, result.nbytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert {total for _, total in calls} == {result.nbytes}


@pytest.mark.parametrize("which", ["path", "against"], ids=str)
def test_verify_raises_where_there_is_nothing(source, tmp_path, which):
    paths = {"path": source, "against": source, which: tmp_path / "absent"}
    with pytest.raises(SourceNotFoundError, match="absent"):
        ftw.verify(paths["path"], against=paths["against"])


# Shards that are broken as a whole, files that are gone, bytes that nobody owns


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_verify_names_every_tensor_of_broken_shards_and_checks_the_others(tmp_path, capsys, as_json):
    tensors = {f"t{number}": torch.full((8192,), number + 1, dtype=torch.uint8) for number in range(6)}
    source = write_checkpoint(tmp_path / "src", tensors, llama_config())
    out = tmp_path / "out"
    ftw.convert(source, out, shard_limit=8192)
    (out / "freetoken-00001.ftw").unlink()
    (out / "freetoken-00003.ftw").write_bytes(bytes(4096))
    with (out / "freetoken-00004.ftw").open("ab") as file:
        file.write(b"more")
    flip(out, 5 * 8192 + 7)  # of the last shard, by the index
    result = ftw.verify(out, against=source)
    subjects = [problem.removeprefix(f"{out}").split(":")[:2] for problem in result.problems]
    assert [line for line in result.problems if "freetoken-00001.ftw: file: is missing" in line]
    assert f"{out}/freetoken-00003.ftw: file: is 4096 bytes long, the index says 8192" in result.problems
    assert f"{out}/freetoken-00004.ftw: file: is 8196 bytes long, the index says 8192" in result.problems
    broken = {subject.strip() for place, subject in subjects if not place}
    assert broken == {"t1", "t3", "t5"}
    assert main(["verify", str(out), *["--json"] * as_json]) == 1
    found, err = capsys.readouterr()
    assert err.count("\n") >= 6
    if as_json:
        assert not json.loads(found)["ok"]


def test_verify_misses_files_that_were_copied(converted, source):
    (converted / "config.json").unlink()
    assert f"{converted}: config.json: is missing, the index says that it was copied" in ftw.verify(converted).problems


def test_verify_finds_bytes_that_no_tensor_owns(converted):
    index = json.loads((converted / INDEX).read_text())
    gone = index["tensors"].pop(1)
    (converted / INDEX).write_text(json.dumps(index))
    end = gone["global_off"] + -(-gone["nbytes"] // 4096) * 4096
    expected = f"{converted}: region: bytes {gone['global_off']} to {end} belong to no tensor"
    assert expected in ftw.verify(converted).problems


def test_verify_of_an_index_that_is_broken_itself_raises(converted):
    (converted / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match=r"freetoken_weight\.json"):
        ftw.verify(converted)


# SHA-256

# The secret that xxh3 mixes into the first 8 bytes of the stripes 0 and 1 of a block of 1024: where a lane's low half
# equals it, the product is 0, and the high halves of the two stripes count by their sum alone.
FORGED = {0: (0x396CFEB8, 1), 64: (0x2C81017C, 2)}


def forged(*, swapped: bool) -> torch.Tensor:
    """Return one of two tensors of different bytes and the same xxh3."""
    tensor = torch.zeros(4096, dtype=torch.uint8)
    for place, (low, high) in FORGED.items():
        value = (3 - high if swapped else high) << 32 | low
        tensor[place : place + 8] = torch.tensor(list(value.to_bytes(8, "little")), dtype=torch.uint8)
    return tensor


@pytest.fixture
def trusted(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "trusted", {"a": forged(swapped=False)}, llama_config())


def put_forged_bytes(folder: Path) -> None:
    (folder / "freetoken-00000.ftw").write_bytes(forged(swapped=True).numpy().tobytes())


def test_verify_finds_bytes_that_were_made_to_fit_the_checksum_by_their_sha256(trusted, tmp_path, capsys):
    ftw.convert(trusted, tmp_path / "plain")
    ftw.convert(trusted, tmp_path / "out", sha256=True)
    for folder in (tmp_path / "plain", tmp_path / "out"):
        put_forged_bytes(folder)
    assert ftw.verify(tmp_path / "plain").is_ok  # which is what a checksum of this kind is worth
    result = ftw.verify(tmp_path / "out")
    recorded = entry_of(tmp_path / "out", "a")["sha256"]
    found = hashlib.sha256(forged(swapped=True).numpy().tobytes()).hexdigest()
    assert result.problems == (f"{tmp_path / 'out'}: a: SHA-256 is {found}, the index says {recorded}",)
    assert (result.num_checksums, result.num_sha256) == (1, 1)
    assert main(["verify", str(tmp_path / "out"), "--progress", "none"]) == 1
    assert "SHA-256 is" in capsys.readouterr().err


def test_verify_tells_how_many_sha256s_there_are(source, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path / "out"), "--sha256"]) == 0
    assert main(["verify", str(tmp_path / "out"), "--against", str(source)]) == 0
    assert ", 5 checksums, 5 SHA-256, 5 equal to those of" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_sha256"] == 5


def test_convert_records_the_sha256_of_each_tensor_only_where_asked(source, converted, tmp_path):
    ftw.convert(source, tmp_path / "more", embed="host", shard_limit=8 << 20, sha256=True)
    plain, more = (json.loads((folder / INDEX).read_text()) for folder in (converted, tmp_path / "more"))
    with ftw.open_checkpoint(source) as checkpoint:
        for entry in more["tensors"]:
            content = b"".join(bytes(chunk) for chunk in checkpoint.iter_chunks(entry["name"]))
            assert entry.pop("sha256") == hashlib.sha256(content).hexdigest()
    assert more == plain
    with ftw.open_checkpoint(tmp_path / "more") as checkpoint:
        assert {len(tensor.sha256 or "") for tensor in checkpoint.tensors.values()} == {64}


def test_sha256s_of_a_source_are_checked_and_kept(source, tmp_path):
    ftw.convert(source, tmp_path / "one", sha256=True)
    ftw.convert(tmp_path / "one", tmp_path / "two", shard_limit=8 << 20)
    wanted = {entry["name"]: entry["sha256"] for entry in json.loads((tmp_path / "one" / INDEX).read_text())["tensors"]}
    found = {entry["name"]: entry["sha256"] for entry in json.loads((tmp_path / "two" / INDEX).read_text())["tensors"]}
    assert wanted == found
    assert len(wanted) == 5


def test_source_whose_bytes_were_made_to_fit_the_checksum_gets_no_new_sha256(trusted, tmp_path):
    ftw.convert(trusted, tmp_path / "one", sha256=True)
    put_forged_bytes(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"one: a: SHA-256 of what was read is [0-9a-f]{64}, its index says"):
        ftw.convert(tmp_path / "one", tmp_path / "two")
    assert not (tmp_path / "two").exists()
