"""The benchmark of vLLM's plug-in, rehearsed on a CPU without vLLM: its steps, their order and what they leave."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_steps_are_rehearsed_without_vllm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ftw.bench.vllm_plugin", str(tmp_path / "out"), str(tmp_path / "models")]
    environ = {**os.environ, "TINY": "1", "REHEARSE": "1"}
    subprocess.run([*command, "eager", "gemma", "nothing"], env=environ, check=True, capture_output=True)
    eager, gemma, nothing = (
        json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("eager", "gemma", "nothing")
    )
    assert eager["ok"]
    assert eager["kv_tokens_gained"] == eager["stock"]["table_nbytes"] // 16
    assert gemma["ok"]
    assert "the LM head uses this same table" in gemma["host"]
    assert nothing == {"ok": False, "error": "KeyError: 'nothing'", "s": nothing["s"]}
