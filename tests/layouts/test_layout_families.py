"""Each family that FreeToken serves: what `--layout freetoken` writes is what FreeToken's own converter writes.

FreeToken's loader, too, must take every result. Both are run out of its wheel (`freetoken_program`).
"""

import fcntl
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from arrangements import Changed, change
from folders import read_index
from freetoken_sources import NAMES, read_spec, write_source, write_spec
from places import SUPPORT

import ftw
from ftw.checkpoint.config import parse_model_config
from ftw.layouts.freetoken.served import find_obstacle
from ftw.tensors import EXPERTS_BANK, TensorInfo

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("freetoken") is None, reason="freetoken's wheel exists for x86-64 Linux alone"
)
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"),
    *("dim", "n_heads", "moe_inter_dim", "q_lora_rank", "index_head_dim", "o_lora_rank", "shared_intermediate_size"),
)
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "self_attn", "gate", "model.visual"],
}
NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "*self_attn*", "*mlp.gate", "model.visual*"],
}
BLOCKS = {"weight": ("F8_E4M3", [128, 128]), "weight_scale_inv": ("F32", [1, 1])}
PACKED = {"weight": ("U8", [128, 64]), "weight_scale": ("F8_E4M3", [128, 8]), "weight_scale_2": ("F32", [])}
# What FreeToken's loader takes and its converter does not make: a family, its quantization_config, an expert's roles.
OTHERS = {
    "qwen3_moe fp8": ("qwen3_moe", FP8, BLOCKS),
    "qwen3_moe nvfp4": ("qwen3_moe", NVFP4, PACKED),
    "qwen3_vl_moe fp8": ("qwen3_vl_moe", FP8, BLOCKS),
    "qwen3_vl_moe nvfp4": ("qwen3_vl_moe", NVFP4, PACKED),
}
KEYS = ("format", "version", "align", "quant_format", "layer_quant_formats", "expert_bank_num_layers")


def run_freetoken(jobs: list[dict[str, str]], folder: Path) -> list[dict[str, Any]]:
    """Have FreeToken do jobs; return the answer to each."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    program = [sys.executable, str(SUPPORT / "freetoken_program.py"), str(folder / "jobs.json")]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="session")
def answers(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Return a folder with source, reference and result of each family, and what FreeToken said; made once for all."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "freetoken-families"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "answers.json").exists():
            (shared / "answers.json").write_text(json.dumps(make_answers(shared)))
    return shared, json.loads((shared / "answers.json").read_text())


def make_answers(folder: Path) -> dict[str, Any]:
    jobs = []
    for name in NAMES:
        source = write_source(name, folder / name / "source")
        jobs.append({"do": "convert", "source": str(source), "target": str(folder / name / "reference")})
        ftw.convert(source, folder / name / "result", layout="freetoken", embed="auto")
        jobs.append({"do": "load", "folder": str(folder / name / "result")})
        jobs.append({"do": "describe", "folder": str(write_larger_config(name, folder / name / "larger"))})
    for name, quantise in OTHERS.items():
        ftw.convert(write_quantised(quantise, folder / name), folder / f"{name}-result", layout="freetoken")
        jobs.append({"do": "load", "folder": str(folder / f"{name}-result")})
    found = run_freetoken(jobs, folder)
    said = {name: found[3 * number : 3 * number + 3] for number, name in enumerate(NAMES)}
    return {**said, **dict(zip(OTHERS, found[3 * len(NAMES) :], strict=True))}


def write_quantised(quantise: tuple[str, dict[str, Any], dict[str, tuple[str, list[int]]]], folder: Path) -> Path:
    """Write the source of a family with a width of 128, whose experts are quantised, a tensor for each role."""
    name, declared, roles = quantise

    def edit(_spec: Any, config: dict[str, Any], tensors: dict[str, Any]) -> None:
        text = config.get("text_config", config)
        text.update(hidden_size=128, moe_intermediate_size=128)
        config["quantization_config"] = declared
        for other in [other for other in tensors if "visual" not in other]:
            _, shape, shard = tensors[other]
            if ".experts." in other:
                del tensors[other]
            elif not other.endswith(("q_norm.weight", "k_norm.weight")):
                shape[0 if other.endswith("o_proj.weight") else -1] = 128
        above = "model.language_model." if "text_config" in config else "model."
        for layer, expert, part in product(range(2), range(4), ("gate", "up", "down")):
            for role, (dtype, shape) in roles.items():
                module = f"{above}layers.{layer}.mlp.experts.{expert}.{part}_proj"
                tensors[f"{module}.{role}"] = [dtype, shape, shard]

    folder.mkdir()
    return write_spec(change(name, edit), folder)


def write_larger_config(name: str, folder: Path) -> Path:
    """Write the configuration of a family with one of its sizes, drawn, twice as large."""
    files = read_spec(name)["files"]
    sized = "inference/config.json" if "inference/config.json" in files else "config.json"
    part = files[sized].get("text_config", files[sized])
    heads = () if part.get("num_key_value_heads") == part.get("num_attention_heads") else ("num_attention_heads",)
    key = random.Random(name).choice([key for key in (*SIZES, *heads) if part.get(key)])
    part[key] *= 2
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    return folder


def read_tensors(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return kind, type, shape and bytes of each tensor, those of side files among them."""
    with ftw.open_checkpoint(folder) as checkpoint:
        found = {}
        for name, tensor in checkpoint.tensors.items():
            buffer = bytearray(tensor.nbytes)
            checkpoint.read_into(name, buffer)
            found[name] = (tensor.kind, tensor.dtype, tensor.shape, bytes(buffer))
        return found


