"""Tables in host memory: with a limit, on a refusing driver, with dummy contents, and shared by processes."""

import functools
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import xxhash
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw
from fake_driver import FakeDriver
from gguf import GGMLQuantizationType, GGUFValueType
from gguf_builder import random_blocks, write_gguf
from leaks import holdings
from packed_tables import assert_equal_rows

import ftw
from ftw.files import parallel_read as bulk_read
from ftw.host.limits import HostLimits
from ftw.host.shared import segment as shared_segment
from ftw.loading import device_copy, host_tables, loader, shared_tables
from ftw.lookup import embedding
from ftw.memory import MemorySnapshot
from ftw.pinned import budget, buffer, memory_report
from ftw.pinned import driver as gpu_driver

TABLE = "model.embed_tokens.weight"
GPU = torch.device("cuda", 0)
IDS = torch.tensor([0, 5, 63, 64, -1])
PLENTY = HostLimits(available=1 << 40, cgroup_free=None, memlock=None, is_wsl=False)


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def large_checkpoint(folder: Path, rows: int = 4099, seed: int = 0) -> Path:
    """Write an untied checkpoint whose table, of 8 MiB and a bit, is read around the page cache by several jobs."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(rows, 1024, generator=generator).to(torch.bfloat16) for name in (TABLE, "lm_head.weight")
    }
    return write_checkpoint(folder, tensors, llama_config(vocab_size=rows, hidden_size=1024))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return large_checkpoint(tmp_path / "source")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Stand in for a GPU and its driver."""
    fake = FakeDriver()
    nothing = MemorySnapshot(0, 0, 0, 0, 0)
    for module in (loader, embedding):
        monkeypatch.setattr(module, "resolve_device", lambda device: GPU)
    monkeypatch.setattr(memory_report, "snapshot", lambda device: nothing)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))  # sampled beside the snapshots
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(buffer, "numa_node_of", lambda device: None)
    monkeypatch.setattr(buffer, "load_driver", fake.as_driver)
    assert gpu_driver.Driver is type(fake.as_driver())
    return fake


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Look at what a process has open, mapped and page-locked, and its threads, around each test."""
    gc.collect()
    before, pinned_nbytes = holdings("/dev/shm"), buffer.count_pinned_bytes()
    yield
    gc.collect()
    assert holdings("/dev/shm") <= before
    assert buffer.count_pinned_bytes() <= pinned_nbytes


def test_pinned_bytes_are_the_table_rounded_up_to_its_page(source: Path, driver: FakeDriver) -> None:
    with ftw.load(source, embed="host") as model:
        assert model.memory.pinned_bytes == {TABLE: 4099 * 2048 // 4096 * 4096 + 4096}
        assert buffer.count_pinned_bytes() >= model.memory.total_pinned_bytes
        assert [call[0] for call in driver.calls] == ["register"]
    assert [call[0] for call in driver.calls] == ["register", "unregister"]


def test_refused_table_is_named_and_gives_everything_back(source: Path, driver: FakeDriver) -> None:
    driver.code = 2
    with pytest.raises(ftw.PinError, match=rf"^{TABLE}: page-locked memory: cuda:0 refused to page-lock 8.01 MiB"):
        ftw.load(source, embed="host")


@pytest.mark.parametrize("limit", ["8MiB", 1], ids=["below-the-table", "of-one-byte"])
def test_limit_is_checked_before_a_byte_is_read(
    source: Path, monkeypatch: pytest.MonkeyPatch, limit: int | str
) -> None:
    monkeypatch.setattr(bulk_read, "read_parts", lambda *arguments, **options: pytest.fail("read a table"))
    with pytest.raises(ftw.PinError, match=TABLE):
        ftw.load(source, embed="host", device="cpu", max_pinned_bytes=limit)


def test_limit_counts_what_is_page_locked_already(
    source: Path, tmp_path: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = buffer.count_pinned_bytes() + 4099 * 2048 + 4096
    with ftw.load(source, embed="host", max_pinned_bytes=limit), pytest.raises(ftw.PinError, match="already"):
        ftw.load(source, embed="host", max_pinned_bytes=limit)
    with ftw.load(source, embed="host", max_pinned_bytes=limit) as model:  # it was given back
        assert model.tables


@pytest.mark.parametrize(
    "limits",
    [replace(PLENTY, available=4 << 20), replace(PLENTY, cgroup_free=4 << 20)],
    ids=["host", "cgroup"],
)
def test_table_that_the_host_has_no_room_for_is_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch, limits: HostLimits
) -> None:
    monkeypatch.setattr(budget, "read_host_limits", lambda: limits)
    with pytest.raises(ftw.PinError, match=TABLE) as caught:
        ftw.load(source, embed="host", device="cpu")
    assert len(str(caught.value).splitlines()) == 1
    with ftw.load(source, embed="gpu", device="cpu") as model:
        assert not model.tables


def test_error_halfway_names_the_file_and_gives_everything_back(
    source: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = os.preadv, [0]

    def fail_late(*arguments: object) -> int:
        count[0] += 1
        if count[0] > 1:
            raise OSError(5, "Input/output error")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", fail_late)
    with pytest.raises(OSError, match="Input/output error") as caught:
        ftw.load(source, embed="host")
    assert "model.safetensors" in str(caught.value)
    assert not driver.calls


@pytest.mark.parametrize("huge_pages", [True, False], ids=["huge", "plain"])
@pytest.mark.parametrize("num_threads", [None, 1, 5], ids=str)
def test_rows_are_the_files_whatever_the_way_of_reading(
    source: Path, huge_pages: bool, num_threads: int | None
) -> None:
    with (
        ftw.load(source, embed="gpu", device="cpu") as plain,
        ftw.load(source, embed="host", device="cpu", huge_pages=huge_pages, num_threads=num_threads) as model,
    ):
        assert equal_bits(model.embedding.table, plain.embedding.table)


@pytest.mark.parametrize("share", ["host", "", True], ids=str)
def test_unknown_share_is_a_value_error(source: Path, share: object) -> None:
    with pytest.raises(ValueError, match="allowed are 'node' and None"):
        ftw.load(source, embed="host", device="cpu", share=share)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", ["lots", -1, True, 1.5], ids=str)
def test_limit_that_is_no_size_is_a_value_error(source: Path, limit: object) -> None:
    with pytest.raises(ValueError, match="max_pinned_bytes"):
        ftw.load(source, embed="host", device="cpu", max_pinned_bytes=limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("embed", ["host", "gpu"])
def test_dummy_model_has_types_and_places_of_the_real_one(
    source: Path, monkeypatch: pytest.MonkeyPatch, embed: str
) -> None:
    with ftw.load(source, embed=embed, device="cpu") as model:
        real = {name: (tensor.dtype, tensor.shape) for name, tensor in model.weights()}
    # The verdict itself holds the first bytes of table and head against each other.
    monkeypatch.setattr(device_copy.DeviceCopy, "_copy", lambda *arguments: pytest.fail("read tensor data"))
    monkeypatch.setattr(ftw.Checkpoint, "read_many", lambda *arguments, **options: pytest.fail("read tensor data"))
    with ftw.load(source, embed=embed, device="cpu", dummy=True) as model:
        weights = dict(model.weights())
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()} == real
        assert model.memory.placement == embed
        assert (TABLE in model.tables) is (embed == "host")
        rows = model.embedding(IDS)
        assert rows[:3].isfinite().all()
        assert 0.015 < rows[:3].float().std() < 0.025
        assert not rows[4].count_nonzero()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give segments a folder of their own on /dev/shm, which has to be empty at the end."""
    made = Path(tempfile.mkdtemp(prefix="ftw-test-", dir="/dev/shm"))
    real = shared_segment.open_segment
    monkeypatch.setattr(shared_tables, "open_segment", lambda *args, **options: real(*args, folder=made, **options))
    yield made
    assert list(made.iterdir()) == []
    made.rmdir()


