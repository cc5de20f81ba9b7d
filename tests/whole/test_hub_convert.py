"""Conversions from a hub that fails: for a while, and the bytes are right; for good, and all there is, is one line."""

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw, write_sharded
from ftw.cli.main import main
from hub_server import (
    TOKEN,
    HubServer,
    changed,
    cut,
    drop,
    followed_by,
    offline,
    serving_hub,
    silence,
    status,
    whole,
)
from inspecting import opened_path

import ftw
from ftw.errors import CheckpointError, SourceNotFoundError
from ftw.hub import fetch as hub_fetch
from ftw.hub.errors import MAX_WAIT, wait_to_retry
from ftw.hub.ids import parse_hub_id
from ftw.hub.repository import list_repository

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
WEIGHTS = 300_000  # bytes of the padding that makes a file longer than one piece
RESETS = cut(10_000, is_reset=True)


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """All that was slept; nothing is."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


@pytest.fixture
def hub(tmp_path, monkeypatch, waits) -> Iterator[HubServer]:
    """A hub with org/name, two shards of which lie in "source" too."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)  # of a file cut off, whole pieces are kept
    with serving_hub(tmp_path, monkeypatch) as server:
        padding = [{f"padding.{number}": torch.full((WEIGHTS,), number, dtype=torch.uint8)} for number in range(2)]
        shards = {SHARDS[0]: {**llama_tensors(), **padding[0]}, SHARDS[1]: padding[1]}
        server.add("org/name", write_sharded(tmp_path / "source", shards, llama_config()))
        yield server


def set_timeouts(monkeypatch, seconds: float) -> None:
    """Let huggingface_hub wait no longer for an answer."""
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", seconds)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", seconds)
    monkeypatch.setattr(file_download, "_ETAG_RETRY_TIMEOUT", seconds, raising=False)


def assert_converts(folder: Path, source: str = "org/name") -> None:
    ftw.convert(source, folder / "out")
    assert ftw.verify(folder / "out", against=folder / "source").is_ok


def assert_fails(capfd, folder: Path, reason: str, command: str = "convert", source: str = "org/name") -> str:
    """Check that a command says in one line what is wrong, and leaves nothing behind; return the line."""
    capfd.readouterr()
    target = [str(folder / "out")] if command == "convert" else []
    assert main([command, source, *target]) == 1
    out, err = capfd.readouterr()
    lines = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("ftw: error: ")]
    assert (out, len(lines), "Traceback" in err, TOKEN in err, "hf_wrong" in err) == ("", 1, False, False, False)
    assert lines[0].startswith("ftw: error: org/name")
    assert reason in lines[0]
    assert "signature=" not in lines[0]
    assert not [path.name for path in folder.iterdir() if "out" in path.name]
    return lines[0]


# for a while


@pytest.mark.parametrize(
    ("part", "answer", "times"),
    [
        pytest.param("listing", status(429), 2, id="listing_429"),
        pytest.param("listing", status(429, Retry_After="7"), 2, id="listing_429_retry_after"),
        pytest.param("listing", status(503), 2, id="listing_503"),
        pytest.param("listing", drop, 2, id="listing_dropped"),
        pytest.param("listing", cut(10), 2, id="listing_cut"),
        pytest.param("tree", status(503), 2, id="tree_503"),
        pytest.param("file", status(429), 4, id="file_429"),
        pytest.param("file", status(500), 4, id="file_500"),
        pytest.param("file", status(503), 4, id="file_503"),
        pytest.param("file", drop, 4, id="file_dropped"),
        pytest.param("cdn", status(429), 4, id="cdn_429"),
        pytest.param("cdn", status(429, Retry_After="7"), 4, id="cdn_429_retry_after"),
        pytest.param("cdn", status(500), 4, id="cdn_500"),
        pytest.param("cdn", status(503), 4, id="cdn_503"),
        pytest.param("cdn", status(503, Retry_After="120"), 4, id="cdn_503_retry_after"),
        pytest.param("cdn", status(403), 4, id="cdn_403"),
        pytest.param("cdn", drop, 4, id="cdn_dropped"),
        pytest.param("cdn", cut(0), 4, id="cdn_cut_before_the_body"),
        pytest.param("cdn", cut(100_000), 4, id="cdn_cut"),
        pytest.param("cdn", RESETS, 4, id="cdn_reset"),
        pytest.param("cdn", changed(lambda content: content[:-1]), 4, id="cdn_shorter"),
        pytest.param("cdn", changed(lambda content: content + b"x"), 4, id="cdn_longer"),
        pytest.param("cdn", changed(lambda content: b"x" + content[1:]), 4, id="cdn_other_bytes"),
    ],
)
def test_hub_failure_that_passes_is_no_failure(hub, tmp_path, waits, part, answer, times):
    hub.fail(part, answer, times)
    assert_converts(tmp_path)
    assert sum(waits) < 600