@pytest.mark.parametrize("name", NAMES)
def test_result_equals_that_of_freetokens_converter(answers, name):
    folder, said = answers
    assert said[name][0] == {"ok": True}
    reference, result = folder / name / "reference", folder / name / "result"
    wanted, found = read_tensors(reference), read_tensors(result)
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if found[key] != wanted[key]] == []
    indexes = read_index(reference), read_index(result)
    assert [indexes[1].get(key) for key in KEYS] == [indexes[0].get(key) for key in KEYS]
    copied = indexes[0]["copied_metadata"]
    assert copied
    assert [file for file in copied if (result / file).read_bytes() != (reference / file).read_bytes()] == []
    assert (indexes[1].get("side_files") or []) == indexes[0]["side_files"]


@pytest.mark.parametrize("name", NAMES)
def test_freetokens_loader_takes_the_result(answers, name):
    assert answers[1][name][1] == {"ok": True}


@pytest.mark.parametrize("name", OTHERS)
def test_freetokens_loader_takes_experts_that_its_converter_does_not_make(answers, name):
    folder, said = answers
    assert said[name] == {"ok": True}
    assert ftw.inspect(folder / f"{name}-result").freetoken_obstacle is None


@pytest.mark.parametrize("name", NAMES)
def test_verify_compares_the_result_with_its_source(answers, name):
    folder = answers[0] / name
    found = ftw.verify(folder / "result", against=folder / "source")
    assert found.problems == ()
    assert found.num_compared == found.num_tensors > 0


@pytest.mark.parametrize("name", NAMES)
def test_verify_compares_freetokens_own_folder_with_its_source(answers, name, tmp_path):
    """Also a copy of it that ftw has made; a byte that differs is found."""
    folder = answers[0] / name
    found = ftw.verify(folder / "reference", against=folder / "source")
    assert found.problems == ()
    assert found.num_compared == found.num_tensors > 0
    assert ftw.verify(folder / "result", against=folder / "reference").is_ok
    copied = shutil.copytree(folder / "reference", tmp_path / "copied")
    with (copied / "freetoken-00000.ftw").open("r+b") as file:
        file.write(bytes(byte ^ 1 for byte in (copied / "freetoken-00000.ftw").read_bytes()[:1]))
    problems = ftw.verify(copied, against=folder / "source").problems
    assert len(problems) == 1
    assert problems[0].endswith("differs from the source at byte 0")


@pytest.mark.parametrize("name", NAMES)
def test_inspect_says_that_freetoken_serves_the_result_and_the_reference(answers, name):
    for folder in ("result", "reference"):
        report = ftw.inspect(answers[0] / name / folder)
        assert report.freetoken_obstacle is None
        assert report.to_dict()["freetoken"] == {"serves": True, "obstacle": None}


DTYPES = {
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.uint8": "U8",
    "torch.int64": "I64",
}
# Sizes that stand in no key: of DeepSeek-V4's ratios, and of images in MiniMax-M3's own configuration.
UNKNOWN = (".compressor.ape", ".patch_embedding.weight", ".patch_merge_mlp.linear_1.weight")


def make_described(checkpoint: ftw.Checkpoint, folder: Path, described: dict[str, Any]) -> Changed:
    """Return an FTW of what FreeToken's model of another configuration holds."""
    tensors = {}
    for kind, found in (("weight", described["tensors"]), (EXPERTS_BANK, described["banks"])):
        for name, (dtype, shape) in found.items():
            tensors[name] = TensorInfo(name, DTYPES[dtype], tuple(shape), 0, 0, kind=kind)
    made = Changed(checkpoint, tensors)
    made.config = parse_model_config(json.loads((folder / "config.json").read_text()), folder / "config.json")
    files = {path.relative_to(folder).as_posix(): json.loads(path.read_text()) for path in folder.rglob("*.json")}
    made.read_json = files.get
    made.metadata = {"layer_quant_formats": described["formats"]}
    return made


@pytest.mark.parametrize("name", [name for name in NAMES if name != "glm4_moe"])  # DF11 has no size until it is loaded
def test_expected_shapes_are_those_of_freetokens_model(answers, name):
    """Those of a changed configuration: all of them are taken, and none with an axis that is one longer."""
    shared, said = answers
    assert said[name][2]["ok"], said[name][2]
    with ftw.open_checkpoint(shared / name / "result") as checkpoint:
        made = make_described(checkpoint, shared / name / "larger", said[name][2])
        assert find_obstacle(made) is None
        generator = random.Random(name)
        for other in generator.sample(sorted(made.tensors), 8):
            tensor = made.tensors[other]
            if not tensor.shape or other.endswith(UNKNOWN):
                continue
            axis = generator.randrange(len(tensor.shape))
            shape = tuple(size + (place == axis) for place, size in enumerate(tensor.shape))
            obstacle = find_obstacle(Changed(made, {**made.tensors, other: tensor._replace(shape=shape)}))
            assert obstacle is not None, (other, shape)
            assert obstacle.startswith(f"{other}: is ") or " rows and " in obstacle
