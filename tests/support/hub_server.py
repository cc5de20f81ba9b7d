"""A hub on this machine: repositories served over HTTP as huggingface.co does, with a count of every byte.

/api/models/ORG/NAME[/revision/REV]     what a repository is, its commit and its files, with sizes
/api/models/ORG/NAME/tree/REV           its files again
/ORG/NAME/resolve/REV/PATH              a small file, or, of a large one (LFS), a redirect to the CDN
CDN/SHA256                              a large file, whole or a range of it; another origin than the hub's

Each of these can be made to fail, once, a few times or always: `HubServer.fail`.
"""

import contextlib
import gzip
import hashlib
import json
import os
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub.utils import logging as hub_logging

# Its messages go to the stderr that it first meets: the session's, here, and not one that is closed with its test.
hub_logging.get_logger()

PARTS = {"listing": r"/api/models/[^/]+/[^/]+(/revision/.+)?", "tree": r"/api/.+/tree/.+", "file": r"/.+/resolve/.+"}
LARGE = (".safetensors", ".gguf", ".ftw")
TOKEN = "hf_rightToken"


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    is_cdn: bool


@dataclass
class Fault:
    """What happens to the next requests for a part of the hub.

    Attributes:
        part: "listing", "tree", "file" (of the hub: a small file, or the redirect of a large one) or "cdn".
        answer: Answers instead of the hub, with its handler.
        times: How many requests; None for all.
        name: Only those for the file of this name.
    """

    part: str
    answer: "Callable[[_Handler], None]"
    times: int | None
    name: str


@dataclass
class Repository:
    """All states of a repository; `access` is "public", "gated" (listed, but not read) or "private"."""

    access: str = "public"
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)


class HubServer:
    """The hub and its CDN.

    Attributes:
        repositories: By id.
        served: Bytes sent of each file, by its path in the repository.
        requests: All that came, in order.
        answer_range: What the CDN makes of a range: `(content, first, last)` to status, headers and body.
        gate: Called in every request to the CDN.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.served: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.answer_range: Callable[[bytes, int, int], tuple[int, dict[str, str], bytes]] = answer_range
        self.gate: Callable[[], None] = lambda: None
        self.closing = threading.Event()
        self._faults: list[Fault] = []
        self.lock = threading.Lock()
        self._blobs: dict[str, tuple[str, bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._servers = [self._start(is_cdn) for is_cdn in (False, True)]
        self.url, self.cdn_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)

    def _start(self, is_cdn: bool) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"hub": self, "is_cdn": is_cdn})
        server = _Server(("127.0.0.1", 0), handler)
        self._threads.append(threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True))
        self._threads[-1].start()
        return server

    def fail(
        self, part: str, answer: "Callable[[_Handler], None]", times: int | None = None, *, name: str = ""
    ) -> None:
        """Answer requests for a part of the hub otherwise, after those that an earlier call was about."""
        self._faults.append(Fault(part, answer, times, name))

    def heal(self) -> None:
        """Answer all requests as they should be from now on."""
        self._faults.clear()

    def take_fault(self, path: str, is_cdn: bool) -> Fault | None:
        """Return what shall happen to a request, and count it."""
        name = self.blob(path[1:])[0] if is_cdn else path
        for fault in self._faults:
            is_part = fault.part == "cdn" if is_cdn else re.fullmatch(PARTS.get(fault.part, "cdn"), path)
            if is_part and fault.times != 0 and name.endswith(fault.name):
                fault.times = None if fault.times is None else fault.times - 1
                return fault
        return None

    def close(self) -> None:
        self.closing.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join()

    def add(self, repo_id: str, folder: Path, *, ref: str = "main", access: str = "public") -> str:
        """Make a commit of what lies in a folder, and return its id."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        listing = [(name, hashlib.sha1(content).hexdigest()) for name, content in files.items()]
        commit = hashlib.sha1(repr(listing).encode()).hexdigest()
        repository = self.repositories.setdefault(repo_id, Repository(access))
        repository.commits[commit] = files
        repository.refs[ref] = commit
        self._blobs.update({sha256(content): (name, content) for name, content in files.items()})
        return commit

    def blob(self, digest: str) -> tuple[str, bytes]:
        return self._blobs[digest]

    def reads(self) -> list[Request]:
        """Return the requests for the bytes of files, but for redirects."""
        return [request for request in self.requests if request.is_cdn or is_small(request.path)]


