import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Compile everything in a process that does not interpret kernels, with an empty cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    script = Path(__file__).with_name("compile_kernels.py")
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [line.split() for line in result.stdout.splitlines()]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120", "gfx942", "gfx1100", "gfx1201"])
def test_lookup_compiles_ahead_for(target: str, compiled: list[list[str]]) -> None:
    variants = [line for line in compiled if line[:2] == ["lookup", target]]
    assert len(variants) == 6
    assert all(int(line[4]) > 500 for line in variants)