def test_shared_table_is_one_copy_for_all_who_load_it(source: Path, folder: Path) -> None:
    with (
        ftw.load(source, embed="gpu", device="cpu") as plain,
        ftw.load(source, embed="host", device="cpu", share="node") as one,
        ftw.load(source, embed="host", device="cpu", share="node") as other,
    ):
        assert len(list(folder.iterdir())) == 1
        assert equal_bits(one.embedding.table, plain.embedding.table)
        one.embedding.table[7].fill_(3)  # in the same memory
        assert (other.embedding.table[7] == 3).all()
        one.close()
        assert equal_bits(other.embedding(IDS)[:3], plain.embedding(IDS)[:3])
        assert len(list(folder.iterdir())) == 1


def test_shared_table_is_page_locked_by_each_process(source: Path, folder: Path, driver: FakeDriver) -> None:
    with ftw.load(source, embed="host", share="node") as one, ftw.load(source, embed="host", share="node") as other:
        assert [call[0] for call in driver.calls] == ["register", "register"]
        assert one.embedding.table.data_ptr() != other.embedding.table.data_ptr()
    assert [call[0] for call in driver.calls] == ["register", "register", "unregister", "unregister"]


def test_tables_of_different_models_are_not_shared(source: Path, tmp_path: Path, folder: Path) -> None:
    second = large_checkpoint(tmp_path / "second", seed=1)
    with (
        ftw.load(source, embed="host", device="cpu", share="node") as one,
        ftw.load(second, embed="host", device="cpu", share="node") as other,
    ):
        assert len(list(folder.iterdir())) == 2
        assert not equal_bits(one.embedding.table, other.embedding.table)


