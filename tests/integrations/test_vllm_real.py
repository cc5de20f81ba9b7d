"""The plug-in and its tests' fakes beside vLLM itself, where that is installed: its Python files do, on a CPU too."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from tiny_vllm_model import make_weights, write_model

import ftw

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
IDS = [0, 99, 7, 7, 42]


def run(*arguments: str, **environ: str) -> dict[str, Any]:
    """Run the script beside vLLM in a process of its own, as that sets up ranks and logging."""
    script = str(ROOT / "tests" / "support" / "vllm_real.py")
    result = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, env={**os.environ, **environ}
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def rows(seed: int = 0) -> list[list[float]]:
    found: list[list[float]] = make_weights(seed)["model.embed_tokens.weight"][IDS].float().tolist()
    return found


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    model = write_model(tmp_path / "model")
    ftw.convert(model, tmp_path / "out")
    return [str(path) for path in (model, tmp_path / "out", write_model(tmp_path / "new", seed=1))]


def test_fakes_have_the_signatures_of_the_real_functions() -> None:
    found = run("signatures")
    assert len(found) > 20
    assert {place: fake for place, (fake, _) in found.items()} == {place: real for place, (_, real) in found.items()}


def test_table_is_in_host_memory_through_vllms_own_loaders_layers_and_reload(sources: list[str]) -> None:
    found = run("load", *sources)
    for way, method, parameter in (
        ("stock", "UnquantizedEmbeddingMethod", [128, 8]),
        ("host", "HostEmbeddingMethod", [0, 8]),
        ("ftw", "HostEmbeddingMethod", [0, 8]),
    ):
        assert found[way]["is_vllms"]
        assert (found[way]["method"], found[way]["parameter"]) == (method, parameter)
        assert found[way]["rows"] == rows()
    for way in ("stock", "host"):
        assert found[way]["reloaded"] == rows(1)
        assert found[way]["parameter after"] == found[way]["parameter"]
    assert found["host"]["handles"] == ["model.embed_tokens"]
    assert found["stock"]["handles"] is None


@pytest.mark.parametrize("tie", ["module", "method", "weight"])
def test_table_that_vllm_ties_stays(sources: list[str], tie: str) -> None:
    found = run("load", *sources, TIE=tie, EMBED="auto")
    for way in ("stock", "host", "ftw"):
        assert (found[way]["method"], found[way]["parameter"]) == ("UnquantizedEmbeddingMethod", [128, 8])
