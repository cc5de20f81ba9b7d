"""Hub ids: headers read by ranges from a hub on this machine, and what `ftw convert` fetches of it."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from builders import llama_config, llama_tensors, padded, write_checkpoint, write_ftw, write_sharded
from ftw.cli.main import main
from gguf_builder import ARCHITECTURE, entry, gguf_bytes, kv, write_gguf
from hub_server import TOKEN, HubServer, offline
from inspecting import assert_same_report, opened_path

import ftw
from ftw.errors import CheckpointError, SourceNotFoundError
from ftw.hub.remote_file import HEADER_NBYTES

KIB = 1 << 10


def error_of(source: str) -> str:
    with pytest.raises(SourceNotFoundError) as caught:
        ftw.inspect(source)
    assert str(caught.value).isprintable()
    assert str(caught.value).startswith(f"{source}: ")
    return str(caught.value).removeprefix(f"{source}: ")


# formats


def test_hub_safetensors_file_takes_three_requests_and_no_weights(hub, tmp_path):
    folder = write_checkpoint(tmp_path / "m", padded(llama_tensors()), llama_config())
    hub.add("org/name", folder)
    assert_same_report("org/name", folder)
    assert sum(request.path.startswith("/api/models/") for request in hub.requests) == 1
    assert len(hub.reads()) == 2
    assert hub.served["model.safetensors"] == HEADER_NBYTES
    assert not (tmp_path / "hub").exists()


def test_hub_shards_are_read_in_parallel_by_their_headers(hub, tmp_path):
    shards = {f"model-{n:05}-of-00050.safetensors": padded({}, 400 * KIB, f"padding.{n}") for n in range(1, 50)}
    shards["model-00050-of-00050.safetensors"] = padded(llama_tensors(), 400 * KIB)
    folder = write_sharded(tmp_path / "m", shards, llama_config())
    write_checkpoint(folder, padded({"stray": torch.ones(1)}), file="stray.safetensors")
    hub.add("org/name", folder)
    together, numbers = threading.Barrier(16, timeout=600), iter(range(50))

    def gate() -> None:
        if next(numbers) < 16:
            together.wait()  # broken, and the connection with it, unless 16 come at a time

    hub.gate = gate
    assert_same_report("org/name", folder)
    assert set(hub.served) == {*shards, "config.json", "model.safetensors.index.json"}
    assert max(hub.served[name] for name in shards) == HEADER_NBYTES
    assert len(hub.reads()) == 52


def test_hub_long_header_takes_a_second_request(hub, tmp_path):
    tensors = {f"model.layers.{n}.{'x' * 60}.weight": torch.zeros(256, dtype=torch.uint8) for n in range(3000)}
    folder = write_checkpoint(tmp_path / "m", padded({**llama_tensors(), **tensors}), llama_config())
    hub.add("org/name", folder)
    assert_same_report("org/name", folder)
    length = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert length > HEADER_NBYTES
    assert hub.served["model.safetensors"] == 8 + length + 2 * 1024  # the table and the LM head are looked at
    assert len(hub.reads()) == 5


def test_hub_ftw_folder(hub, tmp_path):
    folder = write_ftw(tmp_path / "m", padded(llama_tensors()))
    (folder / "config.json").write_text(json.dumps(llama_config()))
    hub.add("org/name", folder)
    assert_same_report("org/name", folder)
    assert hub.served["freetoken-00000.ftw"] in (0, HEADER_NBYTES)  # no header; a look at the table and the LM head


def test_hub_ftw_made_from_gguf_reads_its_metadata(hub, tmp_path):
    source = tiny_gguf(tmp_path / "m.gguf")
    ftw.convert(source, tmp_path / "out")
    hub.add("org/name", tmp_path / "out")
    assert_same_report("org/name", tmp_path / "out")
    assert ftw.verify(opened_path("org/name"), against=source).is_ok


def test_hub_gguf_with_a_large_vocabulary_reads_its_header_alone(hub, tmp_path):
    tokens = [f"token{number:07}" for number in range(250_000)]
    kvs = [
        ARCHITECTURE,
        kv("llama.embedding_length", "u32", 8),
        kv("tokenizer.ggml.tokens", "array", ("str", tokens)),
        kv("tokenizer.ggml.scores", "array", ("f32", [0.0] * len(tokens))),
    ]
    rows = 250_000
    entries = [entry("token_embd.weight", (8, rows)), entry("output.weight", (8, rows), offset=rows * 32)]
    content = gguf_bytes(entries, bytes(rows * 32) + b"\x01" * rows * 32, kvs=kvs)
    header_nbytes = len(content) - 2 * rows * 32
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.gguf").write_bytes(content)
    hub.add("org/name", tmp_path / "m")
    assert_same_report("org/name", tmp_path / "m")
    # What is fetched besides: the rest of the last window, and the first 64 KiB of the table and the LM head.
    assert (len(content), header_nbytes) == (22_000_320, 6_000_320)
    assert hub.served["model.gguf"] < header_nbytes + (1 << 20) + (128 << 10)
    assert len(hub.reads()) <= 10


def tiny_gguf(path: Path, *, fill: int = 0, **splitting) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = np.full((64, 8), fill, np.float32)
    kvs = {"llama.embedding_length": (gguf.GGUFValueType.UINT32, 8)}
    return write_gguf(path, {"token_embd.weight": table, "blk.0.attn_q.weight": table}, kvs, **splitting)


@pytest.fixture
def gguf_repo(hub, tmp_path) -> Path:
    """A repository as those of quantisers are: models beside each other, one of them in shards, one in a folder."""
    folder = tmp_path / "m"
    tiny_gguf(folder / "model-Q4_0.gguf")
    tiny_gguf(folder / "model-Q8_0.gguf", fill=1)
    tiny_gguf(folder / "BF16" / "model-BF16.gguf", fill=2, split_max_tensors=1)
    tiny_gguf(folder / "mmproj-F16.gguf")
    (folder / "README.md").write_text("read me")
    hub.add("org/name", folder)
    return folder


def test_hub_gguf_repository_of_several_models_lists_them(capsys, hub, gguf_repo):
    problem = "folder: holds 2 GGUF models (model-Q4_0.gguf, model-Q8_0.gguf), name one of them"
    for command in (["inspect", "org/name"], ["convert", "org/name", "out"]):
        assert main(command) == 1
        assert capsys.readouterr() == ("", f"ftw: error: org/name: {problem}\n")
    assert not hub.reads()


@pytest.mark.parametrize(
    "inside", ["model-Q8_0.gguf", "BF16", "BF16/model-BF16-00002-of-00002.gguf"], ids=["file", "folder", "shard"]
)
def test_hub_gguf_model_is_inspected_by_name(hub, gguf_repo, inside):
    assert_same_report(f"org/name/{inside}", gguf_repo / inside)


@pytest.mark.parametrize(
    ("inside", "fetched"),
    [
        ("model-Q8_0.gguf", ["model-Q8_0.gguf"]),
        ("BF16/model-BF16-00002-of-00002.gguf", ["BF16/model-BF16-00001-of-00002.gguf",
                                                 "BF16/model-BF16-00002-of-00002.gguf"]),
        ("BF16", ["BF16/model-BF16-00001-of-00002.gguf", "BF16/model-BF16-00002-of-00002.gguf"]),
    ],
    ids=["file", "shard", "folder"],
)  # fmt: skip
def test_hub_gguf_model_is_fetched_by_name(hub, gguf_repo, tmp_path, monkeypatch, inside, fetched):
    source = f"org/name/{inside}"
    ftw.convert(source, tmp_path / "out")
    assert ftw.verify(tmp_path / "out", against=gguf_repo / inside).is_ok
    assert sorted(hub.served) == fetched
    with offline(monkeypatch):
        assert opened_path(source).exists()
        assert_same_report(source, gguf_repo / inside)
        if hasattr(sys.modules["huggingface_hub.errors"], "IncompleteSnapshotError") and inside != "BF16":
            assert "the local hub cache holds only a part of it" in error_of("org/name")


def test_hub_gguf_repository_of_one_model_is_fetched_without_its_projector(hub, tmp_path, monkeypatch):
    tiny_gguf(tmp_path / "m" / "model.gguf")
    tiny_gguf(tmp_path / "m" / "mmproj-F16.gguf")
    hub.add("org/name", tmp_path / "m")
    assert opened_path("org/name").is_dir()
    assert set(hub.served) == {"model.gguf"}
    with offline(monkeypatch):
        assert ftw.inspect("org/name").num_tensors == 2


# folders, revisions, the cache


def test_hub_folder_of_a_repository(hub, tmp_path):
    write_checkpoint(tmp_path / "m" / "sub" / "folder", llama_tensors(), llama_config())
    write_checkpoint(tmp_path / "m", {"other": torch.ones(1)}, {})
    hub.add("org/name", tmp_path / "m")
    assert_same_report("org/name/sub/folder", tmp_path / "m" / "sub" / "folder")
    ftw.convert("org/name/sub/folder/model.safetensors", tmp_path / "out")
    assert set(hub.served) == {"sub/folder/model.safetensors", "sub/folder/config.json"}
    assert ftw.verify(tmp_path / "out", against=tmp_path / "m" / "sub" / "folder").is_ok


def test_hub_revision_is_a_branch_a_tag_or_a_commit(hub, tmp_path):
    old = write_checkpoint(tmp_path / "old", llama_tensors(head=False), llama_config())
    new = write_checkpoint(tmp_path / "new", llama_tensors(), llama_config())
    commit = hub.add("org/name", old, ref="v1.0")
    hub.add("org/name", new)
    hub.add("org/name", old, ref="refs/pr/1")
    for revision in ("v1.0", commit, "refs/pr/1"):
        assert_same_report(f"org/name@{revision}", old)
        assert_same_report(f"org/name@{revision}/model.safetensors", old / "model.safetensors")
    assert_same_report("org/name", new)
    assert opened_path("org/name@v1.0").name == commit
    assert ftw.inspect(opened_path("org/name@v1.0")).num_tensors == 3


def test_hub_reads_the_commit_that_it_listed(hub, tmp_path):
    old = write_checkpoint(tmp_path / "old", padded(llama_tensors()), llama_config())
    new = write_checkpoint(tmp_path / "new", padded(llama_tensors(seed=1), 3 << 20), llama_config(vocab_size=32))
    hub.add("org/name", old)
    hub.gate = lambda: hub.add("org/name", new)
    with ftw.open_checkpoint("org/name", headers_only=True) as checkpoint:
        assert checkpoint.config.vocab_size == 64
        buffer = bytearray(1024)
        checkpoint.read_into("model.embed_tokens.weight", buffer)
        checkpoint.read_into("padding", bytearray(8), offset=(2 << 20) - 8)
    table = llama_tensors()["model.embed_tokens.weight"]
    assert buffer == table.view(torch.uint8).numpy().tobytes()


def test_hub_reads_what_the_cache_holds_of_the_same_commit_from_there(hub, tmp_path, monkeypatch):
    old = write_checkpoint(tmp_path / "old", padded(llama_tensors()), llama_config())
    hub.add("org/name", old)
    opened_path("org/name")
    hub.requests.clear()
    assert_same_report("org/name", old)
    assert not hub.reads()
    new = write_checkpoint(tmp_path / "new", padded(llama_tensors(head=False)), llama_config())
    hub.add("org/name", new)
    assert_same_report("org/name", new)
    with offline(monkeypatch):
        assert_same_report("org/name", old)


def test_hub_partial_cache_is_not_the_repository(hub, tmp_path, monkeypatch):
    shards = {f"model-{n:05}-of-00002.safetensors": padded({}, 8, f"t{n}") for n in (1, 2)}
    folder = write_sharded(tmp_path / "m", shards, llama_config())
    commit = hub.add("org/name", folder)
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (snapshot / name).write_bytes((folder / name).read_bytes())
    assert_same_report("org/name", folder)
    assert set(hub.served) == {"config.json", "model-00002-of-00002.safetensors"}
    with offline(monkeypatch), pytest.raises(CheckpointError, match=r"-00002-of-00002[.]safetensors: file: is"):
        ftw.inspect("org/name")


@pytest.mark.parametrize("is_copy", [True, False], ids=["copy", "other"])
def test_hub_lm_head_is_compared_by_samples(hub, tmp_path, is_copy):
    table = torch.arange(2 << 20, dtype=torch.int32).reshape(-1, 8)
    head = table.clone()
    if not is_copy:
        head[-1] = 0
    tensors = {"model.embed_tokens.weight": table, "lm_head.weight": head}
    folder = write_checkpoint(tmp_path / "m", tensors, llama_config(vocab_size=len(table), tie_word_embeddings=True))
    hub.add("org/name", folder)
    assert_same_report("org/name", folder)
    assert ftw.inspect("org/name").verdict.tied is (True if is_copy else None)
    assert hub.served["model.safetensors"] < 2 * (HEADER_NBYTES + 2 * 17 * 64 * KIB)


# tokens


@pytest.mark.parametrize("access", ["private", "gated"])
def test_hub_token_is_sent_to_the_hub_and_not_to_its_cdn(hub, tmp_path, monkeypatch, access):
    folder = write_checkpoint(tmp_path / "m", padded(llama_tensors()), llama_config())
    hub.add("org/name", folder, access=access)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert_same_report("org/name", folder)
    sent = {(request.is_cdn, request.headers.get("authorization")) for request in hub.requests}
    assert sent == {(False, f"Bearer {TOKEN}"), (True, None)}


# refusals


def test_hub_missing_repository(hub):
    words = "the hub has no such repository, or it is private and needs a token ('hf auth login')"
    assert error_of("org/absent") == f"hub id: is neither a path nor in the local hub cache, and {words}"
    no_path = "path: does not exist, a file, a folder or a hub id is needed"
    assert error_of("org/absent/x.gguf") == f"{no_path}; it is not in the local hub cache, and for org/absent, {words}"


def test_hub_gated_repository(hub, tmp_path):
    folder = write_checkpoint(tmp_path / "m", padded(llama_tensors()))
    hub.add("org/name", folder, access="gated")
    page = f"{hub.url}/org/name"
    words = f"the repository is gated; ask for access at {page}, then give a token ('hf auth login')"
    with pytest.raises(SourceNotFoundError) as caught:
        ftw.inspect("org/name")
    assert str(caught.value) == f"org/name/model.safetensors: file: {words}"
    with pytest.raises(SourceNotFoundError) as caught:
        opened_path("org/name")
    assert str(caught.value) == f"org/name: hub id: cannot be fetched: {words}"


def test_hub_wrong_token(hub, tmp_path, monkeypatch):
    hub.add("org/name", write_checkpoint(tmp_path / "m", llama_tensors()))
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert error_of("org/name").endswith("the hub does not take the token; give another one ('hf auth login')")


def test_hub_missing_revision(hub, tmp_path):
    hub.add("org/name", write_checkpoint(tmp_path / "m", llama_tensors()))
    assert error_of("org/name@v2") == "hub id: the repository has no revision 'v2'"
    with pytest.raises(SourceNotFoundError, match="org/name@v2: hub id: the repository has no revision 'v2'"):
        opened_path("org/name@v2")


@pytest.mark.parametrize("inside", ["absent.gguf", "model.safetensors/x", "sub"], ids=["file", "below_file", "folder"])
def test_hub_missing_file(hub, tmp_path, inside):
    commit = hub.add("org/name", write_checkpoint(tmp_path / "m", llama_tensors()))
    words = f"hub id: the repository has no such file or folder, at commit {commit}"
    assert error_of(f"org/name/{inside}") == words


def test_hub_repository_without_weights(hub, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "README.md").write_text("nothing")
    hub.add("org/name", tmp_path / "m")
    assert error_of("org/name") == "checkpoint: this folder holds none, ftw or gguf or safetensors is needed"


def test_hub_index_that_names_a_missing_shard(hub, tmp_path):
    folder = write_sharded(tmp_path / "m", {"a.safetensors": {"t": torch.ones(1)}})
    (folder / "a.safetensors").rename(folder / "b.safetensors")
    hub.add("org/name", folder)
    with pytest.raises(CheckpointError, match=r"^org/name/a.safetensors: file: is missing$"):
        ftw.inspect("org/name")


def test_hub_offline(hub, monkeypatch):
    problem = "hub id: is neither a path nor in the local hub cache, and the hub cannot be reached"
    with offline(monkeypatch):
        assert error_of("org/name") == f"{problem}: HF_HUB_OFFLINE is set"
    hub.close()
    assert error_of("org/name").startswith(f"{problem} at {hub.url}: Connect")


def test_hub_that_is_none(hub, monkeypatch):
    monkeypatch.setattr(hub_server_handler(hub), "_send_listing", lambda self, *_: self._send(200, {}, b"<html>"))
    words = f"{hub.url} does not answer as a hub does: its answer is not JSON"
    assert error_of("org/name") == f"hub id: is neither a path nor in the local hub cache, and {words}"


def hub_server_handler(server: HubServer) -> type:
    return server._servers[0].RequestHandlerClass


def test_hub_errors_are_one_line_of_the_command(hub, tmp_path):
    hub.add("org/gated", write_checkpoint(tmp_path / "m", padded(llama_tensors())), access="gated")
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    script = (
        "from ftw.cli.main import main\n"
        "for name in ('absent', 'gated', 'gated@v2', 'gated/x.gguf'):\n"
        "    assert main(['inspect', f'org/{name}']) == 1"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("\n") == 4
    assert all(line.startswith("ftw: error: org/") for line in done.stderr.splitlines())


def test_hub_is_not_asked_for_a_slip_below_a_local_folder(hub, tmp_path):
    write_checkpoint(tmp_path / "models" / "llama", llama_tensors())
    assert error_of("models/llama/modle.safetensors").endswith("a file, a folder or a hub id is needed")
    assert not hub.requests
