"""Files that shrink, grow, or are rewritten while they are read give an error or the old bytes, never other ones."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw, write_sharded
from gguf_builder import write_gguf
from inspecting import stored_bytes, tensor_bytes

import ftw
from ftw.files import strict_json

TENSORS = llama_tensors(dtype=torch.float32)


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def rewrite(path: Path) -> None:
    """Write other bytes in place, of the same length, later by the clock of the file system."""
    status = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


CHANGES = (shrink, empty, grow, rewrite)
WRITERS: dict[str, Callable[[Path], Path]] = {
    "model.safetensors": lambda folder: write_checkpoint(folder, TENSORS, llama_config()),
    "b.safetensors": lambda folder: write_sharded(
        folder, {"a.safetensors": {"x": torch.ones(3)}, "b.safetensors": TENSORS}, llama_config()
    ),
    "m.gguf": lambda folder: write_gguf(folder / "m.gguf", {n: t.numpy() for n, t in TENSORS.items()}).parent,
    "freetoken-00000.ftw": lambda folder: write_ftw(folder, TENSORS),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", WRITERS)
def test_file_that_changes_at_any_read_is_refused_or_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Path], None]
) -> None:
    """Change it before each system call that reads it, the first, the second and so on, in a folder made anew."""
    real, refused = os.preadv, 0
    for nth in range(100):
        folder = tmp_path / str(nth)
        folder.mkdir()
        WRITERS[name](folder)
        reads = iter(range(100))

        def change_then_read(
            descriptor: int, views: list[memoryview], offset: int, reads=reads, path=folder / name, nth=nth
        ) -> int:
            if next(reads) == nth:
                change(path)
            return real(descriptor, views, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", change_then_read)
            try:
                with ftw.open_checkpoint(folder) as checkpoint:
                    for tensor, expected in TENSORS.items():
                        assert stored_bytes(checkpoint, tensor) == tensor_bytes(expected)
            except ftw.CheckpointError:
                refused += 1
        if next(reads) <= nth:
            break
    else:
        pytest.fail("reads never end")
    assert refused >= 3


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "freetoken_weight.json"])
def test_json_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "freetoken_weight.json":
        write_ftw(tmp_path, TENSORS)
    else:
        write_sharded(tmp_path, {"a.safetensors": TENSORS}, llama_config())
    content, real = (tmp_path / name).read_bytes(), strict_json.find_impostor

    def grow_first(first: bytes) -> str | None:
        if content.startswith(first):
            (tmp_path / name).write_bytes(content + b" ")
        return real(first)

    monkeypatch.setattr(strict_json, "find_impostor", grow_first)
    with pytest.raises(ftw.CheckpointError, match=f"{name}: json: changed while it was being read"):
        ftw.open_checkpoint(tmp_path)
