"""What goes wrong with the hub: which errors its requests raise, and what they mean, on one line."""

from __future__ import annotations

from json import JSONDecodeError
from typing import TYPE_CHECKING, cast

from ftw.errors import printable

if TYPE_CHECKING:
    from ftw.hub import HubId

_NOT_HTTP = ("builtins", "huggingface_hub")


def http_errors() -> tuple[type[Exception], ...]:
    """Return what huggingface_hub's requests raise: errors of requests, httpx or httpx2, by its release."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The library's most general error: its others are no bases of HfHubHTTPError.
    foreign = [base for base in HfHubHTTPError.__mro__ if base.__module__.split(".")[0] not in _NOT_HTTP]
    return (cast("type[Exception]", foreign[-1]), OfflineModeIsEnabled, JSONDecodeError)


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
        if error.response is not None and error.response.status_code == 401:
            return "the hub does not take the token; give another one ('hf auth login')"
        return f"the hub answers with an error: {first_line(error)}"
    return f"the hub cannot be reached at {constants.ENDPOINT}: {type(error).__name__}"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its name where it says nothing."""
    lines = str(error).strip().splitlines()
    return printable(lines[0]) if lines else type(error).__name__
