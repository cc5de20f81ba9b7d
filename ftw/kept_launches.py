"""KeptLaunches: launches of lookups in one table, kept for the lookups like them, of which only ids and output are new.

What a launch depends on besides the table is its key: device, dtype, number and alignment of the ids, alignment of the
output, and the columns. A lookup that finds its key is like one that has passed all checks, so it needs none of them,
no plan, and nothing of what Triton does to find a compiled kernel: most of what an eager lookup costs on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftw.kernels.launching import Launch, Launcher, launch_key

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

_MAX_KEPT = 4096  # of some hundred bytes each; an engine has as many keys as it has sizes of batches


class _Kept(NamedTuple):
    """A launch, what tells its compiled kernel, and where among its arguments ids and output stand."""

    launch: Launch
    compiled_key: Hashable
    ids_at: int
    out_at: int


class KeptLaunches:
    """Launches of one table, which they keep alive.

    Attributes:
        launcher: Keeps the compiled kernels.
    """

    def __init__(self) -> None:
        self.launcher = Launcher()
        self._kept: dict[Hashable, _Kept] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def keep(self, key: Hashable, launch: Launch, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Keep a launch that reads these ids and writes this output, under a key that tells all it depends on."""
        if len(self._kept) >= _MAX_KEPT:
            self._kept.clear()
        places = [next(at for at, found in enumerate(launch.arguments) if found is wanted) for wanted in (ids, out)]
        arguments = list(launch.arguments)
        arguments[places[0]] = arguments[places[1]] = None  # their memory is the caller's
        compiled_key = launch_key(launch, ids.get_device())
        self._kept[key] = _Kept(launch._replace(arguments=tuple(arguments)), compiled_key, *places)

    def launch(self, key: Hashable, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Launch what is kept under a key, on the current stream of the ids' device, which is the current one."""
        (kernel, grid, arguments, constants, options, views), compiled_key, ids_at, out_at = self._kept[key]
        values = list(arguments)
        values[ids_at] = ids
        values[out_at] = out
        self.launcher.launch(Launch(kernel, grid, tuple(values), constants, options, views), compiled_key)
