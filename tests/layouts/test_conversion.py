"""`ftw convert --layout freetoken` as a whole: refusals, dry runs, kills, resuming, verifying, and what comes after."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from amounts import amount
from arrangements import change
from folders import read_index, state, tree
from freetoken_sources import write_source, write_spec
from ftw.cli.main import main
from gguf_builder import entry, gguf_bytes
from places import SUPPORT

import ftw

INDEX = "freetoken_weight.json"
LAYOUT = ["--layout", "freetoken"]


def convert(source: Path, target: Path, **options: object) -> ftw.ConversionResult:
    return ftw.convert(source, target, **{"layout": "freetoken", **options})  # type: ignore[arg-type]


def source_of(name: str, folder: Path) -> Path:
    return write_source(name, folder / name)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 1) -> str:
    """Return the one line that a command ends with."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == status
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    told = json.loads(out)["error"] if "--json" in arguments else ""
    assert (out == "") if not told else (err == f"ftw: error: {told}\n")
    return err


# Kills


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "trials", "killed", "resumed"),
    [
        ("qwen3_5_moe_fp8", *(amount(part, whole) for part, whole in ((8, 20), (16, 50), (4, 10)))),
        ("glm4_moe", 3, 3, 1),
        ("qwen4_exp", 4, 6, 2),
    ],
    ids=["casts and padding", "DF11", "side files"],
)
def test_conversion_that_is_killed_at_random_ends_in_the_same_bytes(tmp_path, name, trials, killed, resumed):
    script = [SUPPORT / "convert_trials.py", source_of(name, tmp_path), tmp_path / "trials", "kills"]
    done = subprocess.run(
        [sys.executable, *script, *map(str, (trials, killed, resumed, 1)), "freetoken"],
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert found["killed"] >= killed
    assert found["resumed"] >= resumed


# Tables for host memory


def test_embedding_for_host_memory_is_first_in_the_region_under_its_new_name(tmp_path):
    result = convert(source_of("qwen3_vl", tmp_path), tmp_path / "out", embed="host")
    first = min(read_index(tmp_path / "out")["tensors"], key=lambda entry: entry["global_off"])
    assert first["name"] == "model.embed_tokens.weight"
    assert first["placement"] == "host"
    assert first["role"] == "token_embedding"
    assert result.to_dict()["embed"]["placement"] == "host"
    with ftw.open_checkpoint(tmp_path / "out") as checkpoint:
        assert [name for name, tensor in checkpoint.tensors.items() if tensor.placement == "host"] == [first["name"]]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("llama_tied", "tied"), ("glm4_moe", "is no plain table in FreeToken's layout")],
    ids=["tied", "DF11"],
)
def test_embedding_that_may_not_leave_the_gpu_is_refused_and_auto_leaves_it(tmp_path, capsys, name, problem):
    source = source_of(name, tmp_path)
    with pytest.raises(ftw.NotEligibleError, match=problem):
        convert(source, tmp_path / "out", embed="host")
    message = error_of(capsys, "convert", source, tmp_path / "out", *LAYOUT, "--embed", "host", status=3)
    assert problem in message
    assert not (tmp_path / "out").exists()
    assert convert(source, tmp_path / "out", embed="auto").plan.placement.placement == "gpu"
    assert all("placement" not in entry for entry in read_index(tmp_path / "out")["tensors"])


def test_loaded_result_looks_up_the_rows_of_the_source(tmp_path):
    source = source_of("qwen3", tmp_path)
    convert(source, tmp_path / "out", embed="host")
    name = "model.embed_tokens.weight"
    with ftw.open_checkpoint(source) as checkpoint:
        tensor = checkpoint.tensors[name]
        stored = bytearray(tensor.nbytes)
        checkpoint.read_into(name, stored)
    wanted = torch.frombuffer(stored, dtype=torch.bfloat16).reshape(tensor.shape)
    with ftw.load(tmp_path / "out", embed="host", device="cpu") as model:
        ids = torch.arange(tensor.shape[0])
        assert torch.equal(model.tables[name](ids).view(torch.int16), wanted.view(torch.int16))


# Refusals


def without(*parts):
    """Return an edit that takes away the tensors whose names hold all of some parts."""

    def edit(_spec, _config, tensors):
        for name in [name for name in tensors if all(part in name for part in parts)]:
            del tensors[name]

    return edit


def add_tensor(_spec, _config, tensors):
    tensors["model.layers.0.self_attn.extra.weight"] = ["BF16", [4], "model.safetensors"]