def test_dummy_table_is_not_shared_with_a_real_one(source: Path, folder: Path) -> None:
    with (
        ftw.load(source, embed="host", device="cpu", share="node") as one,
        ftw.load(source, embed="host", device="cpu", share="node", dummy=True) as other,
    ):
        assert not equal_bits(one.embedding.table, other.embedding.table)


SHARED: dict[str, Any] = {"embed": "host", "device": "cpu", "share": "node"}


def test_same_ftw_is_shared_and_its_copy_is_not(source: Path, tmp_path: Path, folder: Path) -> None:
    ftw.convert(source, tmp_path / "one", embed="host")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    (tmp_path / "link").symlink_to("one")
    with ftw.load(tmp_path / "one", **SHARED), ftw.load(tmp_path / "link", **SHARED):
        assert len(list(folder.iterdir())) == 1
        with ftw.load(tmp_path / "copy", **SHARED):
            assert len(list(folder.iterdir())) == 2


# The secret that xxh3 mixes into the first 8 bytes of the stripes 0 and 1 of a block of 1024: where a lane's low half
# equals it, the product is 0, and the high halves of the two stripes count by their sum alone.
FORGED = {0: (0x396CFEB8, 1), 64: (0x2C81017C, 2)}


def forge(folder: Path, *, swapped: bool) -> Path:
    """Write an FTW whose table has one of two contents in a place that no sample lies in; their checksums are one."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(4096, 1024, generator=generator).bfloat16() for name in (TABLE, "lm_head.weight")}
    block = memoryview(tensors[TABLE].view(torch.uint8).numpy().reshape(-1))[300 * 1024 :]
    for place, (low, high) in FORGED.items():
        block[place : place + 8] = ((3 - high if swapped else high) << 32 | low).to_bytes(8, "little")
    config = llama_config(vocab_size=4096, hidden_size=1024)
    ftw.convert(write_checkpoint(folder / "source", tensors, config), folder / "ftw", embed="host")
    return folder / "ftw"


def test_table_of_a_strangers_ftw_with_the_same_checksum_is_not_taken(tmp_path: Path, folder: Path) -> None:
    trusted, strangers = forge(tmp_path / "a", swapped=False), forge(tmp_path / "b", swapped=True)
    sums = [
        {
            entry["name"]: entry["xxh3_64"]
            for entry in json.loads((path / "freetoken_weight.json").read_text())["tensors"]
        }
        for path in (trusted, strangers)
    ]
    assert sums[0] == sums[1]
    with (
        ftw.load(trusted, embed="host", device="cpu") as alone,
        ftw.load(strangers, **SHARED) as first,
        ftw.load(trusted, **SHARED) as second,
    ):
        assert equal_bits(second.embedding.table, alone.embedding.table)
        assert not equal_bits(second.embedding.table, first.embedding.table)
        assert len(list(folder.iterdir())) == 2


def test_names_and_shapes_are_told_by_a_digest_that_cannot_be_forged(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What xxhash makes of an identity, and of the name of its segment, may be the same for all."""
    second = large_checkpoint(source.parent / "second", seed=1)
    monkeypatch.setattr(xxhash, "xxh3_128_hexdigest", lambda content: "0" * 32)
    with ftw.load(source, **SHARED) as one, ftw.load(second, **SHARED) as other:
        assert len(list(folder.iterdir())) == 2
        assert not equal_bits(one.embedding.table, other.embedding.table)


