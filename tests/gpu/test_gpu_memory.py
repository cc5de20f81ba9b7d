"""Memory while tables are loaded on a GPU: none of a table in VRAM, exact page-locked bytes, shared by processes."""

import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from builders import llama_config, write_checkpoint
from leaks import descriptors

import ftw
from ftw.host.memory import HostMemory
from ftw.kernels.lookup import lookup
from ftw.pinned.buffer import PinnedBuffer, count_pinned_bytes

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
TABLE = "model.embed_tokens.weight"
ROWS, COLUMNS = 131_071, 1024  # 256 MiB less a row
MIB = 1 << 20


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 15), 1 << 15, (ROWS, COLUMNS), dtype=torch.int16, generator=generator)


@pytest.fixture(scope="module", params=["safetensors", "gguf", "ftw"])
def source(request: pytest.FixtureRequest, table: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an untied model in each format, with a head of zeros."""
    folder = tmp_path_factory.mktemp(request.param)
    head = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    if request.param == "gguf":
        writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
        writer.add_embedding_length(COLUMNS)
        for name, tensor in (("token_embd.weight", table), ("output.weight", head)):
            raw = tensor.view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return folder
    tensors = {"lm_head.weight": head, TABLE: table.view(torch.bfloat16)}
    write_checkpoint(folder / "source", tensors, llama_config(vocab_size=ROWS, hidden_size=COLUMNS))
    if request.param == "ftw":
        ftw.convert(folder / "source", folder / "ftw", embed="host")
        return folder / "ftw"
    return folder / "source"


class FreeMemory:
    """The least free memory of the device while the block runs, by its driver."""

    def __enter__(self) -> "FreeMemory":
        torch.cuda.synchronize()
        self.before = self.least = torch.cuda.mem_get_info(DEVICE)[0]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()
        return self

    def __exit__(self, *arguments: object) -> None:
        self._end.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._end.wait(0.001):
            self.least = min(self.least, torch.cuda.mem_get_info(DEVICE)[0])


@pytest.mark.alone
@pytest.mark.parametrize("share", [None, "node"], ids=["own", "shared"])
def test_no_byte_of_a_table_passes_through_the_device(source: Path, table: torch.Tensor, share: str | None) -> None:
    ftw.load(source, embed="gpu", device=DEVICE).close()  # the context, and what it brings
    torch.cuda.reset_peak_memory_stats(DEVICE)
    allocated = torch.cuda.memory_allocated(DEVICE)
    with FreeMemory() as free, ftw.load(source, embed="host", device=DEVICE, share=share) as model:
        report = model.memory
        ids = torch.tensor([0, 5, ROWS - 1, ROWS], device=DEVICE)
    assert free.before - free.least < 4 * MIB
    assert torch.cuda.max_memory_allocated(DEVICE) - allocated < MIB
    assert report.before.device_free - report.peak.device_free < 4 * MIB
    assert list(report.pinned_bytes.values()) == [-(-ROWS * COLUMNS * 2 // 4096) * 4096]
    assert report.peak.host_resident - report.before.host_resident < ROWS * COLUMNS * 2 + 64 * MIB
    with ftw.load(source, embed="host", device=DEVICE, share=share) as model:
        rows = model.embedding(ids).view(torch.int16).cpu()
    assert torch.equal(rows[:3], table[[0, 5, ROWS - 1]])
    assert not rows[3].count_nonzero()


def test_models_give_back_what_they_held(source: Path) -> None:
    ftw.load(source, embed="host", device=DEVICE).close()
    gc.collect()
    opened, before = descriptors(), (count_pinned_bytes(), ftw.memory.snapshot(DEVICE).device_allocated)
    for share in (None, "node"):
        with ftw.load(source, embed="host", device=DEVICE, share=share) as model:
            assert count_pinned_bytes() == before[0] + model.memory.total_pinned_bytes
    gc.collect()
    assert descriptors() <= opened
    assert (count_pinned_bytes(), ftw.memory.snapshot(DEVICE).device_allocated) == before


def test_device_pointer_reads_the_buffer() -> None:
    with PinnedBuffer(4097) as buffer:
        buffer.view()[:] = bytes(range(256)) * 16 + b"!"
        buffer.pin(DEVICE)
        assert buffer.device_pointer
        bits = torch.frombuffer(buffer.view(), dtype=torch.uint8)
        assert bits.is_pinned()
        assert bytes(bits.to(DEVICE).cpu().numpy()) == bytes(buffer.view())
        del bits


def test_refused_registration_leaves_no_error_behind() -> None:
    first = HostMemory(8192)
    with PinnedBuffer(8192, memory=first) as buffer:
        buffer.pin(DEVICE)
        again = PinnedBuffer(8192, name="wte.weight", memory=first)
        with pytest.raises(ftw.PinError, match=r"^wte.weight: page-locked memory: cuda:0 refused") as caught:
            again.pin(DEVICE)
        assert len(str(caught.value).splitlines()) == 1
        torch.cuda.synchronize()
        assert torch.ones(8, device=DEVICE).sum().item() == 8


def test_dropped_buffer_is_given_back() -> None:
    before = count_pinned_bytes()
    buffer = PinnedBuffer(MIB)
    buffer.pin(DEVICE)
    assert count_pinned_bytes() == before + MIB
    del buffer
    gc.collect()
    assert count_pinned_bytes() == before


@pytest.fixture
def other_process(source: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the shared table and looks a row up whenever it is told to."""
    script = f"""
import sys, torch, ftw
model = ftw.load({str(source)!r}, embed="host", device="cuda:0", share="node")
for line in sys.stdin:
    rows = model.embedding(torch.tensor([int(line)], device="cuda:0"))
    print(rows.view(torch.int16).double().sum().item(), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def segments() -> set[str]:
    """Return the paths of the segments that this process maps."""
    return set(re.findall(r"/dev/shm/ftw-\S+", Path("/proc/self/maps").read_text()))


def test_killed_process_leaves_the_other_its_rows(
    source: Path, table: torch.Tensor, other_process: subprocess.Popen[str]
) -> None:
    assert other_process.stdin is not None
    assert other_process.stdout is not None
    wanted, before = table[7].double().sum().item(), segments()
    other_process.stdin.write("7\n")
    other_process.stdin.flush()
    assert float(other_process.stdout.readline()) == wanted
    with ftw.load(source, embed="host", device=DEVICE, share="node") as model:
        ids = torch.tensor([7], device=DEVICE)
        other_process.kill()
        other_process.wait()
        assert lookup(model.embedding.table, ids).view(torch.int16).double().sum().item() == wanted
        own = segments() - before
        assert own
        assert all(map(os.path.exists, own))
    assert not any(map(os.path.exists, own))
