"""Links that lead out of a checkpoint's folder: refused by default, followed where the user allows it; hub caches."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw, write_sharded
from ftw.cli.main import main
from inspecting import stored_bytes, tensor_bytes
from layouts import INDEX

import ftw
from ftw.errors import CheckpointError, FtwError
from ftw.files import Roots

TENSORS = llama_tensors()
SHARD = "model-00001-of-00001.safetensors"
WAY_OUT = r"; --follow-links \(follow_links=True\) allows links to anywhere$"


def move_out(folder: Path, *names: str) -> None:
    """Put files into a store elsewhere, under other names, and links in their places."""
    store = folder.parent / "store"
    store.mkdir(exist_ok=True)
    for name in names:
        path = folder / name
        path.rename(store / f"blob-{name}")
        path.symlink_to(store / f"blob-{name}")


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder all of whose files are links into a store, as shared disks have it."""
    folder = write_sharded(tmp_path / "m", {SHARD: TENSORS}, llama_config())
    (folder / "tokenizer.json").write_text("{}")
    move_out(folder, SHARD, INDEX, "config.json", "tokenizer.json")
    return folder


def load(source: Path, **options: Any) -> None:
    ftw.load(source, device="cpu", **options).close()


def convert(source: Path, **options: Any) -> None:
    ftw.convert(source, source.parent / "out", **options)


def load_by_transformers(source: Path, **options: Any) -> None:
    from ftw.integrations.transformers import load

    load(source, device="cpu", **options)


OPENERS: list[Callable[..., Any]] = [ftw.open_checkpoint, ftw.inspect, ftw.verify, convert, load, load_by_transformers]


@pytest.mark.parametrize("use", OPENERS, ids=lambda use: use.__name__)
def test_every_way_to_open_a_checkpoint_takes_follow_links(linked: Path, use: Callable[..., Any]) -> None:
    with pytest.raises(CheckpointError, match=WAY_OUT):
        use(linked)
    if use is load_by_transformers:  # this folder lacks weights of a whole model, which is said after it was opened
        with pytest.raises(FtwError, match="LlamaForCausalLM needs it"):
            use(linked, follow_links=True)
    else:
        use(linked, follow_links=True)


@pytest.mark.parametrize("command", ["inspect", "convert", "verify"])
def test_every_command_takes_follow_links(linked: Path, capsys: Any, command: str) -> None:
    arguments = [command, str(linked), *([str(linked.parent / "out")] if command == "convert" else [])]
    assert main(arguments) == 1
    assert capsys.readouterr().err.endswith("; --follow-links allows links to anywhere\n")
    assert main([*arguments, "--follow-links"]) == 0
    if command == "convert":
        assert main(["verify", str(linked.parent / "out"), "--against", str(linked), "--follow-links"]) == 0


def test_links_that_are_followed_give_what_they_lead_to(linked: Path) -> None:
    with ftw.open_checkpoint(linked, follow_links=True) as checkpoint:
        assert {name: stored_bytes(checkpoint, name) for name in TENSORS} == {
            name: tensor_bytes(tensor) for name, tensor in TENSORS.items()
        }
        assert (checkpoint.config.vocab_size, checkpoint.warnings) == (64, ())
    out = linked.parent / "out"
    ftw.convert(linked, out, follow_links=True)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not any(path.is_symlink() for path in out.iterdir())


def test_config_alone_that_is_a_link_out_is_read_if_links_are_followed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", TENSORS, llama_config())
    move_out(folder, "config.json")
    report = ftw.inspect(folder)
    assert report.config.vocab_size is None
    assert "config.json is a link that leads out of the folder, and is not read" in report.verdict.warnings[0]
    report = ftw.inspect(folder, follow_links=True)
    assert (report.config.vocab_size, report.verdict.warnings) == (64, ())


def test_ftw_in_links_is_verified_if_links_are_followed(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "src", TENSORS, llama_config())
    folder = tmp_path / "m"
    ftw.convert(source, folder)
    move_out(folder, "freetoken-00000.ftw", "config.json")
    assert any("link" in problem for problem in ftw.verify(folder).problems)
    assert ftw.verify(folder, against=source, follow_links=True).is_ok


@pytest.mark.parametrize("target", ["nowhere", SHARD, "."], ids=["nothing", "itself", "folder"])
def test_link_that_leads_to_no_file_is_refused_all_the_same(tmp_path: Path, target: str) -> None:
    folder = write_sharded(tmp_path / "m", {SHARD: TENSORS}, llama_config())
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(target)
    with pytest.raises(CheckpointError, match="file: is"):
        ftw.open_checkpoint(folder, follow_links=True)


