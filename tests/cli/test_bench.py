"""The command of benchmarks, its pictures, and the ids that it draws."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ftw.bench.ids import Ids
from ftw.cli.main import main

LOOKUPS = [
    {"table": "bf16 [9, 8]", "drawn": drawn, "ids": ids, "way": way, "graph_us": ids / 3, "eager_us": 9.0}
    for drawn in ("uniform", "zipf")
    for ids in (1, 16)
    for way in ("plain", "hot")
]
_MODEL = {"model": "Qwen3-30B-A3B", "layers": "12 of 48"}
_RATIO = {"ratio": 1.25, "ratio_p20": 1.125, "ratio_p80": 1.375, "capture_ratios": [1.1875]}
DECODING = {
    "vram": "24GiB",
    "decode": [{**_MODEL, "batch": 1, "placement": name, "step_ms": 2.0, **_RATIO} for name in ("gpu", "gpu, again")],
    "prefill": [{**_MODEL, "tokens": 9, "placement": "gpu", "prefill_ms": 2.0, **_RATIO}],
    "memory": [
        {
            **_MODEL, "placement": "host, hot 64MiB", "vram_mib": 14922.0, "below_gpu_mib": 530.0, "pinned_mib": 593.5,
            "kv_bytes_per_token": 24576, "kv_tokens": 411_904, "more_with_all_layers": 5653,
        }
    ],
    "tokens": [{**_MODEL, "tokens_equal": True}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("subject", "result"),
    [
        ("lookup", {"copy_engine_gb_per_s": 55.0, "rows": LOOKUPS}),
        ("load", {"table_nbytes": 1, "table": [{"way": "ftw", "cache": "cold", "seconds": 0.5, "of_best": 1.1}]}),
        ("convert", {"rows": [{"way": "ftw", "seconds": 0.5}]}),
        ("inspect", {"rows": [{"way": "ftw", "seconds": 0.5, "peak_mib": 3}]}),
        ("decode", DECODING),
    ],
    ids=["lookup", "load", "convert", "inspect", "decode"],
)
def test_figures_are_printed_written_and_drawn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    subject: str,
    result: dict[str, object],
) -> None:
    monkeypatch.setitem(sys.modules, f"ftw.bench.{subject}", SimpleNamespace(run=lambda: result))
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    assert main(["bench", subject, "--json", str(figures), "--plot", str(picture)]) == 0
    written = json.loads(figures.read_text())
    assert {key: written[key] for key in result} == result
    assert written["bench"] == subject
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "date" in capsys.readouterr().out


@pytest.mark.parametrize("width", [100, 40])
def test_rows_of_decoding_are_lines_without_their_quantiles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setitem(sys.modules, "ftw.bench.decode", SimpleNamespace(run=lambda: DECODING))
    monkeypatch.setattr("ftw.cli.output._WIDTH_OF_FILES", width)
    assert main(["bench", "decode"]) == 0
    out = capsys.readouterr().out
    row = next(line.split() for line in out.splitlines() if "14922" in line)
    assert " ".join(row) == "Qwen3-30B-A3B 12 of 48 host, hot 64MiB 14922 530 593.5 24576 411904 5653"
    assert any(line.split()[-1] == "1.25" for line in out.splitlines() if "gpu, again" in line)
    assert max(len(line) for line in out.splitlines() if "Qwen3" in line) < 100
    assert "gpu, again" in out
    assert not any(text in out for text in ("…", "1.125", "1.375", "1.1875", "capture"))


def test_picture_that_cannot_be_drawn_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = SimpleNamespace(run=lambda: pytest.fail("measured"))
    monkeypatch.setitem(sys.modules, "ftw.bench.lookup", measured)
    assert main(["bench", "lookup", "--plot", str(tmp_path / "picture.doc")]) == 1
    assert "suffix is '.doc'" in capsys.readouterr().err
    assert main(["bench", "lookup", "--plot", str(tmp_path / "missing" / "picture.png")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_zipf_ids_are_spread_as_words_are() -> None:
    ids = Ids(151_936, torch.device("cpu"))
    drawn = ids.draw("zipf", 8192)
    assert 3700 < drawn.unique().numel() < 4000
    first = ids.by_rank[0]
    assert 550 < (drawn == first).sum() < 780  # 8192 / H(151936), give or take
    ids.shift()
    assert (ids.draw("zipf", 8192) == first).sum() < 20


@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
def test_ids_are_inside_the_table(distribution: str) -> None:
    drawn = Ids(7, torch.device("cpu")).draw(distribution, 5000)
    assert drawn.dtype == torch.int64
    assert set(drawn.tolist()) == set(range(7))
