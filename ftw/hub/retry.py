"""Another try of what failed at the hub: after how long, how often, and which failures are worth it.

What huggingface_hub tries again depends on its release, and all of them give up at once on some: a listing, an answer
of 5xx or a reset in the middle of a download, bytes that are not those which the hub lists. One of these would end a
fetch of hours.
"""

from __future__ import annotations

import logging
import time

from ftw.hub.errors import first_line, is_transient, retry_after

_log = logging.getLogger("ftw")

WAITS = (1, 4, 15, 60)  # seconds before the second try, the third, …
MAX_WAIT = 300  # seconds; the hub counts requests in windows of five minutes


def wait_to_retry(what: str, error: BaseException, tries: int, waits: tuple[int, ...] = WAITS) -> bool:
    """Sleep and return True where another try is worth it; return False at once where not.

    Args:
        what: What is tried, for the log.
        error: Why the last try failed.
        tries: How many there were.
        waits: Seconds after each; there is one try more than these.
    """
    if tries > len(waits) or not is_transient(error):
        return False
    wait = max(retry_after(error) or 0, waits[tries - 1])
    if wait > MAX_WAIT:
        return False
    _log.warning("%s: try %d of %d failed: %s; the next in %d s", what, tries, len(waits) + 1, first_line(error), wait)
    time.sleep(wait)
    return True
