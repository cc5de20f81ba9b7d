"""The session that huggingface_hub's requests go through, while ftw asks: what an answer may cost is bounded.

    error or redirect   64 KiB of its body are read, the rest is dropped
    answer read whole   32 MiB (a listing of 50,000 files has 15), of all answers between two outermost calls 128 MiB
    answer in pieces    its reader knows how much is to come

Bodies are asked for as they are, and never decompressed: a KiB may become a GiB. Where several threads ask at a time,
the bounds hold for all of them together. What others ask of huggingface_hub meanwhile is held to them, too, and nothing
else of theirs. What hf_xet fetches does not pass here: it goes to the disk.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ftw.errors import CheckpointError
from ftw.hub.redaction import RedactingFilter, shown_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_MAX_ERROR_NBYTES = 64 << 10
_MAX_ANSWER_NBYTES = 32 << 20
_MAX_ANSWERS_NBYTES = 128 << 20
_MAX_SECONDS = 300  # for a body that is read whole; each of its pieces has huggingface_hub's own limit
_PIECE_NBYTES = 64 << 10
_STREAMED = "ftw_streamed"  # of a request of httpx: whoever made it reads the answer in pieces


@contextmanager
def bounded_session() -> Iterator[None]:
    """Bound what the answers to huggingface_hub's requests cost, and leave secrets out of what it logs."""
    factory = _installed_factory()
    loggers = [logging.getLogger(name) for name in _logger_names()]
    log_filter = RedactingFilter()
    for logger in loggers:
        logger.addFilter(log_filter)
    factory.begin()
    try:
        yield
    finally:
        factory.end()
        for logger in loggers:
            logger.removeFilter(log_filter)


class _BoundedFactory:
    """Makes the sessions that it is made with, bounded as long as calls of ours are running."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._num_calls = 0
        self._left = 0  # bytes of answers

    def __call__(self) -> Any:
        session = self._make()
        if hasattr(session, "event_hooks"):
            self._bound_httpx(session)
        else:  # before release 1.0, upon requests
            session.headers["Accept-Encoding"] = "identity"
            session.hooks["response"].append(self._bound_requests)
        return session

    def begin(self) -> None:
        with self._lock:
            if not self._num_calls:
                self._left = _MAX_ANSWERS_NBYTES
            self._num_calls += 1

    def end(self) -> None:
        with self._lock:
            self._num_calls -= 1

    def _bound_httpx(self, session: Any) -> None:
        send = session.send

        def send_and_tell(request: Any, *, stream: bool = False, **options: Any) -> Any:
            if self._num_calls:
                request.headers["Accept-Encoding"] = "identity"
            request.extensions = {**request.extensions, _STREAMED: stream}  # redirects inherit them
            return send(request, stream=stream, **options)

        session.send = send_and_tell
        session.event_hooks["response"].append(self._bound_answer)

    def _bound_answer(self, response: Any) -> None:
        """Put a bounded stream in the place of an answer's, of httpx."""
        if not self._num_calls:
            return
        response.headers.pop("Content-Encoding", None)
        is_streamed = response.request.extensions.get(_STREAMED, False)
        if response.status_code >= 300 or not is_streamed:
            stream = response.stream
            base = importlib.import_module(type(response).__module__.split(".")[0]).SyncByteStream
            kind = type("BoundedStream", (_BoundedStream, base), {})
            response.stream = kind(stream, self._bounded(stream, is_error=response.status_code >= 300))

    def _bound_requests(self, response: Any, *_: object, stream: bool = False, **__: object) -> None:
        """Put what may be read of an answer's body in the place of it, of requests."""
        if not self._num_calls:
            return
        raw = response.raw
        raw.headers.pop("Content-Encoding", None)
        if response.status_code >= 300 or not stream:
            import io

            try:
                pieces = self._bounded(raw.stream(_PIECE_NBYTES, decode_content=False), response.status_code >= 300)
                response.raw = io.BytesIO(b"".join(pieces))
            finally:
                raw.close()

    def _bounded(self, pieces: Iterable[bytes], is_error: bool) -> Iterator[bytes]:
        """Yield a body up to its bound; an error's ends there, of which the beginning will do."""
        end, left = time.monotonic() + _MAX_SECONDS, _MAX_ERROR_NBYTES if is_error else _MAX_ANSWER_NBYTES
        for piece in pieces:
            left -= len(piece)
            if is_error:
                yield piece[: left + len(piece)]
                if left <= 0 or time.monotonic() > end:
                    return
                continue
            with self._lock:
                self._left -= len(piece)
            if left < 0 or self._left < 0:
                most = f"at most {_MAX_ANSWER_NBYTES} bytes are read, {_MAX_ANSWERS_NBYTES} of several answers"
                raise CheckpointError(shown_endpoint(), "answer", f"is longer than a listing can be; {most}")
            if time.monotonic() > end:
                raise CheckpointError(shown_endpoint(), "answer", f"takes longer than {_MAX_SECONDS} s")
            yield piece


class _BoundedStream:
    """The body of an answer of httpx, as far as it is read; the rest of it is dropped when it is closed."""

    def __init__(self, stream: Any, pieces: Iterator[bytes]) -> None:
        self._stream = stream
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None:
        self._stream.close()


def _installed_factory() -> _BoundedFactory:
    """Return what makes huggingface_hub's sessions; it takes the place of who made them before, and asks that one."""
    http = importlib.import_module("huggingface_hub.utils._http")
    is_httpx = hasattr(http, "set_client_factory")
    current = http._GLOBAL_CLIENT_FACTORY if is_httpx else http._GLOBAL_BACKEND_FACTORY
    if isinstance(current, _BoundedFactory):
        return current
    factory = _BoundedFactory(current)
    (http.set_client_factory if is_httpx else http.configure_http_backend)(factory)
    return factory


def _logger_names() -> list[str]:
    return [name for name in list(logging.root.manager.loggerDict) if name.split(".")[0] == "huggingface_hub"]
