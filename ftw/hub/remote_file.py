"""HubFile: one file of a repository on the hub, read by ranges over HTTP; never fetched whole.

The requests are huggingface_hub's own: its session, token and endpoint. The commit is in the address, so that
all bytes are of one state of the repository, and every answer is compared with what was asked for: a server that
ignores ranges, or answers with other bytes or too few, is an error. An answer that is cut off is continued.
"""

from __future__ import annotations

import importlib
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ftw.errors import CheckpointError, SourceNotFoundError
from ftw.files import short_repr
from ftw.hub.errors import first_line, http_errors, refusal, wait_to_retry
from ftw.hub.redaction import presentable
from ftw.hub.session import bounded_session

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ftw.hub.path import HubPath

HEADER_NBYTES = 256 << 10  # of the first request: most headers of safetensors files lie within
MAX_HEADERS_NBYTES = 64 << 20  # of all files of a checkpoint
MAX_REQUESTS = 16  # at a time
_MIN_HEADER_NBYTES = 16 << 10
_CHUNK_NBYTES = 64 << 10
_WAITS = (1, 2, 4, 8, 8)  # seconds
_CONTENT_RANGE = re.compile(r"bytes (\d+-\d+)/(\d+|\*)")


class HubFile:
    """One file of a repository; stands in for a `WeightFile` and has its interface.

    Attributes:
        path: Where it lies on the hub.
        nbytes: Its size, as the hub lists it.
    """

    __slots__ = ("_first", "nbytes", "path")

    def __init__(self, path: HubPath) -> None:
        self.path = path
        self.nbytes = path.nbytes
        self._first = b""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read `nbytes` at `offset`.

        Raises:
            CheckpointError: The file ends before, or the answer is not what was asked for.
            SourceNotFoundError: The repository is gated, or gone.
            ConnectionError: The hub cannot be reached.
        """
        buffer = bytearray(nbytes)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`; what the first request brought is not asked for again.

        Raises:
            CheckpointError: The file ends before, or the answer is not what was asked for.
            SourceNotFoundError: The repository is gated, or gone.
            ConnectionError: The hub cannot be reached.
        """
        end = offset + len(view)
        if end > self.nbytes:
            problem = f"ends at byte {self.nbytes}, {end - self.nbytes} bytes short"
            raise CheckpointError(self.path, "file", problem)
        if view and not self._first and offset < HEADER_NBYTES:
            self.fetch_header(HEADER_NBYTES)
        known = self._first[offset:end]
        view[: len(known)] = known
        if len(known) < len(view):
            self.fetch_into(offset + len(known), view[len(known) :])

    def fetch_header(self, nbytes: int) -> None:
        """Fetch the first bytes, up to `nbytes` of them, and keep them."""
        first = bytearray(min(nbytes, self.nbytes))
        self.fetch_into(0, memoryview(first))
        self._first = bytes(first)

    def fetch_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`, by one request, and a few more if it fails or is cut off.

        Raises:
            CheckpointError: The answer is not what was asked for.
            SourceNotFoundError: The repository is gated, or gone.
            ConnectionError: The hub cannot be reached.
        """
        done, tries = 0, 1
        while done < len(view):
            error: Exception | None
            try:
                nbytes, error = self._request(offset + done, view[done:])
                done += nbytes
                final: Exception = self._short(offset + done, len(view) - done)
            except http_errors() as failure:
                error, final = failure, self._failure(failure)
            if error and done < len(view) and not wait_to_retry(str(self.path), error, tries, _WAITS):
                raise final from presentable(error)
            tries += 1

    def _request(self, offset: int, view: memoryview) -> tuple[int, Exception | None]:
        """Fill `view` by one request; return how many bytes came, and why not all of them."""
        headers = {"Accept-Encoding": "identity"}  # what is compressed on the way has no ranges
        wanted = f"{offset}-{offset + len(view) - 1}"
        is_part = len(view) < self.nbytes
        if is_part:
            headers["Range"] = f"bytes={wanted}"
        with _get(self.path.url, headers) as response:
            self._check_answer(response, wanted if is_part else "")
            return self._fill(view, offset, _chunks(response))

    def _check_answer(self, response: Any, wanted: str) -> None:
        """Check that an answer holds the bytes `wanted`, such as "0-9"; where that is empty, the whole file."""
        _utils().hf_raise_for_status(response)
        status, allowed = response.status_code, 206 if wanted else 200
        if status != allowed:
            problem = f"the hub answers a request for bytes {wanted or 'of all of it'} with status {status}"
            raise CheckpointError(self.path, "file", f"{problem}, {allowed} is needed")
        if not wanted:
            return
        found = response.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(found)
        if match is None or match[1] != wanted or match[2] not in ("*", str(self.nbytes)):
            problem = f"the hub answers with {short_repr(found)}, 'bytes {wanted}/{self.nbytes}' is needed"
            raise CheckpointError(self.path, "file", problem)

    def _fill(self, view: memoryview, offset: int, chunks: Iterator[bytes]) -> tuple[int, Exception | None]:
        done = 0
        try:
            for chunk in chunks:
                if len(chunk) > len(view) - done:
                    problem = f"the hub answers with more than the {len(view)} bytes asked for at byte {offset}"
                    raise CheckpointError(self.path, "file", problem)
                view[done : done + len(chunk)] = chunk
                done += len(chunk)
        except http_errors() as error:
            return done, error  # thrown into huggingface_hub's retries it would start them anew
        if done < len(view):
            raise self._short(offset + done, len(view) - done)
        return done, None

    def _short(self, position: int, missing: int) -> CheckpointError:
        return CheckpointError(self.path, "file", f"the hub's answer ends at byte {position}, {missing} bytes short")

    def _failure(self, error: BaseException) -> Exception:
        from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

        if isinstance(error, EntryNotFoundError):
            return CheckpointError(self.path, "file", "is missing")
        if isinstance(error, (GatedRepoError, RepositoryNotFoundError)):
            return SourceNotFoundError(f"{self.path}: file: {refusal(self.path.repository.hub_id, error)}")
        return ConnectionError(f"{self.path}: file: cannot be fetched from the hub: {first_line(error)}")


def fetch_headers(files: Iterable[HubFile]) -> None:
    """Fetch the first bytes of several files, up to 16 at a time.

    Of 256 files or fewer as much as a first read would fetch, of more than that less: 64 MiB in all.
    """
    from concurrent.futures import ThreadPoolExecutor

    files = tuple(files)
    if len(files) < 2:
        return
    nbytes = min(HEADER_NBYTES, max(MAX_HEADERS_NBYTES // len(files), _MIN_HEADER_NBYTES))
    pool = ThreadPoolExecutor(MAX_REQUESTS, "ftw-hub")
    try:
        for _ in pool.map(lambda file: file.fetch_header(nbytes), files):
            pass
    finally:
        pool.shutdown(cancel_futures=True)  # the first error ends the rest


@contextmanager
def _get(url: str, headers: dict[str, str]) -> Iterator[Any]:
    """Begin a request; its body is not read before it is asked for."""
    from huggingface_hub import constants

    utils = _utils()
    all_headers = {**utils.build_hf_headers(), **headers}
    # Its own retries differ by release, and sleep as long as the hub asks for; ours continue where an answer ended.
    options: dict[str, Any] = {"headers": all_headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT, "max_retries": 0}
    with bounded_session():
        if hasattr(utils, "http_stream_backoff"):
            with utils.http_stream_backoff("GET", url, **options) as response:
                yield response
        else:  # before release 1.0, upon requests
            with utils.http_backoff("GET", url, stream=True, **options) as response:
                yield response


def _utils() -> Any:
    """Return huggingface_hub.utils, whose documented names one release or the other hides from type checkers."""
    return importlib.import_module("huggingface_hub.utils")


def _chunks(response: Any) -> Iterator[bytes]:
    """Return the pieces of a body; the session sees to it that nothing is decompressed."""
    chunks: Iterator[bytes]
    if hasattr(response, "iter_bytes"):
        chunks = response.iter_bytes(_CHUNK_NBYTES)
    else:
        chunks = response.iter_content(_CHUNK_NBYTES)
    return chunks
