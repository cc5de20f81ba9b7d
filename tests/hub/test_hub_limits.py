"""What a hub's answers may cost: bodies are read up to a bound, and never decompressed."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from builders import llama_config, llama_tensors, padded, write_checkpoint
from hub_server import HubServer, compressed, flood
from huggingface_hub import HfApi

import ftw
from ftw.errors import CheckpointError, FtwError, SourceNotFoundError
from ftw.hub import repository, session

MIB = 1 << 20
LONG = 256 * MIB
TAKEN = 16 * MIB  # what sockets hold, and 64 KiB


@pytest.fixture
def source(hub: HubServer, tmp_path: Path) -> str:
    hub.add("org/name", write_checkpoint(tmp_path / "m", padded(llama_tensors()), llama_config()))
    return "org/name"


def fetch(source: str, folder: Path) -> None:
    ftw.convert(source, folder / "out")


@pytest.mark.parametrize("code", [400, 403, 404, 500])
@pytest.mark.parametrize("part", ["listing", "file", "cdn"])
@pytest.mark.parametrize("is_fetched", [False, True], ids=["read", "fetched"])
def test_error_is_read_up_to_a_bound(
    hub: HubServer, source: str, tmp_path: Path, part: str, code: int, is_fetched: bool
) -> None:
    sent: list[int] = []
    hub.fail(part, flood(code, LONG, sent))
    with pytest.raises((FtwError, ConnectionError)) as caught:
        fetch(source, tmp_path) if is_fetched else ftw.inspect(source)
    assert sent
    assert max(sent) < TAKEN
    assert len(str(caught.value)) < 8192


@pytest.mark.parametrize("part", ["tree", "listing"])
def test_redirect_is_read_up_to_a_bound(
    hub: HubServer, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(repository, "_LIST_TREE_FROM", 1)
    commit = hub.repositories[source].refs["main"]
    place = {"listing": f"/api/models/{source}?blobs=1", "tree": f"/api/models/{source}/tree/{commit}?recursive=1"}[
        part
    ]
    sent: list[int] = []
    hub.fail(part, flood(307, LONG, sent, Location=place), 1)
    assert ftw.inspect(source).verdict.tables
    assert sent
    assert max(sent) < TAKEN


@pytest.mark.parametrize("part", ["listing", "tree"])
def test_listing_is_not_decompressed(
    hub: HubServer, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(repository, "_LIST_TREE_FROM", 1)
    answer = compressed(b" " * LONG + b"[]")
    hub.fail(part, answer)
    tracemalloc.start()
    with pytest.raises(SourceNotFoundError, match="does not answer as a hub does: its answer is not JSON"):
        ftw.inspect(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * MIB
    assert {request.headers["accept-encoding"] for request in hub.requests} == {"identity"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("is_fetched", [False, True], ids=["read", "fetched"])
def test_file_is_not_decompressed(hub: HubServer, source: str, tmp_path: Path, name: str, is_fetched: bool) -> None:
    hub.fail("file" if name == "config.json" else "cdn", compressed(b" " * LONG), name=name)
    tracemalloc.start()
    with pytest.raises(FtwError):
        fetch(source, tmp_path) if is_fetched else ftw.inspect(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * MIB


def test_listing_is_read_up_to_a_bound(hub: HubServer, source: str) -> None:
    sent: list[int] = []
    hub.fail("listing", flood(200, LONG, sent))
    problem = f"{hub.url}: answer: is longer than a listing can be; at most 33554432 bytes are read"
    with pytest.raises(CheckpointError, match=problem):
        ftw.inspect(source)
    assert 32 * MIB <= max(sent) < 32 * MIB + TAKEN


def test_pages_of_a_listing_are_read_up_to_a_bound(
    hub: HubServer, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "_LIST_TREE_FROM", 1)
    monkeypatch.setattr(session, "_MAX_ANSWERS_NBYTES", 100_000)
    link = f'<{hub.url}/api/models/{source}/tree/main?cursor=x>; rel="next"'
    page = json.dumps([{"type": "file", "path": "x" * 1000, "size": 1, "oid": "0" * 40}]).encode()
    hub.fail("tree", lambda handler: handler._send(200, {"Link": link, "Content-Type": "application/json"}, page))
    with pytest.raises(CheckpointError, match=r"is longer than a listing can be; .* 100000 of several answers"):
        ftw.inspect(source)
    assert sum("/tree/" in request.path for request in hub.requests) < 120


def test_pages_that_huggingface_hub_reads_itself_are_read_up_to_a_bound(
    hub: HubServer, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_MAX_ANSWERS_NBYTES", 100_000)
    sent: list[int] = []
    hub.fail("listing", lambda handler: handler.answer(), 1)  # ours
    for part in ("tree", "listing"):  # by its release
        hub.fail(part, flood(200, LONG, sent))
    with pytest.raises(SourceNotFoundError, match="is longer than a listing can be"):
        fetch(source, tmp_path)
    assert max(sent) < TAKEN


def test_answer_that_takes_for_ever_is_given_up(hub: HubServer, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MAX_SECONDS", -1)
    with pytest.raises(CheckpointError, match=f"{hub.url}: answer: takes longer than -1 s"):
        ftw.inspect(source)


def test_what_others_ask_of_huggingface_hub_is_left_alone(
    hub: HubServer, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ftw.inspect(source)
    monkeypatch.setattr(session, "_MAX_ANSWER_NBYTES", 1)
    with pytest.raises(CheckpointError):
        ftw.inspect(source)
    assert HfApi().model_info(source).id == source
    assert hub.requests[-1].headers["accept-encoding"] != "identity"


def test_factory_that_others_have_set_makes_the_sessions(hub: HubServer, source: str) -> None:
    http: Any = session.importlib.import_module("huggingface_hub.utils._http")
    if not hasattr(http, "set_client_factory"):
        pytest.skip("a release of huggingface_hub upon requests")
    made: list[object] = []

    def make() -> Any:
        made.append(http.default_client_factory())
        return made[-1]

    before = http._GLOBAL_CLIENT_FACTORY
    http.set_client_factory(make)
    try:
        ftw.inspect(source)
        assert made == [http.get_session()]
    finally:
        http.set_client_factory(before)


# Releases of huggingface_hub before 1.0 are built upon requests


@pytest.fixture
def bounded() -> Any:
    factory = session._BoundedFactory(requests.Session)
    factory.begin()
    made = factory()
    yield made
    made.close()


def test_session_of_requests_reads_an_error_up_to_a_bound(hub: HubServer, bounded: requests.Session) -> None:
    sent: list[int] = []
    hub.fail("listing", flood(500, LONG, sent))
    answer = bounded.get(f"{hub.url}/api/models/org/name")
    assert (answer.status_code, len(answer.content)) == (500, 64 << 10)
    assert max(sent) < TAKEN


@pytest.mark.parametrize(
    "answer", [compressed(b"[" * LONG), lambda handler: handler._send(200, {}, b"as it is")], ids=["gzip", "plain"]
)
def test_session_of_requests_does_not_decompress(
    hub: HubServer, bounded: requests.Session, answer: Callable[[Any], None]
) -> None:
    hub.fail("listing", answer)
    found = bounded.get(f"{hub.url}/api/models/org/name").content
    assert found == b"as it is" or (found.startswith(b"\x1f\x8b") and len(found) < MIB)
    assert hub.requests[-1].headers["accept-encoding"] == "identity"


def test_session_of_requests_reads_an_answer_up_to_a_bound(hub: HubServer, bounded: requests.Session) -> None:
    hub.fail("listing", flood(200, LONG, []))
    with pytest.raises(CheckpointError, match="is longer than a listing can be"):
        bounded.get(f"{hub.url}/api/models/org/name")


def test_session_of_requests_leaves_what_is_read_in_pieces_to_its_reader(
    hub: HubServer, bounded: requests.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_MAX_ANSWER_NBYTES", 1)
    hub.fail("listing", lambda handler: handler._send(200, {}, b"x" * 1000))
    with bounded.get(f"{hub.url}/api/models/org/name", stream=True) as answer:
        assert b"".join(answer.iter_content(100)) == b"x" * 1000
