"""LaunchCache: launches of lookups in one table, kept for the lookups like them, of which only ids and output are new.

What a launch depends on besides the table is its key: device, dtype, number and alignment of the ids, alignment of the
output, and the columns. A lookup that finds its key is like one that has passed all checks, so it needs none of them,
no plan, and nothing of what Triton does to find a compiled kernel: most of what an eager lookup costs on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.kernels.launching import CachedLaunch, Launch, Launcher, launch_key

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

_MAX_KEPT = 4096  # of some hundred bytes each; an engine has as many keys as it has sizes of batches


class LaunchCache:
    """Launches of one table, which they keep alive.

    Attributes:
        launcher: Keeps the compiled kernels.
    """

    def __init__(self) -> None:
        self.launcher = Launcher()
        self._kept: dict[Hashable, CachedLaunch] = {}

    def find(self, key: Hashable) -> CachedLaunch | None:
        """Return what is kept under a key; launch it with the addresses of ids and output, in this order."""
        return self._kept.get(key)

    def keep(self, key: Hashable, launch: Launch, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Keep a launch that reads these ids and writes this output, under a key that tells all it depends on.

        It has been launched before, by `launcher`; what Triton's interpreter runs is not kept.
        """
        compiled = self.launcher.compiled(launch_key(launch, ids.get_device()))
        if compiled is None:
            return
        if len(self._kept) >= _MAX_KEPT:
            self._kept.clear()
        ids_at, out_at = (
            next(at for at, found in enumerate(launch.arguments) if found is wanted) for wanted in (ids, out)
        )
        arguments = list(launch.arguments)
        arguments[ids_at] = arguments[out_at] = None  # their memory is the caller's
        kept = launch._replace(arguments=tuple(arguments))
        self._kept[key] = CachedLaunch(compiled, kept, (ids_at, out_at), ids.get_device())
