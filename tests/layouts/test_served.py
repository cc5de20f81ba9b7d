"""`ftw inspect` of an FTW: what stands against FreeToken's server loading it. What it serves: test_layout_families."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw
from folders import read_index
from freetoken_sources import write_source
from ftw.cli.main import main
from gguf_builder import entry, gguf_bytes

import ftw

INDEX = "freetoken_weight.json"


def make(name: str, folder: Path, **options: object) -> Path:
    """Return the result of a family's source."""
    ftw.convert(write_source(name, folder / "source"), folder / "out", **{"layout": "freetoken", **options})  # type: ignore[arg-type]
    return folder / "out"


def edit_json(path: Path, **changes: object) -> None:
    found = {**json.loads(path.read_bytes()), **changes}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))


def edit_tensors(folder: Path, edit) -> None:
    """Have `edit` return other entries of tensors than the index has; a hole is left where one is missing."""
    edit_json(folder / INDEX, tensors=edit(read_index(folder)["tensors"]), counts=...)


def obstacle_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what stands against an FTW, as the object, the JSON and the text say alike."""
    report = ftw.inspect(folder)
    obstacle = report.freetoken_obstacle
    assert obstacle is not None
    assert "\n" not in obstacle
    assert report.to_dict()["freetoken"] == {"serves": False, "obstacle": obstacle}
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0
    assert f"FreeToken 0.2.1: does not serve it: {obstacle}" in capsys.readouterr().out.replace("\n", " ")
    return obstacle


def test_plain_layout_is_not_served(tmp_path, capsys):
    folder = make("qwen3_moe", tmp_path, layout="plain")
    problem = "model.layers.0.self_attn.qkv_proj.weight: is missing, FreeToken's Qwen3MoeForCausalLM needs it"
    assert obstacle_of(folder, capsys) == problem


def test_missing_tensor_is_named(tmp_path, capsys):
    folder = make("qwen3_moe", tmp_path)
    edit_tensors(folder, lambda entries: [one for one in entries if one["name"] != "model.norm.weight"])
    problem = "model.norm.weight: is missing, FreeToken's Qwen3MoeForCausalLM needs it"
    assert obstacle_of(folder, capsys) == problem


def test_tensor_too_many_is_named(tmp_path, capsys):
    folder = make("glm4_moe", tmp_path)  # of which the conversion leaves others out

    def add(entries):
        return [*entries, {**entries[-1], "name": "model.extra.weight", "kind": "weight", "nbytes": 0, "shape": [0]}]

    edit_tensors(folder, add)
    assert obstacle_of(folder, capsys).startswith(
        "model.extra.weight: FreeToken's Glm4MoeForCausalLM has no place for it"
    )


@pytest.mark.parametrize("bank", ["gate_up_scale#L00001", "down#L00000"])
def test_missing_bank_is_named(tmp_path, capsys, bank):
    folder = make("qwen3_5_moe_fp8", tmp_path)
    edit_tensors(folder, lambda entries: [one for one in entries if one["name"] != bank])
    assert obstacle_of(folder, capsys) == f"{bank}: is missing, fp8_block experts need it"


def test_index_that_tells_of_another_number_of_layers_is_not_served(tmp_path, capsys):
    folder = make("qwen3_5_moe_nvfp4_mixed", tmp_path)
    formats = read_index(folder)["layer_quant_formats"]
    edit_json(folder / INDEX, layer_quant_formats=formats[:-1])
    problem = f"quant_format: tells of {len(formats) - 1} layers with experts, config.json of {len(formats)}"
    assert obstacle_of(folder, capsys) == problem


@pytest.mark.parametrize("value", [None, ..., 7, ["bf16"]], ids=["null", "missing", "number", "list"])
def test_index_without_a_format_of_experts_is_not_served(tmp_path, capsys, value):
    folder = make("qwen3_moe", tmp_path)
    edit_json(folder / INDEX, quant_format=value)
    assert obstacle_of(folder, capsys).startswith("quant_format: tells of 0 layers with experts, config.json of ")


def test_ftw_of_a_gguf_is_not_served(tmp_path, capsys):
    (tmp_path / "model.gguf").write_bytes(gguf_bytes([entry("token_embd.weight", [8, 2], 0, 0)], bytes(64)))
    ftw.convert(tmp_path / "model.gguf", tmp_path / "out")
    assert obstacle_of(tmp_path / "out", capsys).startswith("was made from a GGUF, in whose metadata ")


@pytest.mark.parametrize(
    ("architecture", "problem"),
    [
        (
            "UnheardOfForCausalLM",
            "architecture is UnheardOfForCausalLM, of which ftw does not know what FreeToken loads",
        ),
        ("Mistral3ForConditionalGeneration", "Mistral3ForConditionalGeneration: FreeToken looks for the text model's "),
        (..., "architecture is None, of which ftw does not know what FreeToken loads"),
    ],
    ids=["unknown", "mistral3", "none"],
)
def test_architecture_that_freetoken_does_not_serve(tmp_path, capsys, architecture, problem):
    folder = make("llama", tmp_path)
    edit_json(folder / "config.json", architectures=... if architecture is ... else [architecture])
    assert obstacle_of(folder, capsys).startswith(problem)


def test_checkpoint_that_is_no_ftw_says_nothing_of_freetoken(tmp_path, capsys):
    source = write_checkpoint(tmp_path / "source", llama_tensors(), llama_config())
    assert "freetoken" not in ftw.inspect(source).to_dict()
    assert main(["inspect", str(source)]) == 0
    assert "FreeToken" not in capsys.readouterr().out


def test_ftw_of_another_writer_with_no_config_is_not_served(tmp_path, capsys):
    folder = write_ftw(tmp_path / "out", {"a": torch.ones(3)})
    assert obstacle_of(folder, capsys).startswith("architecture is None")


def test_families_are_imported_only_where_they_are_needed(tmp_path):
    """`import ftw`, and `ftw inspect` and `ftw convert` of a plain checkpoint, go without."""
    source = write_checkpoint(tmp_path / "source", llama_tensors(), llama_config())
    script = (
        "import sys, ftw\n"
        "from ftw.cli.main import main\n"
        "assert main(['inspect', sys.argv[1]]) == 0\n"
        "assert main(['convert', sys.argv[1], sys.argv[2]]) == 0\n"
        "found = [name for name in sys.modules if name.startswith(('ftw.layouts.f', 'ftw.layouts.r'))]\n"
        "ftw.inspect(sys.argv[2])\n"
        "assert 'ftw.layouts.families.table' in sys.modules\n"
        "sys.exit(str(found) if found else 0)\n"
    )
    command = [sys.executable, "-c", script, source, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