def is_small(path: str) -> bool:
    return "/resolve/" in path and not path.endswith(LARGE)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def answer_range(content: bytes, first: int, last: int) -> tuple[int, dict[str, str], bytes]:
    body = content[first : last + 1]
    return 206, {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(content)}"}, body


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that close a connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    is_cdn: bool

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class has it so
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.max_body_nbytes: int | None = None
        self.ignores_range = False
        self.change: Callable[[bytes], bytes] = bytes
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.hub.lock:
            self.hub.requests.append(Request(self.command, path, headers, self.is_cdn))
            fault = self.hub.take_fault(path, self.is_cdn)
        if fault is None:
            self.answer()
        else:
            fault.answer(self)

    def answer(self) -> None:
        """Answer as the hub does, but no more bytes than `max_body_nbytes`."""
        path = unquote(urlsplit(self.path).path)
        if self.is_cdn:
            self.hub.gate()
            self._send_content(*self.hub.blob(path[1:]))
            return
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+|refs/\w+/\w+))?", path)
        if match:
            self._send_listing(*match.groups())
            return
        match = re.fullmatch(r"/([^/]+/[^/]+)/(resolve)/([^/]+)/(.+)", path)
        if match:
            self._send_file(*match.groups())
            return
        self._send(404, {}, b"")

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: self.max_body_nbytes])

    def _refuse(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        headers = {"X-Error-Code": code, "X-Error-Message": message.splitlines()[0], "Content-Type": "application/json"}
        self._send(status, headers, body)

    def _find(self, repo_id: str, kind: str | None, revision: str | None) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit and the files that are asked for; None where they were refused."""
        repository = self.hub.repositories.get(repo_id)
        authorization = self.headers.get("Authorization")
        if authorization and authorization.startswith("Basic "):  # of an address with a user
            authorization = None
        if authorization not in (None, f"Bearer {TOKEN}"):
            self._send(401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"")
        elif repository is None or (repository.access == "private" and not authorization):
            self._refuse(401 if authorization is None else 404, "RepoNotFound", "Repository not found")
        elif repository.access == "gated" and kind == "resolve" and not authorization:
            self._refuse(401, "GatedRepo", f"Access to model {repo_id} is restricted.\nYou must log in.")
        else:
            commit = repository.refs.get(revision or "main", revision)
            if commit in repository.commits:
                return commit, repository.commits[commit]
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    def _send_listing(self, repo_id: str, kind: str | None, revision: str | None) -> None:
        found = self._find(repo_id, kind, revision)
        if found is None:
            return
        commit, files = found
        answer: object
        if kind == "tree":
            answer = [
                {"type": "file", "path": name, "size": len(content), "oid": sha256(content)[:40], **_lfs(name, content)}
                for name, content in files.items()
            ]
        else:
            siblings = [
                {
                    "rfilename": name,
                    "size": len(content),
                    "blobId": sha256(content)[:40],
                    **_lfs(name, content, "sha256"),
                }
                for name, content in files.items()
            ]
            answer = {"id": repo_id, "modelId": repo_id, "sha": commit, "private": False, "siblings": siblings}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _send_file(self, repo_id: str, kind: str, revision: str, name: str) -> None:
        found = self._find(repo_id, kind, revision)
        if found is None:
            return
        commit, files = found
        if name not in files:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        content = files[name]
        digest = sha256(content)
        if not name.endswith(LARGE):
            self._send_content(name, content, {"ETag": f'"{digest[:40]}"', "X-Repo-Commit": commit})
            return
        headers = {
            "Location": f"{self.hub.cdn_url}/{digest}?signature=x",
            "X-Repo-Commit": commit,
            "X-Linked-ETag": f'"{digest}"',
            "X-Linked-Size": str(len(content)),
        }
        self._send(302, headers, b"")

    def _send_content(self, name: str, content: bytes, headers: dict[str, str] | None = None) -> None:
        content = self.change(content)
        status, more, body = 200, {}, content
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match and not self.ignores_range:
            status, more, body = self.hub.answer_range(content, int(match[1]), int(match[2] or len(content) - 1))
        if self.command != "HEAD":
            with self.hub.lock:
                self.hub.served[name] += len(body[: self.max_body_nbytes])
        self._send(status, {"Accept-Ranges": "bytes", **(headers or {}), **more}, body)
        if len(body) < int(more.get("Content-Length", 0)):
            self.close_connection = True


def _lfs(name: str, content: bytes, digest_key: str = "oid") -> dict[str, object]:
    if not name.endswith(LARGE):
        return {}
    return {"lfs": {digest_key: sha256(content), "size": len(content), "pointerSize": 134}}


# faults


def status(code: int, **headers: str) -> Callable[[_Handler], None]:
    """Answer with a status, and headers such as `Retry_After`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler._send(code, named, b"")


def drop(handler: _Handler) -> None:
    """Close the connection instead of an answer."""
    handler.close_connection = True


def cut(nbytes: int, *, is_reset: bool = False) -> Callable[[_Handler], None]:
    """Close the connection, or reset it, after so many bytes of the content that was announced."""

    def answer(handler: _Handler) -> None:
        handler.max_body_nbytes = nbytes
        handler.answer()
        handler.close_connection = True
        if is_reset:
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(handler.connection.detach())

    return answer


def silence(handler: _Handler) -> None:
    """Never answer."""
    handler.hub.closing.wait(600)
    handler.close_connection = True


def flood(code: int, nbytes: int, sent: list[int], **headers: str) -> Callable[[_Handler], None]:
    """Answer with a status and a long body, as much of it as the client takes; note how many bytes that were."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    piece = bytes(1 << 20)

    def answer(handler: _Handler) -> None:
        handler.max_body_nbytes = 0
        handler.close_connection = True
        handler._send(code, {"Content-Length": str(nbytes), **named}, b"")
        handler.connection.settimeout(20)
        sent.append(0)
        with contextlib.suppress(OSError):  # the client has closed the connection
            while sent[-1] < nbytes:
                handler.wfile.write(piece)
                sent[-1] += len(piece)

    return answer


def compressed(content: bytes) -> Callable[[_Handler], None]:
    """Answer with a compressed body, whatever was asked for."""
    body = gzip.compress(content)
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    return lambda handler: handler._send(200, headers, body)


def whole(handler: _Handler) -> None:
    """Answer a request for a range with the whole file."""
    handler.ignores_range = True
    handler.answer()


def changed(change: Callable[[bytes], bytes]) -> Callable[[_Handler], None]:
    """Answer with another content than the one that is listed."""

    def answer(handler: _Handler) -> None:
        handler.change = change
        handler.answer()

    return answer


def followed_by(action: Callable[[], object]) -> Callable[[_Handler], None]:
    """Answer as it should be, and then do something."""

    def answer(handler: _Handler) -> None:
        handler.answer()
        action()

    return answer


# huggingface_hub


@contextlib.contextmanager
def serving_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Yield a hub without repositories, which huggingface_hub takes for the real one; its cache lies in `folder`."""
    from huggingface_hub import constants, file_download

    server = HubServer()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    for module in (constants, file_download):  # releases before 1.0 have a copy of it there
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):  # ten seconds may pass on a busy machine
        monkeypatch.setattr(constants, name, 600)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(folder)
    reset_sessions()
    yield server
    reset_sessions()
    server.close()


def reset_sessions() -> None:
    """Make huggingface_hub forget its connections, and whether it was offline when it made them."""
    import huggingface_hub

    if hasattr(huggingface_hub, "close_session"):
        huggingface_hub.close_session()
    else:
        huggingface_hub.configure_http_backend()


@contextlib.contextmanager
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let huggingface_hub be offline."""
    from huggingface_hub import constants

    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        reset_sessions()
        yield
    reset_sessions()
