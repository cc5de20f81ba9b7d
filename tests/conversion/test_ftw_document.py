"""docs/ftw.md: the code in it runs, on what `ftw convert` writes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint
from places import DOCS

import ftw

DOCUMENT = DOCS / "ftw.md"
TABLE = "model.embed_tokens.weight"


def run_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the document's one block of Python beside a checkpoint named "out"; return its names."""
    [code] = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    return names


@pytest.mark.parametrize("shard_limit", [4096, 1 << 20], ids=["spanning", "one-shard"])
@pytest.mark.parametrize("embed", ["host", "gpu"])
def test_code_reads_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embed: str, shard_limit: int) -> None:
    table = torch.randn(700, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = {**llama_tensors(), TABLE: table, "lm_head.weight": table + 1}
    source = write_checkpoint(tmp_path / "source", tensors, llama_config(vocab_size=700))
    ftw.convert(source, tmp_path / "out", embed=embed, shard_limit=shard_limit)
    names = run_code(tmp_path, monkeypatch)
    assert names["row"] == table[3].tolist()
    for name, tensor in tensors.items():
        entry, content = names["read_tensor"]("out", name)
        assert entry["shape"] == list(tensor.shape)
        assert content == tensor.view(torch.uint8).numpy().tobytes()
