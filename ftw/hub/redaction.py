"""Redaction: what opens a door is left out of what people and logs are shown.

The hub's address (HF_ENDPOINT) may hold a user and a password, those of the CDN hold signatures, and errors of the HTTP
libraries quote addresses and headers.
"""

from __future__ import annotations

import logging
import re
import traceback
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ftw.errors import SourceNotFoundError

if TYPE_CHECKING:
    from ftw.hub.ids import HubId

_USER_INFO = re.compile(r"(?<=://)[^/?#\r\n]*@")  # a password with an @ or a space that is not escaped, too
_QUERY = re.compile(r"(?<=\S)\?[^\s'\")]*")
_SIGNATURE = re.compile(r"\?(?:[^\s'\")]*(?:signature|policy|credential|&sig)|sig)=[^\s'\")]*", re.IGNORECASE)
_TOKEN = re.compile(r"(?<=Bearer )[^\s'\"]+|\bhf_[A-Za-z0-9]{16,}")


def redact(text: str) -> str:
    """Return a text without users, passwords and signatures in addresses, and without tokens."""
    return _TOKEN.sub("…", _SIGNATURE.sub("?…", _USER_INFO.sub("", text)))


def redact_queries(text: str) -> str:
    """Return a text without them, and without any query of an address, in which a signature may have any name."""
    return _QUERY.sub("", redact(text))


def shown_endpoint() -> str:
    """Return the hub's address for a message."""
    from huggingface_hub import constants

    return redact(constants.ENDPOINT)


def check_endpoint(hub_id: HubId) -> None:
    """Check that the hub's address is one; libraries would quote a part of a password that breaks it.

    Raises:
        SourceNotFoundError: It is none.
    """
    try:
        from huggingface_hub import constants  # which looks at the address, too

        parts = urlsplit(constants.ENDPOINT)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_address &= constants.ENDPOINT.isprintable() and " " not in constants.ENDPOINT
    except ValueError:  # a port that is no number: a password with a slash in it; brackets that are none of IPv6
        is_address = False
    if not is_address:
        problem = (
            "HF_ENDPOINT is not an address such as https://HOST; what is special in a password is written as %2F or %20"
        )
        raise SourceNotFoundError(f"{hub_id}: hub id: {problem}")


def presentable(error: BaseException) -> BaseException:
    """Return an error that others may be raised from: itself, or in its place one that says the same without secrets.

    A traceback shows what every error of the chain says.
    """
    shown = "".join(traceback.format_exception_only(error))
    chain: BaseException | None = error.__cause__ or error.__context__
    while chain is not None:
        shown += "".join(traceback.format_exception_only(chain))
        chain = chain.__cause__ or chain.__context__
    if redact(shown) == shown:
        return error
    return ConnectionError(redact(f"{type(error).__name__}: {error}"))


class RedactingFilter(logging.Filter):
    """Leaves secrets out of what huggingface_hub logs: it names the address of each request that failed."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; return True, so that it is logged."""
        text = record.getMessage()
        if redact(text) != text:
            record.msg, record.args = redact(text), ()
        return True
