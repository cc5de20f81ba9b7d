"""What goes wrong with the hub: which errors its requests raise, what they mean, on one line, and another try."""

from __future__ import annotations

import logging
import time
from json import JSONDecodeError
from typing import TYPE_CHECKING, cast

from ftw.errors import printable
from ftw.hub.redaction import redact, redact_queries, shown_endpoint

if TYPE_CHECKING:
    from ftw.hub.ids import HubId

_log = logging.getLogger("ftw")

_NOT_JSON = (JSONDecodeError, UnicodeDecodeError)
_NOT_HTTP = ("builtins", "huggingface_hub")
_TRANSIENT_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
# Another try: huggingface_hub's own depend on its release, and all of them give up at once on some failures, any of
# which would end a fetch of hours: a listing, an answer of 5xx, a reset in the middle, bytes that are not those listed.
WAITS = (1, 4, 15, 60)  # seconds before the second try, the third, …
MAX_WAIT = 300  # seconds; the hub counts requests in windows of five minutes


def http_errors() -> tuple[type[Exception], ...]:
    """Return what huggingface_hub's requests raise: errors of requests, httpx or httpx2, by its release."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The library's most general error: its others are no bases of HfHubHTTPError.
    foreign = [base for base in HfHubHTTPError.__mro__ if base.__module__.split(".")[0] not in _NOT_HTTP]
    return (cast("type[Exception]", foreign[-1]), OfflineModeIsEnabled, *_NOT_JSON)


def _is_transient(error: BaseException) -> bool:
    """Tell whether another try may do: the hub was busy or out of order, or the bytes did not come as they are."""
    from huggingface_hub import constants
    from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, (OfflineModeIsEnabled, FileMetadataError, *_NOT_JSON)):
        return False
    if not isinstance(error, HfHubHTTPError):
        return isinstance(error, (*http_errors(), OSError, RuntimeError))
    status, url = _status(error), str(getattr(error.response, "url", ""))
    # The CDN says 403 to an address whose signature has expired; the next try gets a new one.
    return status in _TRANSIENT_STATUSES or (status == 403 and not url.startswith(f"{constants.ENDPOINT}/"))


def is_unreachable(error: BaseException) -> bool:
    """Tell whether there was no answer at all, as without a network."""
    names = {type(part).__name__ for part in (error, *error.args)}  # requests wraps an error of urllib3's
    is_cut_off = "ProtocolError" in names
    return _status(error) is None and not is_cut_off and any("Connect" in name or "Timeout" in name for name in names)


def _retry_after(error: BaseException) -> int | None:
    """Return the seconds that an answer asks to wait for; None if it does not."""
    response = getattr(error, "response", None)
    text: str = response.headers.get("Retry-After", "") if response is not None else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def refusal(hub_id: HubId, error: BaseException) -> str:
    """Return in words why the hub did not give what was asked for, with the next step if there is one."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        page = f"{shown_endpoint()}/{hub_id.repo_id}"
        return f"the repository is gated; ask for access at {page}, then give a token ('hf auth login')"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such repository, or it is private and needs a token ('hf auth login')"
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no revision '{hub_id.revision or constants.DEFAULT_REVISION}'"
    if isinstance(error, OfflineModeIsEnabled):
        return "the hub cannot be reached: HF_HUB_OFFLINE is set"
    if isinstance(error, _NOT_JSON):
        return f"{shown_endpoint()} does not answer as a hub does: its answer is not JSON"
    if isinstance(error, HFValidationError):
        return first_line(error)
    if isinstance(error, HfHubHTTPError):
        if _status(error) == 401:
            return "the hub does not take the token; give another one ('hf auth login')"
        wait = _retry_after(error)
        return f"the hub answers with an error: {first_line(error)}{f'; it asks to wait {wait} s' if wait else ''}"
    if not isinstance(error, http_errors()):
        return f"the download failed: {first_line(error)}"
    return f"the hub cannot be reached at {shown_endpoint()}: {type(error).__name__}"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its name if it says nothing.

    What lets anyone in is left out: users and passwords in addresses, and signatures of the CDN in their queries.
    """
    lines = redact(str(error)).strip().splitlines()
    return printable(redact_queries(lines[0])) if lines else type(error).__name__


def wait_to_retry(what: str, error: BaseException, tries: int, waits: tuple[int, ...] = WAITS) -> bool:
    """Sleep and return True if another try is worth it; otherwise return False at once.

    Args:
        what: What is tried, for the log.
        error: Why the last try failed.
        tries: How many there were.
        waits: Seconds after each; there is one try more than these.
    """
    if tries > len(waits) or not _is_transient(error):
        return False
    wait = max(_retry_after(error) or 0, waits[tries - 1])
    if wait > MAX_WAIT:
        return False
    _log.warning("%s: try %d of %d failed: %s; the next in %d s", what, tries, len(waits) + 1, first_line(error), wait)
    time.sleep(wait)
    return True
