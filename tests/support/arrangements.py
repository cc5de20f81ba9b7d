"""Sources of families, changed, as FreeToken's layout: planned from a checkpoint, and read."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from freetoken_sources import read_spec, write_spec

import ftw
from ftw.layouts.freetoken.arrangement import FreetokenArrangement

Spec = dict[str, Any]


class Changed:
    """A checkpoint with other tensors than it has; it can be planned, and not read."""

    def __init__(self, checkpoint: ftw.Checkpoint, tensors: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self.tensors = tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)


@contextmanager
def arranged(spec: Spec, folder: Path) -> Iterator[FreetokenArrangement]:
    """Write a source, open it, and give the arrangement of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with ftw.open_checkpoint(write_spec(spec, folder)) as checkpoint:
        yield FreetokenArrangement(checkpoint)


def change(name: str, edit: Callable[[Spec, dict[str, Any], dict[str, Any]], None]) -> Spec:
    """Return the source of a family as `edit` leaves it: it takes the spec, its config.json and its tensors."""
    spec = copy.deepcopy(read_spec(name))
    edit(spec, spec["files"]["config.json"], spec["tensors"])
    return spec


def read(arrangement: FreetokenArrangement, name: str) -> bytes:
    """Return a tensor's bytes, which ranges of them must equal."""
    nbytes = arrangement.tensors[name].nbytes
    whole = bytearray(nbytes)
    arrangement.read_into(name, whole)
    for start, stop in ((1, nbytes), (nbytes // 3, nbytes // 2), (nbytes // 2 + 1, nbytes)):
        part = bytearray(max(stop - start, 0))
        if part:
            arrangement.read_into(name, part, offset=start)
        assert part == whole[start : max(stop, start)]
    return bytes(whole)
