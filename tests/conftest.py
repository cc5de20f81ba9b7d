"""Set-up that has to come before torch and triton are imported."""

import gc
import os
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from hub_server import HubServer

# Triton decides when a kernel is defined whether it interprets it, so this stands before any kernel is imported.
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The same examples each time, at any speed; `pytest --hypothesis-profile fresh` draws others.
settings.register_profile("fresh", database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repo", settings.get_profile("fresh"), derandomize=True)
settings.load_profile("repo")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests marked `alone` to one worker, and skip what this machine or its libraries cannot run."""
    has_workers = config.pluginmanager.hasplugin("xdist")
    for item in items:
        if has_workers and item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.xdist_group("alone"))
        reason = _reason_to_skip(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _reason_to_skip(item: pytest.Item) -> str:
    from ftw.ggml_types import LATER_TYPES, ggml_types_by_name

    if not HAS_GPU and item.get_closest_marker("gpu"):
        return "needs a GPU"
    needed = [mark.args for mark in item.iter_markers("oracle")]
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    named = [value for value in parameters if isinstance(value, str) and value in LATER_TYPES]
    needed += [("gguf", LATER_TYPES[name][1]) for name in named if name not in ggml_types_by_name()]
    for library, release in needed:
        if _numbers(version(library)) < _numbers(release):
            return f"compares with what {library} has since {release}"
    return ""


@pytest.fixture(autouse=True, scope="module")
def _modules_are_no_garbage(request: pytest.FixtureRequest) -> None:
    """Take what is imported by now out of later collections: transformers alone makes each of them take a second."""
    if "offloading" in request.path.parts:  # which takes all in again by itself, each time
        gc.unfreeze()
        return
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter take modules apart at its end; libraries complain of leaks otherwise."""
    gc.unfreeze()


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in release.split(".") if number.isdigit())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[HubServer]":
    """A hub without repositories, and an empty cache."""
    from hub_server import serving_hub

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with serving_hub(tmp_path, monkeypatch) as server:
        yield server
