"""What goes wrong with the hub: which errors its requests raise, and what they mean, on one line."""

from __future__ import annotations

import re
from json import JSONDecodeError
from typing import TYPE_CHECKING, cast

from ftw.errors import printable

if TYPE_CHECKING:
    from ftw.hub.path import HubId

_NOT_HTTP = ("builtins", "huggingface_hub")
_TRANSIENT_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_QUERY = re.compile(r"(?<=\S)\?[^\s'\")]*")


def http_errors() -> tuple[type[Exception], ...]:
    """Return what huggingface_hub's requests raise: errors of requests, httpx or httpx2, by its release."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The library's most general error: its others are no bases of HfHubHTTPError.
    foreign = [base for base in HfHubHTTPError.__mro__ if base.__module__.split(".")[0] not in _NOT_HTTP]
    return (cast("type[Exception]", foreign[-1]), OfflineModeIsEnabled, JSONDecodeError)


def is_transient(error: BaseException) -> bool:
    """Tell whether another try may do: the hub was busy or out of order, or the bytes did not come as they are."""
    from huggingface_hub import constants
    from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, (OfflineModeIsEnabled, FileMetadataError, JSONDecodeError)):
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


def retry_after(error: BaseException) -> int | None:
    """Return the seconds that an answer asks to wait for; None where it does not."""
    response = getattr(error, "response", None)
    text: str = response.headers.get("Retry-After", "") if response is not None else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def refusal(hub_id: HubId, error: BaseException) -> str:
    """Return in words why the hub did not give what was asked for, with the next step where there is one."""
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
        page = f"{constants.ENDPOINT}/{hub_id.repo_id}"
        return f"the repository is gated; ask for access at {page}, then give a token ('hf auth login')"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such repository, or it is private and needs a token ('hf auth login')"
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no revision '{hub_id.revision or constants.DEFAULT_REVISION}'"
    if isinstance(error, OfflineModeIsEnabled):
        return "the hub cannot be reached: HF_HUB_OFFLINE is set"
    if isinstance(error, JSONDecodeError):
        return f"{constants.ENDPOINT} does not answer as a hub does: its answer is not JSON"
    if isinstance(error, HFValidationError):
        return first_line(error)
    if isinstance(error, HfHubHTTPError):
        if _status(error) == 401:
            return "the hub does not take the token; give another one ('hf auth login')"
        wait = retry_after(error)
        return f"the hub answers with an error: {first_line(error)}{f'; it asks to wait {wait} s' if wait else ''}"
    if not isinstance(error, http_errors()):
        return f"the download failed: {first_line(error)}"
    return f"the hub cannot be reached at {constants.ENDPOINT}: {type(error).__name__}"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its name where it says nothing.

    The query of an address is left out: that of the CDN holds a signature, which lets anyone in.
    """
    lines = str(error).strip().splitlines()
    return printable(_QUERY.sub("", lines[0])) if lines else type(error).__name__
