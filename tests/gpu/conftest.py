"""What every test on a GPU begins with."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    """Make a failure repeat."""
    torch.manual_seed(0)
