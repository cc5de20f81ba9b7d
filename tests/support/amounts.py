"""How much of what takes long a run of the tests does: a part of it, or all with FTW_WHOLE=1 (`make test-whole`)."""

import os

IS_WHOLE = os.environ.get("FTW_WHOLE") == "1"


def amount(part: int, whole: int) -> int:
    """Return how often something is done, at random or in a row."""
    return whole if IS_WHOLE else part