def rewrite(path: Path) -> None:
    """Write zeros over a part of a file's tensors, in place and under its old time."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-8 << 20 :] = bytes(8 << 20)  # the table is the last tensor, or the head is; both are zeros now
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_file_that_was_rewritten_under_its_old_time_is_another_table(source: Path, folder: Path) -> None:
    with ftw.load(source, **SHARED) as before:
        rewrite(source / "model.safetensors")
        with ftw.load(source, **SHARED) as after, ftw.load(source, embed="host", device="cpu") as alone:
            assert equal_bits(after.embedding.table, alone.embedding.table)
            assert not equal_bits(after.embedding.table, before.embedding.table)


def test_file_that_changes_between_its_opening_and_the_search_for_its_table_is_refused(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shared_tables.open_shared_rows

    def change_and_open(*arguments: Any) -> Any:
        os.utime(source / "model.safetensors", ns=(0, 0))
        return real(*arguments)

    monkeypatch.setattr(host_tables, "open_shared_rows", change_and_open)
    with pytest.raises(ftw.CheckpointError, match=r"model\.safetensors: file: changed while it was being read"):
        ftw.load(source, **SHARED)


def test_samples_are_compared_with_the_own_file(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tables, "_state_of", lambda file: list(file.identity))  # a system without the other time
    with ftw.load(source, **SHARED):
        rewrite(source / "model.safetensors")
        with pytest.raises(ftw.SharedMemoryError, match=f"{TABLE}: shared memory of this host holds other bytes"):
            ftw.load(source, **SHARED)


def test_wrong_checksum_is_found_before_others_take_the_table(tmp_path: Path, folder: Path) -> None:
    target = write_ftw(tmp_path / "ftw", llama_tensors())
    (target / "config.json").write_text(json.dumps(llama_config()))
    index = json.loads((target / "freetoken_weight.json").read_text())
    for entry in index["tensors"]:
        entry["xxh3_64"] = "0" * 16
    (target / "freetoken_weight.json").write_text(json.dumps(index))
    with pytest.raises(ftw.CheckpointError, match=rf"{TABLE}: checksum is .*, the index says 0000000000000000"):
        ftw.load(target, embed="host", device="cpu", share="node")


@pytest.mark.parametrize(
    "limits",
    [replace(PLENTY, available=4 << 20), replace(PLENTY, cgroup_free=4 << 20)],
    ids=["host", "cgroup"],
)
def test_shared_table_that_the_host_has_no_room_for_is_refused_to_who_fills(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, limits: HostLimits
) -> None:
    shared = {"embed": "host", "device": "cpu", "share": "node"}
    monkeypatch.setattr(budget, "read_host_limits", lambda: limits)
    monkeypatch.setattr(bulk_read, "read_parts", lambda *arguments, **options: pytest.fail("read a table"))
    with pytest.raises(ftw.PinError, match=rf"{TABLE} \(8.01 MiB\): 8.01 MiB .* are 4.01 MiB more than"):
        ftw.load(source, **shared)
    assert not any(folder.iterdir())
    monkeypatch.undo()
    monkeypatch.setattr(shared_tables, "open_segment", functools.partial(shared_segment.open_segment, folder=folder))
    with ftw.load(source, **shared):
        monkeypatch.setattr(budget, "read_host_limits", lambda: limits)
        ftw.load(source, **shared).close()  # its pages are there already


def test_limit_takes_the_place_of_free_memory_for_a_shared_table_too(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "read_host_limits", lambda: replace(PLENTY, available=0))
    limit = buffer.count_pinned_bytes() + (9 << 20)
    ftw.load(source, embed="host", device="cpu", share="node", max_pinned_bytes=limit).close()
    monkeypatch.setattr(budget, "read_host_limits", lambda: replace(PLENTY, cgroup_free=0))
    with pytest.raises(ftw.PinError, match="cgroup"):
        ftw.load(source, embed="host", device="cpu", share="node", max_pinned_bytes=limit)


def test_shared_model_that_is_dropped_is_given_back(source: Path, folder: Path) -> None:
    model = ftw.load(source, embed="host", device="cpu", share="node")
    assert len(list(folder.iterdir())) == 1
    del model
    gc.collect()
    assert not any(folder.iterdir())


def test_sharing_of_nothing_is_told(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tied = write_checkpoint(tmp_path / "tied", llama_tensors(head=False), llama_config(tie_word_embeddings=True))
    with caplog.at_level(logging.INFO, "ftw"):
        ftw.load(tied, embed="auto", device="cpu", share="node").close()
    assert f"{tied}: share='node': no table leaves the GPU, so none is shared" in caplog.text


def test_sharing_of_tables_that_stay_on_the_gpu_is_refused(source: Path) -> None:
    with pytest.raises(ValueError, match="share: embed='gpu' has no table in host memory, 'host' or 'auto' is needed"):
        ftw.load(source, embed="gpu", device="cpu", share="node")


@pytest.mark.parametrize("num_threads", [0, -1, True, 1.5, "2"], ids=repr)
@pytest.mark.parametrize("embed", ["host", "gpu"])
def test_number_of_threads_that_is_none_is_a_value_error(source: Path, embed: str, num_threads: Any) -> None:
    with pytest.raises(ValueError, match="num_threads is "):
        ftw.load(source, embed=embed, device="cpu", num_threads=num_threads)


def test_processes_share_and_survive_each_other(source: Path, tmp_path: Path, folder: Path) -> None:
    """Load in a process that is killed, while this one goes on."""
    script = f"""
