"""FreeToken's own FTW writer, out of its wheel, without the rest of that package, which needs a GPU's libraries.

Run as a script it is the peer of a conversion, in a process of its own, so that its peak memory can be told:

    python -m ftw.bench.freetoken_writer SOURCE TARGET
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import os
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Bar:
    """Stands in for FreeToken's progress bar, whatever that is asked."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def has_freetoken() -> bool:
    """Tell whether FreeToken's wheel is installed."""
    return _find_module() is not None


def convert_as_freetoken(source: Path, target: Path) -> None:
    """Read every tensor of a safetensors or GGUF checkpoint with the format's library, and write an FTW, synced.

    Raises:
        ModuleNotFoundError: FreeToken is not installed.
    """
    writer = _load_module().FTWWriter(str(target))
    for name, tensor in _iter_tensors(source):
        writer.add_tensor(name, tensor)
    writer.finalize({})
    for path in target.iterdir():  # which it leaves to the kernel
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _iter_tensors(source: Path) -> Iterator[tuple[str, Any]]:
    import gguf
    import torch
    from safetensors import safe_open

    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
    for path in sorted(source.glob("*.gguf")):
        for tensor in gguf.GGUFReader(path).tensors:
            yield tensor.name, torch.from_numpy(tensor.data.copy())


def _find_module() -> Path | None:
    try:
        path = Path(str(importlib.metadata.distribution("freetoken").locate_file("freetoken/checkpoint/ftw.py")))
    except importlib.metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


@functools.cache
def _load_module() -> Any:
    path = _find_module()
    spec = None if path is None else importlib.util.spec_from_file_location("freetoken_checkpoint_ftw", path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("freetoken is not installed")
    stand_ins: dict[str, dict[str, Any]] = {
        "freetoken": {"__path__": []},
        "freetoken.utils": {"__path__": [], "init_logger": lambda *_, **__: logging.getLogger("freetoken")},
        "freetoken.utils.progress": {"byte_bar": lambda *_, **__: _Bar()},
    }
    for name, attributes in stand_ins.items():
        stand_in = types.ModuleType(name)
        vars(stand_in).update(attributes)
        sys.modules[name] = stand_in
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    convert_as_freetoken(Path(sys.argv[1]), Path(sys.argv[2]))
