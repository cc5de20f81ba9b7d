"""Launches: which of them one compiled kernel does, and that it is compiled once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hot_tables import assert_same, expected_rows, make_hot, random_rows, values_of
from kernel_launches import launch, plan
from packed_tables import random_table

from ftw.kernels.launching import Launch, Launcher, launch_key, launch_once

STORAGE = torch.zeros(256, dtype=torch.uint8)


class FakeKernel:
    """What `@triton.jit` makes of a function; notes what it is called with."""

    def __init__(self, calls: list[tuple[Any, ...]], compiled: Any) -> None:
        self.calls = calls
        self.compiled = compiled

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(("compile", grid, arguments, options))
            return self.compiled

        return call


class FakeCompiled:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.calls.append(("run", grid, arguments))


def make_launch(**changes: Any) -> Launch:
    known = Launch(
        kernel=make_launch,
        grid=(3, 2, 1),
        arguments=(STORAGE, STORAGE[16:].view(torch.int64), None, 0, 32, 1, 2.5),
        constants=(1024, True, make_launch),
        options=(("num_warps", 4),),
    )
    return known._replace(**changes)


def with_argument(number: int, value: Any) -> Launch:
    arguments = list(make_launch().arguments)
    arguments[number] = value
    return make_launch(arguments=tuple(arguments))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(make_launch(kernel=with_argument), id="kernel"),
        pytest.param(make_launch(constants=(2048, True, make_launch)), id="constant"),
        pytest.param(make_launch(constants=(1024, True, with_argument)), id="function"),
        pytest.param(make_launch(options=(("num_warps", 1),)), id="option"),
        pytest.param(make_launch(views=((0, torch.int32),)), id="view"),
        pytest.param(with_argument(0, STORAGE.view(torch.int8)), id="dtype"),
        pytest.param(with_argument(0, STORAGE[4:]), id="address"),
        pytest.param(with_argument(0, None), id="absent_tensor"),
        pytest.param(with_argument(2, STORAGE), id="present_tensor"),
        pytest.param(with_argument(3, 4), id="no_multiple_of_16"),
        pytest.param(with_argument(3, 2**31), id="64_bits"),
        pytest.param(with_argument(4, 1), id="one"),
        pytest.param(with_argument(5, 2), id="not_one"),
        pytest.param(with_argument(6, None), id="absent_float"),
        pytest.param(with_argument(6, 2), id="integer_for_float"),
    ],
)
def test_key_differs_where_another_kernel_is_compiled(other: Launch) -> None:
    assert launch_key(other, 0) != launch_key(make_launch(), 0)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(make_launch(grid=(8192, 1, 1)), id="grid"),
        pytest.param(with_argument(0, STORAGE[32:]), id="address"),
        pytest.param(with_argument(3, 16), id="multiple_of_16"),
        pytest.param(with_argument(4, 2**31 - 16), id="32_bits"),
        pytest.param(with_argument(6, -1.0), id="float"),
    ],
)
def test_key_is_equal_where_one_kernel_does(other: Launch) -> None:
    assert launch_key(other, 0) == launch_key(make_launch(), 0)


def test_key_differs_for_each_device() -> None:
    assert launch_key(make_launch(), 0) != launch_key(make_launch(), 1)


def test_launcher_compiles_once_for_each_key() -> None:
    calls: list[tuple[Any, ...]] = []
    launcher = Launcher()
    kernel = FakeKernel(calls, FakeCompiled(calls))
    launch = make_launch(kernel=kernel, views=((0, torch.int32), (2, torch.int32)))
    launcher.launch(launch, "key")
    launcher.launch(launch._replace(grid=(7, 1, 1)), "key")
    launcher.launch(launch, "another key")
    assert [call[:2] for call in calls] == [("compile", (3, 2, 1)), ("run", (7, 1, 1)), ("compile", (3, 2, 1))]
    compiled_with, options = calls[0][2:]
    assert options == {"num_warps": 4}
    assert compiled_with[0].dtype == torch.int32
    assert compiled_with[0].data_ptr() == STORAGE.data_ptr()
    assert compiled_with[2] is None
    assert calls[1][2] == (*launch.arguments, *launch.constants)


def test_launcher_keeps_nothing_of_what_is_interpreted() -> None:
    calls: list[tuple[Any, ...]] = []
    launcher = Launcher()
    for _ in range(2):
        launcher.launch(make_launch(kernel=FakeKernel(calls, None)), "key")
    assert [call[0] for call in calls] == ["compile", "compile"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_hot launches on the GPU")
@pytest.mark.parametrize("ggml_type", [None, "Q4_0"], ids=["plain", "packed"])
def test_rows_are_equal_with_a_launcher(ggml_type: str | None) -> None:
    table = random_rows(9, 32, torch.bfloat16) if ggml_type is None else random_table(ggml_type, 9, 32)
    made, ids = make_hot(table, [1, 4]), torch.tensor([4, 4, 0, 8, -1, 0])
    out, launcher = torch.empty(6, 32, dtype=torch.bfloat16), Launcher()
    for is_distinct in (False, True, False):
        out.view(torch.uint8).fill_(0xA5)
        launch(made.table, ids, out, ggml_type, hot=made.hot, is_distinct=is_distinct, launcher=launcher)
        wanted = expected_rows(values_of(table, ggml_type, torch.bfloat16), ids)
        assert_same(out, wanted, is_exact=ggml_type is None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_hot launches on the GPU")
def test_plan_is_pure() -> None:
    table, ids = random_rows(9, 32, torch.bfloat16), torch.tensor([1, 2])
    out = torch.full((2, 64), 0xA5, dtype=torch.uint8).view(torch.bfloat16)
    (first,), (second,) = (plan(table, ids, out) for _ in range(2))
    assert launch_key(first, None) == launch_key(second, None)
    assert (out.view(torch.uint8) == 0xA5).all()
    launch_once(first)
    assert_same(out, expected_rows(table, ids))
