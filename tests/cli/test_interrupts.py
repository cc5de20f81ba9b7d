"""Ctrl-C at any moment of the installed command: it ends at once and without a traceback."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from builders import llama_config, llama_tensors, write_checkpoint
from ftw.cli import main as main_module
from interrupts import interruptible

COMMAND = Path(sys.executable).with_name("ftw")
ENDINGS = [
    (-signal.SIGINT, []),  # while it starts, or has nothing left to do
    (130, ["ftw: error: interrupted"]),
    (0, []),  # it was done before
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "src", llama_tensors(), llama_config())


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the command and return it as soon as it has left SIGINT to the system; before is Python's own start."""
    script = (
        "import signal\n"
        "change = signal.signal\n"
        "def tell(*arguments):\n"
        "    signal.signal = change\n"
        "    change(*arguments)\n"
        "    print('ready', flush=True)\n"
        "signal.signal = tell\n"
        "import ftw_command\n"
        "ftw_command.run()\n"
    )
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with interruptible():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
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
    for number in range(20):
        process = start(command, source, *target)
        try:
            process.wait(0 if number == 0 else moments.uniform(0, 0.3))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        lines = process.communicate(timeout=600)[1].splitlines()
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
    out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, "")
    assert "safetensors, LlamaForCausalLM" in out


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError('in a destructor')"], ids=["interrupt", "error"])
def test_interrupt_in_a_destructor_is_not_lost(error: str) -> None:
    """As in the callbacks of Python's own import system, which has swallowed them otherwise."""
    script = (
        "import importlib, sys, time\n"
        "command = importlib.import_module('ftw.cli.main')\n"
        "class Last:\n"
        f"    def __del__(self): raise {error}\n"
        "def work(**_):\n"
        "    Last()\n"
        "    for _ in range(600 if sys.argv[1] == 'interrupt' else 1): time.sleep(0.1)\n"
        "command.app = work\n"
        "command.run(['inspect'])\n"
    )
    expects_interrupt = error == "KeyboardInterrupt"
    command = [sys.executable, "-c", script, "interrupt" if expects_interrupt else ""]
    with interruptible():
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if expects_interrupt:
        assert (process.returncode, process.stderr) == (130, "ftw: error: interrupted\n")
    else:
        assert process.returncode == 0
        assert "ValueError: in a destructor" in process.stderr


def test_interrupt_that_python_wraps_is_one() -> None:
    """As it does where a class is being made; Python 3.12 does not any more."""

    def work(**_: object) -> None:
        raise RuntimeError("Error calling __set_name__ on 'cached_property' instance") from KeyboardInterrupt()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main_module, "app", work)
        assert main_module.main([]) == 130


def test_interrupt_after_the_last_word_is_no_traceback() -> None:
    script = (
        "import importlib, signal\n"
        "command = importlib.import_module('ftw.cli.main')\n"
        "change, calls = command._change_interrupts, []\n"
        "def interrupted(old, new):\n"
        "    calls.append(new)\n"
        "    if len(calls) == 2: signal.raise_signal(signal.SIGINT)\n"
        "    change(old, new)\n"
        "command._change_interrupts = interrupted\n"
        "command.run(['--version'])\n"
    )
    command = [sys.executable, "-c", script]
    with interruptible():
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (process.returncode, process.stderr) == (130, "")
    assert process.stdout.startswith("ftw ")