def test_link_that_changes_after_it_was_followed_gives_no_other_file(linked: Path) -> None:
    other = linked.parent / "other"
    other.write_bytes((linked / SHARD).read_bytes())
    with ftw.open_checkpoint(linked, follow_links=True) as checkpoint:
        (linked / SHARD).unlink()
        (linked / SHARD).symlink_to(other)
        assert stored_bytes(checkpoint, "model.norm.weight") == tensor_bytes(TENSORS["model.norm.weight"])
        blob = linked.parent / "store" / f"blob-{SHARD}"
        blob.unlink()
        blob.symlink_to(other)
        with pytest.raises(CheckpointError, match="changed while it was being read"):
            stored_bytes(checkpoint, "model.norm.weight")


# The hub's cache


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """An entry of a hub cache, as huggingface_hub lays it out."""
    plain, entry = (
        write_sharded(tmp_path / "plain", {SHARD: TENSORS}, llama_config()),
        tmp_path / "hub/models--org--name",
    )
    snapshot = entry / "snapshots" / COMMIT
    for folder in (snapshot, entry / "blobs", entry / "refs"):
        folder.mkdir(parents=True)
    (entry / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(plain.iterdir())):
        path.rename(entry / "blobs" / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    return entry


def put_elsewhere(path: Path, elsewhere: Path) -> None:
    elsewhere.parent.mkdir(parents=True, exist_ok=True)
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


MOVES: dict[str, Callable[[Path], None]] = {
    "blobs": lambda entry: put_elsewhere(entry / "blobs", entry.parents[1] / "disk" / "b"),
    "entry": lambda entry: put_elsewhere(entry, entry.parents[1] / "disk" / "name"),
    "cache": lambda entry: put_elsewhere(entry.parent, entry.parents[1] / "disk" / "cache"),
    "entry and blobs": lambda entry: (MOVES["blobs"](entry), MOVES["entry"](entry))[1],
    "snapshots": lambda entry: put_elsewhere(entry / "snapshots", entry / "s"),
}


@pytest.mark.parametrize("move", MOVES)
def test_hub_cache_on_another_disk_behind_a_link_is_read(
    entry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: str
) -> None:
    from huggingface_hub import constants

    MOVES[move](entry)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(entry.parent))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    assert ftw.inspect(entry / "snapshots" / COMMIT).is_host_eligible
    assert ftw.inspect("org/name").is_host_eligible
    ftw.convert("org/name", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("name", ["id_rsa", "a" * 39, "A" * 40, "g" * 64, "0" * 63])
def test_blobs_behind_a_link_give_nothing_that_is_not_called_by_a_hash(entry: Path, name: str) -> None:
    MOVES["blobs"](entry)
    (entry / "blobs" / name).write_text("secret")
    snapshot = entry / "snapshots" / COMMIT
    (snapshot / "notes.txt").symlink_to(f"../../blobs/{name}")
    result = ftw.convert(snapshot, entry.parents[1] / "out")
    assert [(left.name, left.reason) for left in result.plan.left_out] == [
        ("notes.txt", "a link that leads out of the source")
    ]


def test_blobs_behind_a_link_give_nothing_below_them_or_beside_them(entry: Path) -> None:
    MOVES["blobs"](entry)
    blobs, blob = (entry / "blobs").resolve(), "f" * 64
    for folder in (blobs / "sub", blobs.parent):
        folder.mkdir(exist_ok=True)
        (folder / blob).write_text("secret")
    snapshot = entry / "snapshots" / COMMIT
    for link in (f"sub/{blob}", f"../{blob}"):
        (snapshot / "x").unlink(missing_ok=True)
        (snapshot / "x").symlink_to(blobs / link)
        assert Roots(snapshot).locate("x") is None


def test_blobs_that_become_a_link_later_are_not_followed(entry: Path) -> None:
    roots = Roots(entry / "snapshots" / COMMIT)
    assert roots.locate(SHARD) is not None
    MOVES["blobs"](entry)
    assert roots.locate(SHARD) is None


def test_blobs_of_an_entry_give_what_any_name_of_theirs_says(entry: Path) -> None:
    (entry / "blobs" / "odd").write_text("x")
    (entry / "snapshots" / COMMIT / "y").symlink_to("../../blobs/odd")
    assert Roots(entry / "snapshots" / COMMIT).locate("y") == os.path.realpath(entry / "blobs" / "odd")


def test_index_of_an_ftw_behind_links_is_read(tmp_path: Path) -> None:
    folder = write_ftw(tmp_path / "m", {"t": torch.arange(3)})
    move_out(folder, "freetoken_weight.json", "freetoken-00000.ftw")
    with pytest.raises(CheckpointError, match=WAY_OUT):
        ftw.open_checkpoint(folder)
    with ftw.open_checkpoint(folder, follow_links=True) as checkpoint:
        assert list(checkpoint.tensors) == ["t"]