@pytest.mark.parametrize("name", ["config.json", SHARDS[1]], ids=["small", "redirect"])
@pytest.mark.parametrize("fault", [drop, status(503), status(429)], ids=["dropped", "503", "429"])
def test_hub_file_that_fails_for_a_while(hub, tmp_path, fault, name):
    hub.fail("file", fault, 4, name=name)
    assert_converts(tmp_path)


def test_hub_small_file_that_is_cut_off(hub, tmp_path):
    hub.fail("file", cut(10), 4, name="config.json")
    assert_converts(tmp_path)


@pytest.mark.parametrize("part", ["file", "cdn"])
def test_hub_that_is_silent_for_a_while(hub, tmp_path, monkeypatch, part):
    set_timeouts(monkeypatch, 2)
    hub.fail(part, silence, 3)
    assert_converts(tmp_path)


def test_hub_download_that_is_cut_off_goes_on_where_it_ended(hub, tmp_path):
    hub.fail("cdn", cut(200_000), 1, name=SHARDS[1])
    assert_converts(tmp_path)
    if is_release_2():  # before, this ended the download: it goes on in the next one
        ranges = [request.headers.get("range") for request in hub.requests if request.is_cdn]
        assert f"bytes={200_000 // (1 << 14) * (1 << 14)}-" in ranges


def test_hub_download_that_is_continued_with_the_whole_file(hub, tmp_path):
    hub.fail("cdn", cut(200_000), 1, name=SHARDS[1])
    hub.fail("cdn", whole, 1, name=SHARDS[1])
    assert_converts(tmp_path)


def test_hub_wait_is_the_one_that_the_hub_asks_for(hub, tmp_path, waits):
    hub.fail("cdn", status(503, Retry_After="120"), 1, name=SHARDS[1])
    assert_converts(tmp_path)
    assert 120 in waits


def test_hub_counts_the_tries_anew_after_a_file_that_came(hub, tmp_path, waits):
    hub.fail("cdn", status(503), 4, name=SHARDS[0])
    hub.fail("cdn", status(503), 7, name=SHARDS[1])
    assert_converts(tmp_path)
    assert waits[:5] == [1, 4, 15, 60, 1]


# for good


@pytest.mark.parametrize(
    ("part", "answer", "reason"),
    [
        pytest.param("listing", status(429), "429", id="listing_429"),
        pytest.param("listing", status(503), "503", id="listing_503"),
        pytest.param("listing", drop, "the hub cannot be reached at http://127.0.0.1:", id="listing_dropped"),
        pytest.param("listing", status(429, Retry_After="86400"), "it asks to wait 86400 s", id="listing_wait"),
        pytest.param("listing", status(401), "the hub does not take the token", id="listing_401"),
        pytest.param("listing", status(403), "403", id="listing_403"),
        pytest.param("file", status(503), "503", id="file_503"),
        pytest.param("file", status(404, X_Error_Code="EntryNotFound"), "is missing", id="file_404"),
        pytest.param("cdn", status(404), "404", id="cdn_404"),
        pytest.param("cdn", status(429), "429", id="cdn_429"),
        pytest.param("cdn", status(503), "503", id="cdn_503"),
        pytest.param("cdn", status(503, Retry_After="86400"), "it asks to wait 86400 s", id="cdn_wait"),
        pytest.param("cdn", status(403), "403", id="cdn_403"),
        pytest.param("cdn", drop, "the hub cannot be reached at http://127.0.0.1:", id="cdn_dropped"),
        pytest.param("cdn", cut(0), "the hub cannot be reached at http://127.0.0.1:", id="cdn_cut"),
        pytest.param("cdn", RESETS, "the hub cannot be reached at http://127.0.0.1:", id="cdn_reset"),
        pytest.param("cdn", changed(lambda content: content[1:]), "size", id="cdn_shorter"),
        pytest.param("cdn", changed(lambda content: b"x" + content[1:]), "came with SHA-256", id="cdn_other_bytes"),
    ],
)
def test_hub_failure_that_stays_is_one_line(capfd, hub, tmp_path, monkeypatch, waits, part, answer, reason):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.fail(part, answer)
    assert_fails(capfd, tmp_path, reason)
    assert sum(waits) < 1200
    hub.heal()
    assert_converts(tmp_path)


