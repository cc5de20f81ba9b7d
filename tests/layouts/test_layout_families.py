"""Each family that FreeToken serves: what `--layout freetoken` writes is what FreeToken's own converter writes.

FreeToken's loader, too, must take every result. Both are run out of its wheel (`freetoken_program`).
"""

import fcntl
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from folders import read_index
from freetoken_sources import NAMES, write_source
from places import SUPPORT

import ftw

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("freetoken") is None, reason="freetoken's wheel exists for x86-64 Linux alone"
)
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
    shared = tmp_path_factory.getbasetemp().parent / "freetoken-families"
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
    found = run_freetoken(jobs, folder)
    return {name: found[2 * number : 2 * number + 2] for number, name in enumerate(NAMES)}


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


@pytest.mark.parametrize("name", NAMES)
def test_verify_compares_the_result_with_its_source(answers, name):
    folder = answers[0] / name
    found = ftw.verify(folder / "result", against=folder / "source")
    assert found.problems == ()
    assert found.num_compared == found.num_tensors > 0


@pytest.mark.parametrize("name", NAMES)
def test_inspect_says_that_freetoken_serves_the_result_and_the_reference(answers, name):
    for folder in ("result", "reference"):
        report = ftw.inspect(answers[0] / name / folder)
        assert report.freetoken_obstacle is None
        assert report.to_dict()["freetoken"] == {"serves": True, "obstacle": None}
