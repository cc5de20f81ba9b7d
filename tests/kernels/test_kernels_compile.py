"""Every kernel compiles ahead of time for each target, and fuses nothing that would round differently."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packed_tables import TYPES
from places import SUPPORT

TARGETS = ["sm_80", "sm_90", "sm_120", "gfx942", "gfx1100", "gfx1201"]


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_ahead_for(target: str, tmp_path: Path) -> None:
    """Compile in a process that does not interpret kernels, with an empty cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, SUPPORT / "compile_kernels.py", target]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    variants = {line[1] for line in lines if line[0] == "lookup"}
    assert variants == {"plain", "hot", "counted", "distinct", "scaled", "all"}
    assert [line[0] for line in lines].count("lookup") == 12 + 4 + 3 + 1
    assert [line[0] for line in lines].count("elect") == [line[0] for line in lines].count("spread") == 2
    packed = [line for line in lines if line[0] == "packed_lookup"]
    assert [line[2] for line in packed].count("plain") == 2 * len(TYPES) + 8
    assert {line[2] for line in packed} == variants
    assert {line[1] for line in packed} == set(TYPES)
    assert all(int(line[-2]) > 500 for line in lines)
    assert [line for line in lines if int(line[-1])] == []  # nothing is fused, or values would differ in the last bit