@pytest.mark.parametrize("part", ["listing", "cdn"])
def test_hub_that_stays_silent(capfd, hub, tmp_path, monkeypatch, part):
    set_timeouts(monkeypatch, 0.3)
    monkeypatch.setattr(hub_fetch, "wait_to_retry", partial(wait_to_retry, waits=(1,)))
    hub.fail(part, silence)
    assert_fails(capfd, tmp_path, "the hub cannot be reached at http://127.0.0.1:")


@pytest.mark.parametrize(
    ("source", "token", "reason"),
    [
        ("org/absent", TOKEN, "the hub has no such repository, or it is private and needs a token"),
        ("org/name@v2", TOKEN, "the repository has no revision 'v2'"),
        ("org/name/sub", TOKEN, "the repository has no such file or folder"),
        ("org/name", "hf_wrong", "the hub does not take the token"),
        ("org/gated", "", "the repository is gated; ask for access at "),
        ("org/private", "", "the hub has no such repository, or it is private and needs a token"),
    ],
    ids=["repository", "revision", "folder", "token", "gated", "private"],
)
def test_hub_refusal_is_one_line_without_another_try(capfd, hub, tmp_path, monkeypatch, waits, source, token, reason):
    for access in ("gated", "private"):
        hub.add(f"org/{access}", tmp_path / "source", access=access)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    capfd.readouterr()
    assert main(["convert", source, str(tmp_path / "out")]) == 1
    out, err = capfd.readouterr()
    assert (out, err.count("\n"), token and token in err) == ("", 1, token and False)
    assert err.startswith(f"ftw: error: {source}")
    assert reason in err
    assert not waits
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("access", ["gated", "private"])
def test_hub_token_opens_a_repository(capfd, hub, tmp_path, monkeypatch, access):
    hub.add(f"org/{access}", tmp_path / "source", access=access)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(["convert", f"org/{access}", str(tmp_path / "out")]) == 0
    out, err = capfd.readouterr()
    assert TOKEN not in out + err
    assert ftw.verify(tmp_path / "out", against=tmp_path / "source").is_ok
    assert not [request for request in hub.requests if request.is_cdn and "authorization" in request.headers]


@pytest.mark.parametrize(
    ("part", "answer", "reason"),
    [
        pytest.param("listing", status(503), "503", id="listing_503"),
        pytest.param("cdn", status(429), "429", id="429"),
        pytest.param("cdn", status(503), "503", id="503"),
        pytest.param("cdn", status(403), "403", id="403"),
        pytest.param("cdn", drop, "cannot be fetched from the hub", id="dropped"),
        pytest.param("cdn", cut(1_000), "the hub's answer ends at byte 0", id="cut"),
        pytest.param("cdn", cut(1_000, is_reset=True), "", id="reset"),
        pytest.param("cdn", whole, "with status 200, 206 is needed", id="whole"),
    ],
)
def test_hub_headers_are_right_or_the_error_is_one_line(capfd, hub, tmp_path, waits, part, answer, reason):
    hub.fail(part, answer)
    assert_fails(capfd, tmp_path, reason, "inspect")
    hub.heal()
    if answer is not whole and reason != "403":
        hub.fail(part, answer, 2)
    remote, local = ftw.inspect("org/name").to_dict(), ftw.inspect(tmp_path / "source").to_dict()
    assert {**remote, "source": ""} == {**local, "source": ""}
    assert sum(waits) < 600


# the next run


def test_hub_files_that_came_are_not_fetched_again(capfd, hub, tmp_path):
    hub.fail("cdn", status(503), name=SHARDS[1])
    assert_fails(capfd, tmp_path, "503")
    served = hub.served[SHARDS[0]]
    hub.heal()
    assert_converts(tmp_path)
    assert hub.served[SHARDS[0]] == served == (tmp_path / "source" / SHARDS[0]).stat().st_size


def test_hub_part_of_a_repository_in_the_cache_is_not_taken_for_it(hub, tmp_path, monkeypatch):
    hub.fail("cdn", status(503), name=SHARDS[1])
    with pytest.raises(SourceNotFoundError):
        opened_path("org/name")
    with offline(monkeypatch), pytest.raises(SourceNotFoundError, match="nor in the local hub cache"):
        opened_path("org/name")
    hub.fail("listing", status(503))
    with pytest.raises(SourceNotFoundError, match="503"):
        opened_path("org/name")


