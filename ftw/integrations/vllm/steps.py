"""Between steps: hot rows follow what is looked up.

vLLM's worker queues each step on its current stream in `execute_model`; before one step in 64 the hot rows are chosen
anew there, which waits for nothing and moves no address.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu_worker import Worker

if TYPE_CHECKING:
    from ftw.lookup import HostEmbedding

_EVERY = 64
_UPDATES = "ftw_updates"


class HotRowUpdates:
    """Counts the steps of this process, for as long as there are tables with hot rows."""

    def __init__(self) -> None:
        self._tables: weakref.WeakSet[HostEmbedding] = weakref.WeakSet()
        self._steps = 0

    def add(self, tables: list[HostEmbedding]) -> None:
        """Take tables that shall follow."""
        self._tables.update(tables)

    def step(self) -> None:
        """Count a step that is about to be queued."""
        self._steps += 1
        if self._steps % _EVERY == 0:
            for table in self._tables:
                if table.hot is not None:  # it is closed otherwise
                    table.update_hot_rows()


def update_between_steps(tables: list[HostEmbedding]) -> None:
    """Let the hot rows of tables follow the lookups of vLLM's worker in this process."""
    updates = getattr(Worker.execute_model, _UPDATES, None)
    if updates is None:
        updates = HotRowUpdates()
        original = Worker.execute_model

        @functools.wraps(original)
        def execute_model(self: Any, *args: Any, **options: Any) -> Any:
            updates.step()
            return original(self, *args, **options)

        setattr(execute_model, _UPDATES, updates)
        Worker.execute_model = execute_model
    updates.add(tables)
