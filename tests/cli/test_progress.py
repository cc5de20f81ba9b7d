"""Progress on stderr: one JSON object per second, or nothing; never on stdout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import llama_config, llama_tensors, write_checkpoint
from ftw.cli import progress as module
from ftw.cli.main import main
from ftw.cli.progress import show_progress

KEYS = ["event", "command", "done_bytes", "total_bytes", "bytes_per_second", "eta_seconds"]


class Clock:
    """Time, that passes by the second whenever the progress waits for its next turn."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "src", llama_tensors(), llama_config())


def objects(text: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in text.splitlines()]
    assert all(list(entry) == KEYS for entry in found)
    return found


@pytest.mark.parametrize("command", ["convert", "verify"], ids=str)
def test_json_progress_begins_and_ends(
    capsys, monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, command: str
) -> None:
    monkeypatch.setattr(module, "_INTERVAL", 600)
    arguments = [str(tmp_path / "out")] if command == "convert" else []
    assert main([command, str(source), *arguments, "--progress", "json", "--json"]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    first, last = objects(err)
    assert first == dict(zip(KEYS, ["progress", command, 0, None, 0, None], strict=True))
    assert last["done_bytes"] == last["total_bytes"] == 2 * 1024 + 128 + 16
    assert last["eta_seconds"] == 0.0


def test_json_progress_of_a_failure_ends_before_the_error(
    capsys, monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_INTERVAL", 600)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("x")
    assert main(["convert", str(source), str(tmp_path / "out"), "--progress", "json"]) == 1
    *lines, error = capsys.readouterr().err.splitlines()
    assert [entry["event"] for entry in objects("\n".join(lines))] == ["progress", "progress"]
    assert error.startswith("ftw: error: ")


def test_rate_and_time_left_are_those_of_the_last_seconds(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    progress = module._JsonProgress("convert")
    done = 0
    for second in range(30):  # 100 bytes a second, and then 10
        done += 100 if second < 15 else 10
        progress._update(done, 2000)
        clock.now += 1
        progress._print()
    entries = objects(capsys.readouterr().err)
    assert [entry["bytes_per_second"] for entry in entries[10:15]] == [100] * 5
    assert entries[-1]["bytes_per_second"] == 10
    assert entries[-1]["eta_seconds"] == (2000 - 1650) / 10


def test_json_progress_comes_while_nothing_moves(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_INTERVAL", 0.001)
    with show_progress("verify", "json") as update:
        update(5, 10)
        seen = 0
        while seen < 3:
            seen += len(capsys.readouterr().err.splitlines())


def test_no_progress_says_nothing(capsys) -> None:
    with show_progress("verify", "none") as update:
        update(5, 10)
    assert capsys.readouterr() == ("", "")


def test_bar_stays_away_where_stderr_is_no_terminal(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ftw.cli", "convert", source, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")


def test_who_no_longer_listens_to_progress_is_no_failure(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ftw.cli", "convert", source, tmp_path / "out", "--progress", "json", "--json"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writing, timeout=600)
    os.close(writing)
    assert done.returncode == 0
    assert json.loads(done.stdout)["num_tensors"] == 4
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([*command, "--overwrite"], stdout=subprocess.PIPE, stderr=full, timeout=600)
    assert (done.returncode, json.loads(done.stdout)["num_tensors"]) == (0, 4)