def test_hub_damaged_file_that_came_before_a_failure_is_not_kept(capfd, hub, tmp_path):
    hub.fail("cdn", changed(lambda content: content[:-1] + b"x"), name=SHARDS[0])
    hub.fail("cdn", status(503), name=SHARDS[1])
    assert_fails(capfd, tmp_path, "503")
    hub.heal()
    assert_converts(tmp_path)


def test_hub_damaged_file_of_the_cache_is_fetched_again(hub, tmp_path):
    blob = (opened_path("org/name") / SHARDS[1]).resolve()
    blob.write_bytes(blob.read_bytes()[:-1])
    assert_converts(tmp_path)


def test_hub_that_fails_leaves_what_the_cache_holds(caplog, hub, tmp_path):
    opened_path("org/name")
    hub.fail("listing", status(503))
    assert_converts(tmp_path)
    assert "503" in caplog.text
    assert "what the local hub cache holds is taken" in caplog.text


# one commit


def test_hub_branch_that_moves_is_fetched_as_it_was_listed(hub, tmp_path, monkeypatch):
    commit = hub.repositories["org/name"].refs["main"]
    moved = write_checkpoint(tmp_path / "moved", llama_tensors(seed=1), llama_config(vocab_size=32))
    hub.fail("listing", followed_by(lambda: hub.add("org/name", moved)), 1)
    assert_converts(tmp_path)
    assert opened_path(f"org/name@{commit}").name == commit
    with offline(monkeypatch):
        assert opened_path("org/name").name == commit
    now = opened_path("org/name")
    assert now.name == hub.repositories["org/name"].refs["main"] != commit
    with offline(monkeypatch):
        assert opened_path("org/name") == now
        assert opened_path(f"org/name@{commit}").name == commit


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1", "commit"])
def test_hub_revision_is_found_offline_once_it_was_fetched(hub, tmp_path, monkeypatch, revision):
    commit = hub.add("org/name", tmp_path / "source", ref="refs/pr/1" if revision == "commit" else revision)
    hub.add("org/name", write_checkpoint(tmp_path / "other", llama_tensors(seed=1)))
    source = f"org/name@{commit if revision == 'commit' else revision}"
    fetched = opened_path(source)
    with offline(monkeypatch):
        assert opened_path(source) == fetched
        assert_converts(tmp_path, source)
        with pytest.raises(SourceNotFoundError, match="HF_HUB_OFFLINE is set"):
            opened_path("org/name")


def test_hub_cache_that_is_read_only_will_do(caplog, hub, tmp_path, monkeypatch):
    snapshot = opened_path("org/name")
    (snapshot.parents[1] / "refs" / "main").unlink()
    (snapshot.parents[1] / "refs").rmdir()
    (snapshot.parents[1] / "refs").write_text("in the way")
    assert opened_path("org/name") == snapshot
    assert "refs/main: org/name will not be found without the hub: " in caplog.text


# what is fetched


def test_hub_other_weights_are_not_fetched(hub, tmp_path, monkeypatch):
    source = tmp_path / "source"
    for name in ("consolidated.safetensors", "original/model.safetensors", "onnx/model.onnx", "original/params.pth",
                 "pytorch_model.bin", "consolidated.00.pth", "model.gguf", "adapter_model.safetensors"):  # fmt: skip
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"other weights")
    (source / "tokenizer.model").write_bytes(b"tokens")
    hub.add("org/name", source)
    assert_converts(tmp_path)
    assert set(hub.served) == {*SHARDS, "model.safetensors.index.json", "config.json", "tokenizer.model"}
    with offline(monkeypatch):
        assert opened_path("org/name").is_dir()


def test_hub_one_file_is_fetched_without_its_copies(hub, tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "one", llama_tensors(), llama_config())
    (tmp_path / "one" / "consolidated.safetensors").write_bytes(b"other weights")
    hub.add("org/one", tmp_path / "one")
    opened_path("org/one")
    assert set(hub.served) == {"model.safetensors", "config.json"}
    with offline(monkeypatch):
        assert ftw.inspect("org/one").num_tensors == len(llama_tensors())


