"""Ctrl-C at any moment of the installed command: it ends at once and without a traceback."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from builders import llama_config, llama_tensors, write_checkpoint

COMMAND = Path(sys.executable).with_name("ftw")
SIGINT_BIT = 1 << (signal.SIGINT - 1)
ENDINGS = [
    (-signal.SIGINT, []),  # while it starts, or has nothing left to do
    (130, ["ftw: error: interrupted"]),
    (0, []),  # it was done before
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "src", llama_tensors(), llama_config())


def catches_interrupts(process: subprocess.Popen[str]) -> bool:
    """Tell whether a process has a handler for SIGINT, as Python installs one while it starts."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return bool(int(next(line.split()[1] for line in lines if line.startswith("SigCgt:")), 16) & SIGINT_BIT)


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the command and return it as soon as it is ours; what comes before is Python's own start."""
    command = [COMMAND, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for state in (True, False):
        while catches_interrupts(process) is not state:
            assert process.poll() is None, "it ended before it left SIGINT to the system"
            os.sched_yield()
    return process


def test_installed_command_is_the_one_that_leaves_interrupts_to_the_system() -> None:
    assert "from ftw_command import run" in COMMAND.read_text(), "an older state is installed: pip install --editable ."


@pytest.mark.parametrize("command", ["inspect", "convert", "verify"], ids=str)
def test_interrupt_at_any_moment_ends_the_command_without_a_traceback(
    source: Path, tmp_path: Path, command: str
) -> None:
    moments = random.Random(1)
    target = [tmp_path / "out", "--overwrite"] if command == "convert" else []
    seen = set()
    for number in range(40):
        process = start(command, source, *target)
        try:
            process.wait(0 if number == 0 else moments.uniform(0, 0.3))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        lines = process.communicate(timeout=60)[1].splitlines()
        told = [line for line in lines if not line.startswith("ftw: warning: ")]  # that a part is kept
        assert (process.returncode, told) in ENDINGS
        seen.add(process.returncode)
    assert -signal.SIGINT in seen


def test_interrupt_that_the_shell_ignores_is_ignored(source: Path) -> None:
    """As that of a job in the background of a script."""
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", COMMAND, "inspect", source]
    process = subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.poll() is None and "python" not in Path(f"/proc/{process.pid}/cmdline").read_text():
        os.sched_yield()
    for _ in range(50):
        process.send_signal(signal.SIGINT)
        try:
            process.wait(0.01)
        except subprocess.TimeoutExpired:
            continue
        break
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "safetensors, LlamaForCausalLM" in out