import sys, torch
from pathlib import Path
import ftw
from ftw.host.shared import segment as shared_segment
from ftw.loading import shared_tables
real = shared_segment.open_segment
shared_tables.open_segment = lambda *args, **options: real(*args, folder=Path({str(folder)!r}), **options)
model = ftw.load({str(source)!r}, embed="host", device="cpu", share="node")
print(model.embedding(torch.tensor([5])).float().sum().item(), flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        found = float(child.stdout.readline())
        with ftw.load(source, embed="host", device="cpu", share="node") as model:
            assert len(list(folder.iterdir())) == 1
            child.kill()
            child.wait()
            assert model.embedding(torch.tensor([5])).float().sum().item() == found
            assert len(list(folder.iterdir())) == 1


def ngram_parts(rows: tuple[int, ...], columns: int = 6) -> dict[str, torch.Tensor]:
    """Return an n-gram table cut along its rows, whose parts stand in no order."""
    generator = torch.Generator().manual_seed(0)
    numbers = reversed(range(len(rows)))
    return {
        f"model.ngram_embedding.shard_{number}.weight": torch.randn(rows[number], columns, generator=generator)
        for number in numbers
    }


@pytest.mark.parametrize("rows", [(5, 3), (1, 1, 1), (700, 3, 650, 1)], ids=str)
def test_ngram_table_of_several_tensors_is_one(tmp_path: Path, rows: tuple[int, ...]) -> None:
    parts = ngram_parts(rows)
    table = torch.cat(list(reversed(parts.values())))
    source = write_checkpoint(tmp_path / "m", {**llama_tensors(), **parts}, llama_config())
    borders = [sum(rows[:count]) for count in range(len(rows) + 1)]
    ids = torch.tensor([border + step for border in borders for step in (-1, 0, 1)])
    is_inside = (ids >= 0) & (ids < len(table))
    wanted = table[ids.where(is_inside, 0)] * is_inside[:, None]
    with ftw.load(source, embed="host", device="cpu") as model:
        embedding = model.tables["model.ngram_embedding"]
        assert equal_bits(embedding.table, table)
        assert torch.equal(embedding(ids), wanted)
        assert not parts.keys() & dict(model.weights()).keys()


def test_ngram_table_of_many_tensors_is_shared(tmp_path: Path, folder: Path) -> None:
    parts = ngram_parts(tuple(range(1, 101)))
    source = write_checkpoint(tmp_path / "m", {**llama_tensors(), **parts}, llama_config())
    options = {"embed": "host", "device": "cpu", "share": "node"}
    with ftw.load(source, **options) as one, ftw.load(source, **options) as other:
        assert len(list(folder.iterdir())) == len(one.tables) == 2
        assert equal_bits(one.tables["model.ngram_embedding"].table, torch.cat(list(reversed(parts.values()))))
        assert equal_bits(*(model.tables["model.ngram_embedding"].table for model in (one, other)))


PER_LAYER = {"num_hidden_layers": 3, "hidden_size_per_layer_input": 4}  # for rows of 12


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        pytest.param({"text_config": PER_LAYER}, 3, id="composite"),
        pytest.param({"llm_config": PER_LAYER}, 3, id="llm"),
        pytest.param({"thinker_config": {"text_config": PER_LAYER}}, 3, id="thinker"),
        pytest.param(PER_LAYER, 3, id="text-only"),
        pytest.param({**PER_LAYER, "num_hidden_layers": 4}, None, id="other-layers"),
        pytest.param({**PER_LAYER, "hidden_size_per_layer_input": 5}, None, id="other-width"),
        pytest.param({"num_hidden_layers": 3}, None, id="no-width"),
        pytest.param({"num_hidden_layers": ..., "hidden_size_per_layer_input": 4}, None, id="no-layers"),
        pytest.param({**PER_LAYER, "hidden_size_per_layer_input": "4"}, None, id="text"),
        pytest.param({**PER_LAYER, "hidden_size_per_layer_input": -4}, None, id="negative"),
    ],
)
def test_per_layer_table_has_a_slice_for_each_layer(tmp_path: Path, config: dict[str, Any], wanted: int | None) -> None:
    name = "model.language_model.embed_tokens_per_layer.weight"
    table = torch.randn(10, 12).to(torch.bfloat16)
    source = write_checkpoint(tmp_path / "m", {**llama_tensors(), name: table}, llama_config(**config))
    with ftw.load(source, embed="host", device="cpu") as model:
        assert model.tables[name].num_slices == wanted
        assert model.embedding.num_slices is None
        ids = torch.tensor([[3, 9], [10, 0]])
        if wanted is None:
            with pytest.raises(ftw.LookupArgumentError, match="layer"):
                model.tables[name](ids, layer=0)
        else:
            whole = model.tables[name](ids)
            slices = [model.tables[name](ids, layer=layer) for layer in range(wanted)]
            assert torch.equal(torch.stack(slices, dim=-2), whole.view(2, 2, 3, 4))