def rename_architecture(_spec, config, _tensors):
    config["architectures"] = ["UnheardOfForCausalLM"]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (
            rename_architecture,
            "knows 28 others, such as Gemma4ForCausalLM and Qwen3ForCausalLM; docs/ftw.md lists them",
        ),
        (without("layers.1.", "experts.2."), "expert 2 has none, each of the 4 experts of a layer needs one"),
        (without("layers.1."), "is missing, FreeToken's Qwen3MoeForCausalLM needs it"),
        (add_tensor, "model.layers.0.self_attn.extra.weight: FreeToken's Qwen3MoeForCausalLM has no place for it"),
    ],
    ids=["architecture", "expert", "layer", "tensor too many"],
)
def test_source_that_does_not_fit_is_refused_in_one_line_and_nothing_is_written(tmp_path, capsys, edit, problem):
    (tmp_path / "source").mkdir()
    source = write_spec(change("qwen3_moe", edit), tmp_path / "source")
    before = state(tmp_path)
    for more in ([], ["--json"], ["--dry-run"]):
        assert problem in error_of(capsys, "convert", source, tmp_path / "out", *LAYOUT, *more)
    assert state(tmp_path) == before


def test_gguf_and_what_has_the_layout_already_are_refused(tmp_path, capsys):
    (tmp_path / "model.gguf").write_bytes(gguf_bytes([entry("a", [4], 0, 0)], bytes(32)))
    convert(source_of("qwen3_moe", tmp_path), tmp_path / "done")
    before = state(tmp_path)
    message = error_of(capsys, "convert", tmp_path / "model.gguf", tmp_path / "out", *LAYOUT)
    assert "is a GGUF, --layout freetoken is made of safetensors" in message
    message = error_of(capsys, "convert", tmp_path / "done", tmp_path / "out", *LAYOUT)
    assert "layout: is FreeToken's already; --layout plain copies it" in message
    assert state(tmp_path) == before


def test_layout_that_there_is_not_is_wrong_usage(tmp_path, capsys):
    source = source_of("llama", tmp_path)
    assert main(["convert", str(source), str(tmp_path / "out"), "--layout", "freetokens"]) == 2
    assert "freetokens" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="layout is 'freetokens', allowed are plain, freetoken"):
        convert(source, tmp_path / "out", layout="freetokens")


# Dry runs and what is said


def test_dry_run_plans_what_a_conversion_writes(tmp_path, capsys):
    source = source_of("qwen4_exp", tmp_path)
    before = state(tmp_path)
    planned = convert(source, tmp_path / "out", dry_run=True).to_dict()
    assert state(tmp_path) == before
    assert main(["convert", str(source), str(tmp_path / "out"), *LAYOUT, "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    names = (
        "layout",
        "num_source_tensors",
        "num_tensors",
        "nbytes",
        "total_bytes",
        "needed_bytes",
        "shards",
        "left_out",
    )
    assert [planned[name] for name in names] == [written[name] for name in names]
    assert written["layout"] == "freetoken"
    files = tree(tmp_path / "out")
    assert planned["needed_bytes"] == sum(map(len, files.values()))
    assert any(name.startswith("ple-table-") for name in files)


def test_tensors_that_predict_several_tokens_are_left_out_by_name_and_told_in_one_line(tmp_path, capsys):
    def add(_spec, _config, tensors):
        for number in range(3000):
            tensors[f"mtp.layers.{number}.weight"] = ["BF16", [2], "model.safetensors"]

    (tmp_path / "source").mkdir()
    source = write_spec(change("qwen3_5", add), tmp_path / "source")
    command = ["convert", str(source), str(tmp_path / "out"), *LAYOUT, "--dry-run"]
    assert main([*command, "--json"]) == 0
    left_out = json.loads(capsys.readouterr().out)["left_out"]
    reason = "FreeToken does not load the layers that predict several tokens"
    named = {entry["name"] for entry in left_out if entry["reason"] == reason}
    assert named >= {f"mtp.layers.{number}.weight" for number in range(3000)}
    assert main(command) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "left out: mtp." in line]
    assert len(lines) == 1
    assert f" and {len(named) - 1} other tensors ({reason})" in lines[0]


# Resuming, verifying


@pytest.fixture
def done(tmp_path) -> tuple[Path, Path]:
    """Return a source with side files and its result."""
    source = source_of("qwen4_exp", tmp_path)
    convert(source, tmp_path / "out")
    return source, tmp_path / "out"


def change_bank(target: Path) -> str:
    """Change a byte of a bank, and return the bank's name."""
    index = read_index(target)
    bank = next(entry for entry in index["tensors"] if entry["kind"] == "experts_bank")
    shard = next(one for one in reversed(index["shards"]) if one["global_off"] <= bank["global_off"])
    with (target / shard["file"]).open("r+b") as file:
        file.seek(bank["global_off"] - shard["global_off"] + 7)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return bank["name"]


def test_resume_of_a_complete_result_says_so(done, capsys):
    before = state(done[1])
    assert main(["convert", *map(str, done), *LAYOUT, "--resume"]) == 0
    assert "complete already: " in capsys.readouterr().out
    assert state(done[1]) == before
    change_bank(done[1])
    assert "exists and is not empty" in error_of(capsys, "convert", *done, *LAYOUT, "--resume")


