"""Launches that are kept: what is kept is what the next lookup of its kind needs, and nothing of the caller's."""

import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_launches import plan

from ftw.kernels import launching
from ftw.kernels.jit.lookup_triton import lookup_kernel
from ftw.kernels.launching import Launch, LaunchCache, launch_key

TABLE = torch.randn(9, 16, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)


class FakeCompiled:
    """What Triton compiles a kernel to; notes how it is launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.calls.append(("through Triton", grid, arguments))

    def run(self, *arguments: Any) -> None:
        self.calls.append(("directly", *arguments))


class Chain:
    """Triton's chain of hooks."""

    def __init__(self, *calls: object) -> None:
        self.calls = list(calls)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for what Triton knows of hooks, and for torch's stream."""
    made = SimpleNamespace(launch_enter_hook=Chain(), launch_exit_hook=Chain())
    known = SimpleNamespace(__version__="3.6.0", knobs=SimpleNamespace(runtime=made))
    monkeypatch.setitem(sys.modules, "triton", known)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: f"stream of {device}", raising=False)
    return made


def keep(cache: LaunchCache, key: object, ids: torch.Tensor, compiled: object) -> tuple[Launch, torch.Tensor]:
    """Keep a lookup as if it had just been compiled and launched."""
    out = torch.empty(ids.numel(), 16, dtype=TABLE.dtype)
    (launch,) = plan(TABLE, ids, out)
    cache.launcher._compiled[launch_key(launch, ids.get_device())] = compiled
    cache.keep(key, launch, ids, out)
    return launch, out


def test_kept_launch_takes_new_addresses(runtime: SimpleNamespace) -> None:
    cache, calls = LaunchCache(), []
    launch, _ = keep(cache, "key", torch.tensor([0, 1, 2]), FakeCompiled(calls))
    assert launch.kernel is lookup_kernel  # imported above: with the fake in place Triton cannot be
    assert cache.find("other") is None
    found = cache.find("key")
    assert found is not None
    found.launch(4096, 8192)
    found.launch(1, 2)
    for call, addresses in zip(calls, [(4096, 8192), (1, 2)], strict=True):
        head, arguments = call[:10], call[10:]
        assert head == ("directly", *launch.grid, "stream of -1", "function", "metadata", None, None, None)
        assert arguments[0] is launch.arguments[0]  # host memory: Triton asks for the device's address
        assert arguments[1:3] == addresses
        assert arguments[3:] == (*launch.arguments[3:], *launch.constants)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("hook", [Chain(print), print], ids=["chain", "function"])
def test_hooks_of_a_profiler_are_called(runtime: SimpleNamespace, name: str, hook: object) -> None:
    cache, calls = LaunchCache(), []
    launch, _ = keep(cache, "key", torch.tensor([0]), FakeCompiled(calls))
    setattr(runtime, name, hook)
    found = cache.find("key")
    assert found is not None
    found.launch(4096, 8192)
    assert calls[0][:2] == ("through Triton", launch.grid)
    setattr(runtime, name, None)
    found.launch(4096, 8192)
    assert calls[1][0] == "directly"


@pytest.mark.parametrize(
    ("version", "way"),
    [
        ("3.3.1", "through Triton"),
        ("3.4.0", "directly"),
        ("3.6.0+git9c288bc5", "directly"),
        ("3.9.0", "directly"),
        ("3.10.0", "through Triton"),
        ("3.40.0", "through Triton"),
        ("4.4.0", "through Triton"),
        (None, "through Triton"),
    ],
    ids=str,
)
def test_triton_of_an_unknown_version_is_called(
    runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, version: str | None, way: str
) -> None:
    """Only what is known to take its arguments in this order is launched without asking."""
    named = {} if version is None else {"__version__": version}
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(**named, knobs=SimpleNamespace(runtime=runtime)))
    cache, calls = LaunchCache(), []
    launch, _ = keep(cache, "key", torch.tensor([0]), FakeCompiled(calls))
    found = cache.find("key")
    assert found is not None
    found.launch(4096, 8192)
    arguments = (launch.arguments[0], 4096, 8192, *launch.arguments[3:], *launch.constants)
    rest = ("stream of -1", "function", "metadata", None, None, None, *arguments)
    assert calls == [(way, *launch.grid, *rest) if way == "directly" else (way, launch.grid, arguments)]


@pytest.mark.parametrize("triton", [None, SimpleNamespace()], ids=["not-imported", "without-knobs"])
def test_triton_that_does_not_tell_of_hooks_is_called(
    runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, triton: object
) -> None:
    cache, calls = LaunchCache(), []
    keep(cache, "key", torch.tensor([0]), FakeCompiled(calls))
    monkeypatch.setitem(sys.modules, "triton", triton)
    found = cache.find("key")
    assert found is not None
    found.launch(4096, 8192)
    assert calls[0][0] == "through Triton"
    assert launching._has_hooks()


def test_what_is_interpreted_is_not_kept() -> None:
    cache = LaunchCache()
    ids = torch.tensor([0])
    out = torch.empty(1, 16, dtype=TABLE.dtype)
    cache.keep("key", *plan(TABLE, ids, out), ids, out)
    assert cache.find("key") is None


def test_ids_and_output_are_not_kept_alive() -> None:
    cache = LaunchCache()
    ids = torch.tensor([0, 1])
    launch, out = keep(cache, "key", ids, FakeCompiled([]))
    references = [weakref.ref(ids), weakref.ref(out)]
    del ids, out, launch
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_not_more_is_kept_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MAX_CACHED", 3)
    cache = LaunchCache()
    for number in range(10):
        keep(cache, number, torch.tensor([number]), FakeCompiled([]))
        assert cache.find(number) is not None
        assert sum(cache.find(other) is not None for other in range(10)) <= 3
