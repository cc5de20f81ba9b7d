"""Set-up that has to come before torch and triton are imported."""

import os
import time
from collections.abc import Iterator
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[HubServer]":
    """A hub without repositories, and an empty cache."""
    from hub_server import serving_hub

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with serving_hub(tmp_path, monkeypatch) as server:
        yield server
