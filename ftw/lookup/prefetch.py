"""Prefetch: lookups on a side stream, for ids that are known before their rows are needed.

    current stream    ids ──┬── other work ──────────┬── rows
    side stream             └── lookup ── event ─────┘
                          start                     wait

Memory that both streams use is told to torch's allocator, so it is not handed out again before both are done. Inside a
capture the two events become edges of the graph: a prefetch that is started there has to be waited for there.

Copies of a module have prefetches of their own, but one table, and the table knows the side streams of them all: what
changes its hot rows waits for every lookup there, whether somebody has waited for that already, or forgotten it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ftw.errors import LookupArgumentError, printable

if TYPE_CHECKING:
    from collections.abc import Callable


class Prefetch:
    """Rows on their way."""

    def __init__(self, rows: torch.Tensor, done: torch.cuda.Event | None, queue: PrefetchQueue) -> None:
        self._rows: torch.Tensor | None = rows
        self._done = done
        self._queue = queue

    def wait(self) -> torch.Tensor:
        """Make the current stream wait for the rows, and return them; the host does not wait.

        Raises:
            LookupArgumentError: They have been waited for already.
        """
        rows, self._rows = self._rows, None
        if rows is None:
            found = "this prefetch was waited for already, or dropped; its rows are handed out once"
            raise LookupArgumentError(f"{self._queue.subject}: wait: {found}")
        self._queue.remove(self)
        if self._done is not None:
            stream = torch.cuda.current_stream(rows.device)
            stream.wait_event(self._done)
            rows.record_stream(stream)
        return self._queue.finish(rows)

    def drop(self) -> None:
        """Let go of the rows; the queue has let go of this."""
        self._rows = None


class SideStreams:
    """The side streams of lookups in one table."""

    def __init__(self) -> None:
        self._streams: set[torch.cuda.Stream] = set()  # not many: torch has 32 for each device

    def add(self, stream: torch.cuda.Stream) -> None:
        """Take a stream for lookups."""
        self._streams.add(stream)

    def join(self) -> None:
        """Make the current streams wait for all lookups there that were started before.

        While a graph is captured, for those of this capture; an order to others is the caller's of its replays.
        """
        for stream in tuple(self._streams):
            current = torch.cuda.current_stream(stream.device)
            if _is_capturing(stream) == _is_capturing(current):
                current.wait_stream(stream)


class PrefetchQueue:
    """The prefetches of one module that nobody has waited for yet, the oldest first; and where they run.

    Attributes:
        finish: Makes of rows that have been waited for what the module returns.
    """

    def __init__(
        self, name: str, side_streams: SideStreams, finish: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows
    ) -> None:
        self.subject = printable(name)
        self.finish = finish
        self._side_streams = side_streams
        self._started: deque[Prefetch] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, look_up: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> Prefetch:
        """Start a lookup: on a device beside the current stream, after what is queued there now; on a CPU at once."""
        if not (isinstance(ids, torch.Tensor) and ids.is_cuda):
            prefetch = Prefetch(look_up(ids), None, self)
        else:
            stream = self._stream(ids.device)
            stream.wait_stream(torch.cuda.current_stream(ids.device))
            with torch.cuda.stream(stream):
                rows = look_up(ids)
            ids.record_stream(stream)
            prefetch = Prefetch(rows, stream.record_event(), self)
        self._started.append(prefetch)
        return prefetch

    def wait(self) -> torch.Tensor:
        """Wait for the oldest prefetch and return its rows.

        Raises:
            LookupArgumentError: There is none.
        """
        if not self._started:
            raise LookupArgumentError(f"{self.subject}: wait: found no prefetch, start one first")
        return self._started[0].wait()

    def remove(self, prefetch: Prefetch) -> None:
        """Forget a prefetch that is waited for."""
        self._started.remove(prefetch)

    def drop(self) -> None:
        """Forget all prefetches that nobody has waited for."""
        while self._started:
            self._started.popleft().drop()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
            self._side_streams.add(self._streams[device])
        return self._streams[device]

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefetchQueue:
        return PrefetchQueue(self.subject, self._side_streams, self.finish)


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