@pytest.mark.parametrize(
    ("kind", "width", "layers", "columns", "wanted"),
    [
        pytest.param("Q8_0", 64, 2, 128, 2, id="Q8_0"),
        pytest.param("Q6_K", 256, 2, 512, 2, id="Q6_K"),
        pytest.param("Q6_K", 128, 4, 512, None, id="inside-a-block"),
        pytest.param("F16", 33, 3, 99, 3, id="F16"),
        pytest.param("Q8_0", 64, 3, 128, None, id="other-layers"),
    ],
)
def test_per_layer_table_of_a_gguf_has_slices(
    tmp_path: Path, kind: str, width: int, layers: int, columns: int, wanted: int | None
) -> None:
    ggml_type = GGMLQuantizationType[kind]
    name = "per_layer_token_embd.weight"
    tensors = {
        "token_embd.weight": random_blocks(GGMLQuantizationType.Q8_0, rows=10),
        "output.weight": random_blocks(GGMLQuantizationType.Q8_0, rows=10, seed=1),
        name: random_blocks(ggml_type, rows=10, blocks=columns // gguf.GGML_QUANT_SIZES[ggml_type][0]),
    }
    kvs = {
        "gemma3n.block_count": (GGUFValueType.UINT32, layers),
        "gemma3n.embedding_length": (GGUFValueType.UINT32, 64),
        "gemma3n.embedding_length_per_layer_input": (GGUFValueType.UINT32, width),
    }
    source = write_gguf(tmp_path / "m.gguf", tensors, kvs, architecture="gemma3n")
    ids = torch.tensor([0, 9, 10, 4])
    ftw.convert(source, tmp_path / "out", embed="host")
    for path in (source, tmp_path / "out"):
        with ftw.load(path, embed="host", device="cpu") as model:
            assert model.tables[name].num_slices == wanted
            if wanted is not None:
                whole = model.tables[name](ids)
                for layer in range(wanted):
                    found = model.tables[name](ids, layer=layer)
                    assert_equal_rows(found, whole[:, layer * width : (layer + 1) * width])
