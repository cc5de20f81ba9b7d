"""RunReader: fills a buffer with the bytes of a run's tensors, which need not lie where the run wants them.

Around the page cache only whole blocks can be read, while tensors of a safetensors file or a GGUF begin at any byte. So
each piece of a run is left where its blocks put it, up to a block further on for each piece before it; whoever takes
the checksum moves it on the way, while it is in the processor's cache.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ftw.weight_file import DIRECT_ALIGNMENT, DIRECT_MIN_JOB_NBYTES, OpenFile

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.layout import Piece, Run
    from ftw.weight_file import WeightFile


def buffer_nbytes(run_nbytes: int) -> int:
    """Return how many bytes a buffer for runs of `run_nbytes` needs."""
    max_shifts = run_nbytes // DIRECT_MIN_JOB_NBYTES + 1  # shorter pieces are not shifted
    return run_nbytes + max_shifts * DIRECT_ALIGNMENT


class RunReader:
    """Reads runs of a checkpoint; several threads may do so at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def read(self, run: Run, buffer: memoryview) -> list[int]:
        """Read the bytes of a run's pieces; return at which byte of the buffer those of each begin.

        That is never before `Piece.start`, and each lies after the one before it, so that they may be moved to there
        one after another.

        Args:
            run: What to read.
            buffer: `buffer_nbytes` bytes, at a page's start.

        Raises:
            CheckpointError: A file ends before, or has changed since it was first seen.
            OSError: The disk fails; it names the file.
        """
        places: list[int] = []
        shift = 0
        opened: dict[WeightFile, OpenFile] = {}
        with contextlib.ExitStack() as files:
            for piece in run.pieces:
                skipped = self._read(piece, buffer[piece.start + shift :], opened, files) if piece.nbytes else 0
                places.append(piece.start + shift + skipped)
                if skipped:  # its last block may reach into the next piece's first
                    shift += DIRECT_ALIGNMENT
            for file in opened.values():
                file.check_unchanged()
        return places

    def _read(
        self, piece: Piece, buffer: memoryview, opened: dict[WeightFile, OpenFile], files: contextlib.ExitStack
    ) -> int:
        """Read one piece; return at which byte of the buffer it begins."""
        found = self._checkpoint.find_bytes(piece.tensor.name, piece.offset, piece.nbytes)
        if found is None:
            self._checkpoint.read_into(piece.tensor.name, buffer[: piece.nbytes], offset=piece.offset)
            return 0
        file, offset = found
        if file not in opened:
            opened[file] = files.enter_context(OpenFile(file))
        return opened[file].read_in_place(offset, piece.nbytes, buffer)
