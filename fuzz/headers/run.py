"""One file after another is drawn, opened by ftw, and compared; each has a seed of its own, which draws it again."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import ftw
from fuzz.findings import FindingError
from fuzz.headers import gguf_files, safetensors_files

if TYPE_CHECKING:
    from types import ModuleType

FORMATS: dict[str, ModuleType] = {"safetensors": safetensors_files, "gguf": gguf_files}
MAX_FINDINGS = 20
_SCRATCH = "/dev/shm" if os.path.isdir("/dev/shm") else None


class Finding(NamedTuple):
    """A file that was answered otherwise; `draw` of its format makes it anew from its seed."""

    seed: int
    problem: str
    content: bytes

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.problem}\n    {self.content[:4000]!r}"


def new_seed() -> int:
    """Return a seed that was never there before."""
    return secrets.randbits(32)


def run(checkpoint_format: str, seed: int, *, seconds: float, most: int | None = None) -> tuple[int, list[Finding]]:
    """Draw files for some seconds, or `most` of them, and return how many, and what was found.

    Args:
        checkpoint_format: A key of `FORMATS`.
        seed: Of the first file; the next one's is one more.
        seconds: For how long.
        most: Number of files after which it ends in any case.
    """
    kind = FORMATS[checkpoint_format]
    findings: list[Finding] = []
    count, end = 0, time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="ftw-headers-", dir=_SCRATCH) as folder:
        path = Path(folder) / kind.NAME
        while time.monotonic() < end and count != most and len(findings) < MAX_FINDINGS:
            content = kind.draw(Random(seed + count))
            path.write_bytes(content)
            try:
                _compare(kind, path, content)
            except FindingError as error:
                findings.append(Finding(seed + count, str(error), content))
            count += 1
    return count, findings


def _compare(kind: ModuleType, path: Path, content: bytes) -> None:
    try:
        checkpoint = ftw.open_checkpoint(path)
    except ftw.FtwError as error:
        kind.compare(content, None, error)
        return
    with checkpoint:
        kind.compare(content, checkpoint, None)