def test_resume_of_a_plain_result_in_the_other_layout_is_refused(tmp_path, capsys):
    source = source_of("llama", tmp_path)
    convert(source, tmp_path / "out", layout="plain")
    before = tree(tmp_path / "out")
    assert "exists and is not empty" in error_of(capsys, "convert", source, tmp_path / "out", *LAYOUT, "--resume")
    assert tree(tmp_path / "out") == before


def test_verify_finds_a_byte_of_a_bank_that_has_changed(done):
    bank = change_bank(done[1])
    alone, compared = ftw.verify(done[1]).problems, ftw.verify(done[1], against=done[0]).problems
    assert len(alone) == 1
    assert f"{bank}: checksum is" in alone[0]
    assert [f"{bank}: differs from the source at byte 7" in compared[0], f"{bank}: checksum is" in compared[1]] == [
        True
    ] * 2


def test_verify_finds_a_side_file_that_has_changed_or_is_gone(done):
    path = next(done[1].glob("ple-table-*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert any("differs from the source" in problem for problem in ftw.verify(done[1], against=done[0]).problems)
    path.unlink()
    assert not is_right(done[1])


def is_right(folder: Path) -> bool:
    try:
        return ftw.verify(folder).is_ok
    except ftw.CheckpointError:
        return False


def test_verify_against_another_source_finds_what_differs(tmp_path):
    convert(source_of("qwen3_moe", tmp_path), tmp_path / "out")
    (tmp_path / "other").mkdir()
    other = write_source("qwen3_moe", tmp_path / "other")
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    problems = ftw.verify(tmp_path / "out", against=other).problems
    assert len(problems) == 1
    assert "differs from the source at byte" in problems[0]


def test_verify_of_a_result_that_lost_its_layout_tells_which_tensors_are_not_in_the_source(tmp_path):
    source = source_of("qwen3_moe", tmp_path)
    convert(source, tmp_path / "out")
    index = read_index(tmp_path / "out")
    del index["ftw"]["layout"]
    (tmp_path / "out" / INDEX).write_text(json.dumps(index))
    problems = ftw.verify(tmp_path / "out", against=source).problems
    assert any("gate_up#L00000: is not in the source" in problem for problem in problems)
    assert any("q_proj.weight: is missing, the source holds it" in problem for problem in problems)


# What comes after, and before


def test_sha256s_of_what_is_made_are_recorded_and_checked(tmp_path):
    source = source_of("qwen3_5_moe_fp8", tmp_path)
    convert(source, tmp_path / "out", sha256=True)
    found = ftw.verify(tmp_path / "out", against=source)
    assert found.is_ok
    assert found.num_sha256 == found.num_checksums == found.num_tensors > 0


def test_result_that_is_converted_again_as_it_is_keeps_its_layout(tmp_path, capsys):
    convert(source_of("qwen3_5_moe_fp8", tmp_path), tmp_path / "out")
    ftw.convert(tmp_path / "out", tmp_path / "again", shard_limit=1 << 20)
    first, second = (read_index(tmp_path / name) for name in ("out", "again"))
    for key in ("quant_format", "layer_quant_formats", "expert_bank_num_layers"):
        assert second[key] == first[key]
    assert [entry["kind"] for entry in second["tensors"]] == [entry["kind"] for entry in first["tensors"]]
    assert ftw.verify(tmp_path / "again", against=tmp_path / "out").is_ok
    assert ftw.inspect(tmp_path / "again").freetoken_obstacle is None
    assert main(["inspect", str(tmp_path / "again")]) == 0
    assert "FreeToken 0.2.1: serves it" in capsys.readouterr().out


def test_result_that_is_converted_again_can_be_verified_against_the_first_source(tmp_path):
    source = source_of("qwen3_moe", tmp_path)
    convert(source, tmp_path / "out")
    ftw.convert(tmp_path / "out", tmp_path / "again")
    assert ftw.verify(tmp_path / "again", against=source).is_ok


def test_plain_ftw_as_the_source_gives_the_same_tensors(tmp_path):
    source = source_of("qwen3_5_moe_fp8", tmp_path)
    convert(source, tmp_path / "out")
    ftw.convert(source, tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "by-way")
    assert ftw.inspect(tmp_path / "by-way").freetoken_obstacle is None
    tensors = []
    for folder in ("out", "by-way"):
        with ftw.open_checkpoint(tmp_path / folder) as checkpoint:
            found = checkpoint.tensors.values()
            tensors.append({one.name: (one.kind, one.dtype, one.shape, one.xxh3_64) for one in found})
    assert tensors[0] == tensors[1]
    assert ftw.verify(tmp_path / "by-way", against=source).is_ok
