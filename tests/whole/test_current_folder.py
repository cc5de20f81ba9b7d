"""The current folder may be a stranger's: nothing in it that was not named is imported, read or obeyed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import llama_config, llama_tensors, write_checkpoint
from ftw.bench.child import python_command
from ftw.bench.host_memory import peak_of
from ftw.cli.main import main
from matplotlib.image import imread
from places import ROOT

MODULES = [
    "sitecustomize", "usercustomize", "numpy", "torch", "json", "ftw", "xxhash", "typing", "fcntl", "signal", "select",
    "hashlib", "encodings", "matplotlib", "gguf", "safetensors", "typer", "rich", "huggingface_hub", "transformers",
    "triton", "resource", "subprocess", "traps_backend", "inspect", "cli", "conftest", "ftw_command",
]  # fmt: skip
# Each names what a library might look for where it is started.
FILES = [
    "matplotlibrc", "libcuda.so.1", "libcuda.so", "libamdhip64.so", "libc.so.6", ".env", ".netrc", "pyvenv.cfg",
    "python311._pth", "pyproject.toml", "setup.cfg", "config.json", "tokenizer.json", "freetoken_weight.json",
    "fontlist-v390.json", "stdin", "typer.toml", ".numba_config.yaml", "cacert.pem", "hf.toml",
]  # fmt: skip
SETTINGS = """
backend: module://traps_backend
text.usetex: True
text.latex.preamble: \\input{traps}
savefig.facecolor: ff0000
font.family: no-such-font
"""
# What runs in a process of its own: the command, and a record of each file of the folder that is opened. matplotlib
# runs fc-list, found by PATH, once for each user.
PROGRAM = """
import os, sys
folder, seen = os.getcwd(), []
def record(event, arguments):
    if event in ("open", "ctypes.dlopen", "os.listdir", "os.scandir", "shutil.copyfile") and arguments:
        name = arguments[0] if isinstance(arguments[0], (str, bytes)) else ""
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_EXCL:
            return  # made anew, in a folder that is open: nothing that is there can be opened so
        path = os.path.abspath(os.fsdecode(name) or ".")
        if name and event != "os.listdir" and os.path.dirname(path) == folder and os.path.basename(path) in traps:
            seen.append(f"{event} {path}")
    elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec") and arguments[0] not in (sys.executable, "fc-list"):
        seen.append(f"{event} {arguments[0]}")
traps = set(sys.argv.pop().split(os.pathsep))
sys.addaudithook(record)
status = 0
try:
    BODY
finally:
    print("SEEN", *seen, file=sys.stderr)
"""
COMMAND = "import ftw_command\n    ftw_command.run()"


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """Make a folder of traps: a module that is imported leaves a file beside itself."""
    folder = tmp_path / "traps"
    folder.mkdir()
    for name in MODULES:
        trap = "import os\nopen(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'SPRUNG'), 'w').close()\n"
        (folder / f"{name}.py").write_text(trap)
    for name in FILES:
        (folder / name).write_bytes(b"\x00 trap")
    (folder / "matplotlibrc").write_text(SETTINGS)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", llama_tensors(), llama_config())


def run_in(folder: Path, body: str, *arguments: str) -> str:
    """Run a program in a folder of traps as the installed command runs, and check that none has sprung."""
    names = os.pathsep.join(path.name for path in folder.iterdir())
    # -I leaves the current folder out of the search for modules, as it is for a command in a folder of its own.
    command = [sys.executable, "-I", "-c", PROGRAM.replace("BODY", body), *arguments, names]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "SEEN"
    check(folder)
    return done.stdout


def check(folder: Path) -> None:
    assert not (folder / "SPRUNG").exists()
    assert not (folder / "__pycache__").exists()


@pytest.mark.parametrize("options", [[], ["--json"], ["--vram", "8GiB"]], ids=["words", "json", "vram"])
def test_inspect_takes_nothing_of_the_current_folder(traps: Path, source: Path, options: list[str]) -> None:
    assert "model.embed_tokens.weight" in run_in(traps, COMMAND, "inspect", str(source), *options)


def test_convert_and_verify_take_nothing_of_the_current_folder(traps: Path, source: Path, tmp_path: Path) -> None:
    run_in(traps, COMMAND, "convert", str(source), str(tmp_path / "out"), "--embed", "host", "--sha256")
    assert ": ok, " in run_in(traps, COMMAND, "verify", str(tmp_path / "out"), "--against", str(source))
    copied = {path.name for path in (tmp_path / "out").iterdir()}
    assert copied == {"config.json", "freetoken-00000.ftw", "freetoken_weight.json"}


def test_demo_takes_nothing_of_the_current_folder(traps: Path) -> None:
    assert "all steps as expected" in run_in(traps, COMMAND, "demo")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plot_obeys_no_settings_of_the_current_folder(traps: Path, source: Path, tmp_path: Path, suffix: str) -> None:
    picture = tmp_path / f"picture.{suffix}"
    run_in(traps, COMMAND, "inspect", str(source), "--vram", "8GiB", "--plot", str(picture))
    assert main(["inspect", str(source), "--vram", "8GiB", "--plot", str(tmp_path / f"other.{suffix}")]) == 0
    if suffix == "png":
        assert imread(picture)[0, 0].tolist() == [1, 1, 1, 1]
        assert (imread(picture) == imread(tmp_path / "other.png")).all()
    assert picture.stat().st_size > 1000


def test_plot_obeys_nothing_that_another_library_had_matplotlib_read(traps: Path, source: Path, tmp_path: Path) -> None:
    """It has imported matplotlib in the current folder; what it finds afterwards is as it left it."""
    body = """import matplotlib
    seen.clear()
    assert matplotlib.rcParams["text.usetex"]
    import ftw.cli.main as command
    status = command.main(sys.argv[1:])
    assert status == 0 and matplotlib.rcParams["text.usetex"], status"""
    picture = tmp_path / "picture.png"
    run_in(traps, body, "inspect", str(source), "--vram", "8GiB", "--plot", str(picture))
    assert imread(picture)[0, 0].tolist() == [1, 1, 1, 1]


def test_plot_leaves_the_current_folder_what_it_is(traps: Path, tmp_path: Path) -> None:
    body = "import ftw.cli.plot as plot, pathlib\n    plot.check_plot(pathlib.Path('x.png'))\n    print(os.getcwd())"
    assert run_in(traps, body).strip() == str(traps)


@pytest.mark.skipif(sys.platform != "linux", reason="shared tables need Linux")
def test_shared_table_and_its_reaper_take_nothing_of_the_current_folder(traps: Path, source: Path) -> None:
    body = """import ftw
    with ftw.load(sys.argv[1], embed="host", device="cpu", share="node") as model:
        print(model.embedding.num_embeddings)"""
    assert run_in(traps, body, str(source)).strip() == "64"


def test_programs_of_benchmarks_take_nothing_of_the_current_folder(
    traps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(traps)
    assert peak_of("import json, torch, typing, sys; print(int(sys.argv[1]) << 20)", "3") == 3
    inner = python_command("import ftw.cli.main, resource, inspect; print('inner')")
    outer = python_command("import subprocess; subprocess.run(sys.argv[1:], check=True)", *inner)
    done = subprocess.run(outer, capture_output=True, text=True, check=True)
    assert done.stdout == "inner\n"
    check(traps)


def test_no_program_of_ours_is_run_by_dash_c_or_dash_m_alone() -> None:
    """Python would look into the current folder first."""
    for folder in ("ftw", "cli", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            is_allowed = path.name == "child.py"
            assert is_allowed or not any(f'sys.executable, "-{letter}"' in text for letter in "cm"), path
