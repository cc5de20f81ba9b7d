"""`import ftw`, inspect, convert and verify without what macOS and Windows lack; what needs Linux says so in one line.

This is not those systems: only what Python lacks there is taken away, in a process of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw
from gguf import GGMLQuantizationType
from gguf_builder import random_blocks, write_gguf
from places import SUPPORT

SYSTEMS = pytest.mark.parametrize("system", ["macOS", "Windows"])


def run(*arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=SUPPORT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_after_taking_away(system: str, script: str) -> str:
    start = f"import other_system\nother_system.take_away({system!r})\nftw = other_system.import_ftw({system!r})\n"
    return run("-c", start + script)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a checkpoint of each format; one has a tensor that is large enough to go around the page cache."""
    folder = tmp_path_factory.mktemp("sources")
    tensors = {**llama_tensors(), "model.large": torch.arange(5 << 20).to(torch.uint8)}
    plain = write_checkpoint(folder / "safetensors", tensors, llama_config())
    (plain / "notes.txt").write_bytes(b"a\nb\r\n\x1a")
    ftw_folder = write_ftw(folder / "ftw", llama_tensors())
    (ftw_folder / "config.json").write_text(json.dumps(llama_config()))
    blocks = random_blocks(GGMLQuantizationType.Q8_0, rows=64)
    packed = write_gguf(folder / "model.gguf", {"token_embd.weight": blocks, "output.weight": blocks})
    return [plain, packed, ftw_folder]


@pytest.fixture(scope="module")
def here(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return what this system writes and says."""
    out = tmp_path_factory.mktemp("here")
    return out, run("other_system.py", "Linux", out, *sources)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@SYSTEMS
def test_other_system_writes_the_same_bytes(
    system: str, sources: list[Path], here: tuple[Path, str], tmp_path: Path
) -> None:
    out, said = here
    assert run("other_system.py", system, tmp_path, *sources) == said
    assert contents(tmp_path) == contents(out)
    assert len(contents(out)) >= 2 * len(sources)


@SYSTEMS
def test_other_system_reads_and_writes_at_a_position_by_many_threads(system: str, tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from ftw.files import Part, WeightFile, read_parts
path = Path({str(tmp_path / "file")!r})
path.write_bytes(bytes(range(251)) * (64 << 10))
found = bytearray(16_000_001)
read_parts([Part(WeightFile(path), 5, memoryview(found))], num_threads=8)
assert found == path.read_bytes()[5:][:len(found)]
"""
    run_after_taking_away(system, script)


@SYSTEMS
def test_other_system_says_what_needs_linux(system: str) -> None:
    script = """
from ftw.host import resident_nbytes
from ftw.host.shared import open_segment
for call in (lambda: open_segment("a", 5, None, name="table"), resident_nbytes):
    try:
        call()
    except ftw.FtwError as error:
        print(error)
"""
    shared, resident = run_after_taking_away(system, script).splitlines()
    assert shared.startswith("table: shared memory: one table for all processes of a host (share='node') needs Linux")
    assert resident.startswith("/proc/self/statm: resident memory: cannot be read")


@SYSTEMS
def test_other_system_has_no_numa_and_no_wiping_on_forks(system: str) -> None:
    script = """
from ftw.host import HostMemory, count_pages_by_node, read_host_limits
memory = HostMemory(5 << 20, numa_node=0)
memory.view()[:] = bytes(memory.nbytes)
memory.wipe_on_fork()
memory.keep_on_fork()
assert memory.numa_policy == "default"
assert count_pages_by_node(memory.address, memory.nbytes) == {}
assert read_host_limits().available is None
"""
    run_after_taking_away(system, script)
