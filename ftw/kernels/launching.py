"""Launches of kernels as values, each way to launch one costing less Python than the one before.

    launch_once     through Triton, which compiles: 15 to 25 µs on an H200's host (2026-11-29)
    Launcher        what it has compiled, found by all that Triton specialises on: 9 µs
    LaunchCache     what has been launched for a lookup like this one, of which only ids and output are new

What a cached launch depends on besides the table is its key: device, dtype, number and alignment of the ids, alignment
of the output, and the columns. A lookup that finds its key is like one that has passed all checks. So it needs none, no
plan, and nothing of what Triton does to find a compiled kernel: most of what an eager lookup costs on the host.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable

_ALIGNMENT = 16  # Triton compiles addresses and integers that are multiples of it apart
_MAX_CACHED = 4096  # launches of some hundred bytes each; an engine has as many keys as it has sizes of batches
_MAX_INT32 = torch.iinfo(torch.int32).max
_MIN_INT32 = torch.iinfo(torch.int32).min
_IS_HIP = torch.version.hip is not None
# Whose `CompiledKernel.run` takes (grid x, y, z, stream, function, packed metadata, launch metadata, enter hook, exit
# hook, *arguments), and integers as pointers: read in each of them for CUDA and HIP, run on an H200 in 3.6.
_KNOWN_TRITON = frozenset({"3.4", "3.5", "3.6", "3.7", "3.8", "3.9"})


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes:
        kernel: The `@triton.jit` function.
        grid: Programs along each axis.
        arguments: In the order of the kernel's signature; None for what it goes without.
        constants: Its constexprs, which follow in the signature.
        options: Of the compiler, pairs of name and value.
        views: `(number of an argument, dtype)`: as what a tensor's memory is read and written, whatever its own dtype.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    views: tuple[tuple[int, torch.dtype], ...] = ()


class Launcher:
    """Keeps compiled kernels, and launches them without asking Triton which one is meant."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Any] = {}

    def compiled(self, key: Hashable) -> Any:
        """Return what was compiled under a key; None where nothing was."""
        return self._compiled.get(key)

    def launch(self, launch: Launch, key: Hashable) -> None:
        """Launch on the current device and stream; through Triton, which compiles, where the key is new.

        Args:
            launch: What to launch.
            key: Differs wherever another compiled kernel is needed: `launch_key`, or what tells as much.
        """
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[launch.grid](*launch.arguments, *launch.constants)
            return
        compiled = launch_once(launch)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[key] = compiled


class CachedLaunch:
    """What Triton has compiled for a launch, with all arguments but two, which are addresses.

    It goes round all that `CompiledKernel.__getitem__` does for hooks where there are none: making a dictionary of the
    launch and calling two chains of nothing; but only in versions of Triton where what it calls is known, and through
    `__getitem__` in all others. Tensors on the device are bound as their addresses, as which Triton's
    launchers take them without asking the driver where they lie; the binding keeps them alive.
    """

    __slots__ = ("_arguments", "_at", "_compiled", "_constants", "_device", "_grid", "_keeps", "_run")

    def __init__(self, compiled: Any, launch: Launch, at: tuple[int, int], device: int) -> None:
        self._compiled = compiled
        self._grid = launch.grid
        self._constants = launch.constants
        self._at = at
        self._device = device
        self._keeps = launch.arguments
        self._run = compiled.run if _is_known_triton() else None
        self._arguments = [
            argument.data_ptr() if isinstance(argument, torch.Tensor) and argument.is_cuda else argument
            for argument in launch.arguments
        ]

    def launch(self, first: int, second: int) -> None:
        """Launch on the device, which is the current one, and its current stream, with two addresses filled in."""
        arguments = self._arguments.copy()
        arguments[self._at[0]] = first
        arguments[self._at[1]] = second
        if self._run is None or _has_hooks():
            self._compiled[self._grid](*arguments, *self._constants)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        function, metadata = self._compiled.function, self._compiled.packed_metadata
        self._run(*self._grid, stream, function, metadata, None, None, None, *arguments, *self._constants)


class LaunchCache:
    """Launches of lookups in one table, which they keep alive.

    Attributes:
        launcher: Keeps the compiled kernels.
    """

    def __init__(self) -> None:
        self.launcher = Launcher()
        self._cached: dict[Hashable, CachedLaunch] = {}

    def find(self, key: Hashable) -> CachedLaunch | None:
        """Return what is kept under a key; launch it with the addresses of ids and output, in this order."""
        return self._cached.get(key)

    def keep(self, key: Hashable, launch: Launch, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Keep a launch that reads these ids and writes this output, under a key that tells all it depends on.

        It has been launched before, by `launcher`; what Triton's interpreter runs is not kept.
        """
        compiled = self.launcher.compiled(launch_key(launch, ids.get_device()))
        if compiled is None:
            return
        if len(self._cached) >= _MAX_CACHED:
            self._cached.clear()
        ids_at, out_at = (
            next(at for at, found in enumerate(launch.arguments) if found is wanted) for wanted in (ids, out)
        )
        arguments = list(launch.arguments)
        arguments[ids_at] = arguments[out_at] = None  # their memory is the caller's
        launch = launch._replace(arguments=tuple(arguments))
        self._cached[key] = CachedLaunch(compiled, launch, (ids_at, out_at), ids.get_device())


def _is_known_triton() -> bool:
    version = getattr(sys.modules.get("triton"), "__version__", "")
    return ".".join(version.split(".")[:2]) in _KNOWN_TRITON


def _has_hooks() -> bool:
    """Tell whether somebody, such as a profiler, wants to be called at each launch; true where Triton does not tell."""
    runtime = getattr(getattr(sys.modules.get("triton"), "knobs", None), "runtime", None)
    if runtime is None:
        return True
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def launch_all(launches: list[Launch], launcher: Launcher | None, device: int | None) -> None:
    """Launch one after another on the current stream of the device, which is the current one."""
    for launch in launches:
        if launcher is None:
            launch_once(launch)
        else:
            launcher.launch(launch, launch_key(launch, device))


def launch_once(launch: Launch) -> Any:
    """Launch through Triton on the current device and stream; return what it has compiled, None if interpreted."""
    arguments = list(launch.arguments)
    for number, dtype in launch.views:
        if arguments[number] is not None:
            arguments[number] = arguments[number].view(dtype)
    return launch.kernel[launch.grid](*arguments, *launch.constants, **dict(launch.options))


def launch_key(launch: Launch, device: int | None) -> Hashable:
    """Return what tells a launch's compiled kernel from every other: all that Triton specialises on, and the device."""
    kinds: list[Any] = []
    for argument in launch.arguments:
        if isinstance(argument, torch.Tensor):
            kinds.append(argument.dtype)
            kinds.append(argument.data_ptr() % _ALIGNMENT == 0)
            if _IS_HIP:  # there the compiler is told that offsets fit into 32 bits
                kinds.append(argument.untyped_storage().size() <= _MAX_INT32)
        elif isinstance(argument, int):
            kinds.append(_kind_of_integer(argument))
        else:
            kinds.append(argument if argument is None else "float")
    # Triton's functions and types are never collected, and slow to hash.
    constants = tuple([value if isinstance(value, int) else id(value) for value in launch.constants])
    return (device, id(launch.kernel), *kinds, constants, launch.options, launch.views)


def _kind_of_integer(value: int) -> str:
    if value == 1:
        return "1"  # compiled in
    width = "i32" if _MIN_INT32 <= value <= _MAX_INT32 else "i64"
    return width if value % _ALIGNMENT else width + " of 16"
