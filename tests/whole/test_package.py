"""What is published: the source archive, the wheel that is built from it, and the wheel where no checkout is."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from lowest_requirements import lowest_requirements
from places import ROOT

FOLDERS = ("bench", "cli", "docs", "examples", "ftw", "fuzz", "tests")
FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md",
         "ftw_command.py", "pyproject.toml", "setup.py")  # fmt: skip
# Folder of the checkout, to the package that it is installed as.
PACKAGES = {"ftw": "ftw", "cli": "ftw/cli", "bench": "ftw/bench"}
BUILD_SOURCE = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
WHERE = """
import json, ftw, ftw.bench, ftw.cli, ftw_command
print(json.dumps([module.__file__ for module in (ftw, ftw.bench, ftw.cli, ftw_command)]))
"""


class Built(NamedTuple):
    """A copy of what the checkout holds, and what was made of it."""

    tree: Path
    source: Path
    wheel: Path


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that finds no package through the environment, and return what it prints."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build both as `make dist` does, with the setuptools that is installed: without a network."""
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "work"))
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    run(sys.executable, "-c", BUILD_SOURCE, folder, cwd=tree)
    (source,) = folder.glob("*.tar.gz")
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return Built(tree, source, wheel)


@pytest.fixture(scope="module")
def bare(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment of its own, which shares what it depends on with the running one."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", built.wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A folder named in a .pth comes last, and its own .pth files, which an editable install is, are not read.
    shared = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "shared.pth").write_text("\n".join(shared), encoding="utf-8")
    return folder


def test_source_archive_holds_all_that_builds_and_tests_need(built: Built) -> None:
    with tarfile.open(built.source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    made = built.tree / "ftw_toolkit.egg-info"
    needed = {path for path in built.tree.rglob("*") if path.is_file() and path.parent != made}
    assert {path.relative_to(built.tree).as_posix() for path in needed} - held == set()


def test_wheel_holds_every_module_and_nothing_else(built: Built) -> None:
    expected = {"ftw_command.py", "ftw/py.typed"}
    for folder, package in PACKAGES.items():
        paths = (built.tree / folder).rglob("*.py")
        expected |= {f"{package}/{path.relative_to(built.tree / folder).as_posix()}" for path in paths}
    with zipfile.ZipFile(built.wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected


def test_lowest_requirements_are_all_that_the_wheel_asks_for(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode().partition("\n\n")[0]
    required = re.findall(r"^Requires-Dist: (.*)", metadata, re.MULTILINE)
    ranges = [found.partition(";")[0] for found in required if "extra ==" not in found or 'extra == "plot"' in found]
    assert [found.replace(">=", "==") for found in ranges] == lowest_requirements()
    assert [found for found in ranges if not re.fullmatch(r"[\w-]+>=[\d.]+", found)] == []


def test_modules_are_the_installed_ones_without_the_checkout(bare: Path, tmp_path: Path) -> None:
    found = json.loads(run(bare / "bin/python", "-c", WHERE, cwd=tmp_path))
    assert [path for path in found if not Path(path).is_relative_to(bare)] == []


def test_installed_command_runs_the_demo(bare: Path, tmp_path: Path) -> None:
    assert "\nall steps as expected\n" in run(bare / "bin/ftw", "demo", cwd=tmp_path)


def test_installed_package_comes_before_a_checkout_of_its_name(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "ftw").symlink_to(ROOT)
    (tmp_path / "script.py").write_text(WHERE, encoding="utf-8")
    found = json.loads(run(bare / "bin/python", tmp_path / "script.py", cwd=tmp_path))
    assert [path for path in found if not Path(path).is_relative_to(bare)] == []


def test_editable_package_comes_before_a_checkout_of_its_name(tmp_path: Path) -> None:
    """setuptools' finder alone comes too late; `make test` names the checkout in a .pth file as well."""
    site = [Path(path) for path in sys.path if Path(path).name == "site-packages"]
    finders = [path.stem for folder in site for path in folder.glob("__editable___ftw_toolkit_*_finder.py")]
    if not finders:
        pytest.skip("ftw is not installed in editable mode here")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text("\n".join(map(str, site)), encoding="utf-8")
    (packages / "zz.pth").write_text(f"import {finders[0]}; {finders[0]}.install()", encoding="utf-8")
    (tmp_path / "ftw").symlink_to(ROOT)
    (tmp_path / "script.py").write_text("import ftw; print(ftw.__file__)", encoding="utf-8")
    assert run(python, tmp_path / "script.py", cwd=tmp_path) == "None\n"
    steps = run("make", "-n", f"VENV={tmp_path / 'venv'}", f"{tmp_path / 'venv'}/.installed-dev", cwd=ROOT)
    (step,) = (line for line in steps.splitlines() if line.endswith("ftw-checkout.pth"))
    run("sh", "-c", step, cwd=ROOT)
    assert run(python, tmp_path / "script.py", cwd=tmp_path) == f"{ROOT / 'ftw' / '__init__.py'}\n"


@pytest.mark.parametrize("command", ["inspect", "convert", "verify"])
def test_installed_command_explains_itself(bare: Path, tmp_path: Path, command: str) -> None:
    assert f"ftw {command}" in run(bare / "bin/ftw", command, "--help", cwd=tmp_path)
