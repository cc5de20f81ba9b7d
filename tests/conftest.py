"""Set-up that has to come before torch and triton are imported."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

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
    """Give tests marked `alone` to one worker of pytest-xdist; skip what needs a GPU where there is none."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("alone"):
                item.add_marker(pytest.mark.xdist_group("alone"))
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