def test_hub_files_without_an_index_are_all_fetched(hub, tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "two", llama_tensors(), llama_config(), "a.safetensors")
    write_checkpoint(tmp_path / "two", {"b": torch.ones(1)}, None, "b.safetensors")
    write_checkpoint(tmp_path / "two" / "below", {"c": torch.ones(1)}, None, "c.safetensors")
    hub.add("org/two", tmp_path / "two")
    opened_path("org/two")
    assert set(hub.served) == {"a.safetensors", "b.safetensors", "config.json"}
    with offline(monkeypatch):
        snapshot = opened_path("org/two")
        assert ftw.inspect("org/two").num_tensors == len(llama_tensors()) + 1
        (snapshot / "b.safetensors").unlink()
        if is_release_2():  # which keeps the list of all files
            with pytest.raises(SourceNotFoundError, match="holds only a part of it"):
                opened_path("org/two")


def test_hub_ftw_folder_is_fetched_with_its_shards(hub, tmp_path):
    folder = write_ftw(tmp_path / "ftw", llama_tensors())
    (folder / "model.gguf").write_bytes(b"other weights")
    hub.add("org/ftw", folder)
    assert ftw.verify(opened_path("org/ftw"), against=folder).is_ok
    assert "model.gguf" not in hub.served


def test_hub_index_that_names_what_is_not_there_is_seen_before_the_fetch(hub, tmp_path):
    (tmp_path / "source" / SHARDS[1]).unlink()
    hub.add("org/name", tmp_path / "source")
    with pytest.raises(CheckpointError, match=f"^org/name/{SHARDS[1]}: file: is missing$"):
        opened_path("org/name")
    assert set(hub.served) == {"config.json", "model.safetensors.index.json"}


def test_hub_retry_after_is_bounded(waits, hub):
    hub.fail("cdn", status(503, Retry_After=str(MAX_WAIT + 1)))
    with pytest.raises(SourceNotFoundError):
        opened_path("org/name")
    assert not waits


def is_release_2() -> bool:
    return hasattr(sys.modules["huggingface_hub.errors"], "IncompleteSnapshotError")


@pytest.mark.parametrize(
    "name",
    ["../../../../../victim.json", "a/../../../../../../victim.json", "/etc/x.json", "a//x.json", "", "x\0.json",
     "x\x1b[2J.json", "a\\x.json", "config.json/x.json", "n" * 256 + ".json", "./x.json"],
    ids="up up-below absolute empty-part empty nul control backslash file-and-folder long dot".split(),
)  # fmt: skip
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_hub_listing_of_a_name_that_is_none(capfd, hub, tmp_path, command, name):
    victim = tmp_path / "victim.json"
    victim.write_text("mine")
    ftw.convert("org/name", tmp_path / "before")  # the cache holds the snapshot that the name leads out of
    hub.repositories["org/name"].commits[hub.repositories["org/name"].refs["main"]][name] = b"{}"
    capfd.readouterr()
    arguments = [command, "org/name"] + [str(tmp_path / "out")] * (command == "convert")
    assert main(arguments) == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].isprintable()
    assert lines[0].startswith("ftw: error: org/name: repository: the hub lists a file '")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("sha", "../../x", "the commit '../../x', 40 hexadecimal digits are needed"),
        ("sha256", "/tmp/x", "a file .* of SHA-256 '/tmp/x', 64 hexadecimal digits are needed"),
        ("size", -1, "a file .* of -1 bytes, a number is needed"),
    ],
    ids="commit sha256 size".split(),
)
def test_hub_listing_of_what_is_no_hash_or_size(monkeypatch, hub, key, value, problem):
    from huggingface_hub import HfApi

    real = HfApi.model_info

    def model_info(*arguments, **options):
        info = real(*arguments, **options)
        large = next(file for file in info.siblings if file.lfs)
        if key == "sha":
            info.sha = value
        elif key == "size":
            large.size = value
        else:
            large.lfs.sha256 = value
        return info

    monkeypatch.setattr(HfApi, "model_info", model_info)
    with pytest.raises(CheckpointError, match=f"^org/name: repository: the hub lists {problem}"):
        ftw.inspect("org/name")


def test_hub_file_outside_of_the_cache_is_not_deleted(hub, tmp_path, monkeypatch):
    repository = list_repository(parse_hub_id("org/name"))
    snapshot = opened_path("org/name")
    victim = tmp_path / "victim.json"
    victim.write_text("mine")
    link = snapshot / "link.json"
    link.symlink_to(victim)
    for path in (victim, link, snapshot / "../../../../../victim.json"):
        with pytest.raises(CheckpointError, match="it is not deleted"):
            hub_fetch._delete(repository, path)
    assert victim.read_text() == "mine"
