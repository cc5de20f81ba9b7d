"""Two GPUs of a host: a table spread over them gives the rows of a whole one, eagerly and in graphs."""

import json
import subprocess
import sys

import pytest
import torch
from places import SUPPORT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
WORKER = SUPPORT / "tp_worker.py"


@pytest.mark.parametrize("columns", [2048, 2561], ids=["int32", "uint8"])
@pytest.mark.parametrize("rows", [4099, 1], ids=["uneven", "one-row"])
def test_sum_over_gpus_is_the_whole_table(rows: int, columns: int) -> None:
    command = [sys.executable, str(WORKER), "--rows", str(rows), "--columns", str(columns)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["size"], found["equal_lookups"]) == (2, 24)  # one eager lookup and five replays for each count
    assert found["pinned_bytes"] == -(-(rows - rows // 2) * columns * 2 // 4096) * 4096
