"""What `ftw demo` prints can be typed: its commands, its Python, and what it proposes next."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ftw.cli import demo
from ftw.cli.main import main


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder that the demo has kept, with a space in its name, and what was printed."""
    folder = tmp_path_factory.mktemp("the demo") / "kept"
    done = subprocess.run(
        [sys.executable, "-c", "from ftw.cli.main import run; run()", "demo", "--folder", str(folder)],
        capture_output=True, text=True, env={"PATH": "/nowhere"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def proposed(out: str, heading: str) -> list[str]:
    """Return the indented lines below a heading."""
    lines = out.partition(f"\n{heading}\n")[2].splitlines()
    end = next((number for number, line in enumerate(lines) if line and not line.startswith("    ")), len(lines))
    return [line[4:] for line in lines[:end]]


def test_demo_brings_ftw_into_the_shell_first(kept: tuple[Path, str]) -> None:
    activate, check = proposed(kept[1], "to go on:")[:2]
    words = shlex.split(activate, comments=True)
    assert words[0] == "."
    assert Path(words[1]).is_file()
    assert Path(words[1]).is_relative_to(sys.prefix)
    assert check == "ftw --help"


def test_demo_does_not_say_how_where_the_shell_finds_it(
    kept: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_is_on_path", lambda: True)
    demo._propose(kept[0], is_new=False)
    assert proposed(capsys.readouterr().out, "to go on:")[0].startswith("ftw inspect ")


def test_commands_that_the_demo_proposes_work(kept: tuple[Path, str], capfd: pytest.CaptureFixture[str]) -> None:
    commands = [shlex.split(line, comments=True) for line in proposed(kept[1], "to go on:")[2:]]
    assert [command[:2] for command in commands] == [
        ["ftw", name] for name in ("inspect", "inspect", "convert", "verify")
    ]
    for command in commands:
        assert main(command[1:]) == 0, capfd.readouterr().err


def test_code_that_the_demo_shows_and_proposes_runs(kept: tuple[Path, str]) -> None:
    shown = re.search(r"\n\$ python\n(.*?\n)torch\.Size", kept[1], re.DOTALL)
    assert shown is not None
    code = "\n".join(proposed(kept[1], "the same in Python:"))
    assert code.strip() == shown[1].strip()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "torch.Size([4, 256]) torch.bfloat16 zeros for the id outside of the table: True\n"


def test_demo_tells_that_its_folder_is_deleted(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    out = capfd.readouterr().out
    folder = re.search(r"^the folder (.*) is deleted again$", out, re.MULTILINE)
    assert folder is not None
    assert not Path(folder[1]).exists()
    assert f"\n    ftw demo --folder {demo._FOLDER}  #" in out
    assert folder[1] not in out.partition("\nto go on:\n")[2]


def test_demo_needs_a_new_folder(kept: tuple[Path, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--folder", str(kept[0])]) == 1
    assert capfd.readouterr() == (
        "",
        f"ftw: error: {kept[0]}: folder: it exists, --folder needs the name of a new one\n",
    )
