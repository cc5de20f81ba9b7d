"""ChunkReader: every part's bytes, where it says that they lie, around the page cache and through it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import write_sharded
from ftw.bench.timing import drop_from_page_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ftw
from ftw.conversion.writing.chunk_reader import ChunkReader, buffer_nbytes
from ftw.conversion.writing.shard_plan import iter_write_chunks, plan_shards
from ftw.files.weight_file import DIRECT_MIN_JOB_NBYTES, OpenFile
from ftw.host.memory import HostMemory

MIB = 1 << 20


def write_source(folder: Path, sizes: list[int]) -> Path:
    """Write tensors of bytes, which lie at any byte of their file."""
    generator = torch.Generator().manual_seed(len(sizes))
    tensors = {
        f"t{number:02}": torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        for number, size in enumerate(sizes)
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def check_chunks(source: Path, chunk_nbytes: int) -> list[int]:
    """Read a checkpoint in chunks, compare each part with its file; return how far behind its place each lay."""
    shifts = []
    with ftw.open_checkpoint(source) as checkpoint:
        shard_plan = plan_shards(checkpoint.tensors.values())
        buffer = HostMemory(buffer_nbytes(chunk_nbytes)).view()
        for chunk in iter_write_chunks(shard_plan, chunk_nbytes):
            places = ChunkReader(checkpoint).read(chunk, buffer)
            ends = [place + part.nbytes for part, place in zip(chunk.parts, places, strict=True)]
            assert all(end <= place for end, place in zip(ends, places[1:], strict=False))
            for part, place, end in zip(chunk.parts, places, ends, strict=True):
                expected = bytearray(part.nbytes)
                checkpoint.read_into(part.tensor.name, expected, offset=part.offset)
                assert buffer[place:end] == expected
                shifts.append(place - part.start)
    assert all(shift >= 0 for shift in shifts)
    return shifts


LARGE = DIRECT_MIN_JOB_NBYTES


@settings(max_examples=40)
@given(
    st.lists(
        st.sampled_from([0, 1, 4096, 5000, LARGE - 1, LARGE, LARGE + 1, LARGE + 4096, 3 * LARGE + 77]), max_size=7
    ),
    st.sampled_from([4096, MIB, 2 * MIB, 4 * MIB + 4096]),
    st.booleans(),
)
def test_parts_lie_where_it_says(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], chunk_nbytes: int, is_cold: bool
) -> None:
    source = write_source(tmp_path_factory.mktemp("source"), sizes)
    if is_cold:
        drop_from_page_cache(source)
    check_chunks(source, chunk_nbytes)


def test_shifts_of_many_large_parts_fit_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path / "source", [LARGE + 1] * 12)
    monkeypatch.setattr("ftw.files.weight_file.is_cached", lambda *_: False)
    assert all(shift % 4096 for shift in check_chunks(source, 16 * MIB))
    monkeypatch.setattr("ftw.files.weight_file.is_cached", lambda *_: True)
    assert not any(check_chunks(source, 16 * MIB))


def test_disk_that_refuses_direct_reads_is_read_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path / "source", [LARGE + 1, 7, LARGE])
    monkeypatch.setattr("ftw.files.weight_file.is_cached", lambda *_: False)
    monkeypatch.setattr(OpenFile, "_open_direct", lambda self: None)
    assert not any(check_chunks(source, 4 * MIB))


def test_tensors_that_are_not_stored_as_they_are_read(tmp_path: Path) -> None:
    """Across shards of an FTW, whose parts may lie in two files."""
    source = write_source(tmp_path / "source", [3 * LARGE + 77, 5, LARGE])
    ftw.convert(source, tmp_path / "ftw", shard_limit=MIB + 4096)
    drop_from_page_cache(tmp_path / "ftw")
    with ftw.open_checkpoint(tmp_path / "ftw") as checkpoint:
        assert checkpoint.find_bytes("t00", 0, 3 * LARGE) is None
        assert checkpoint.find_bytes("t00", 0, LARGE) == (checkpoint.files[0], 0)
        assert checkpoint.find_bytes("t00", LARGE + 4096, 77) == (checkpoint.files[1], 0)
    assert not any(check_chunks(tmp_path / "ftw", 4 * MIB))


def test_file_that_changed_is_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", [LARGE + 1])
    with ftw.open_checkpoint(source) as checkpoint:
        (chunk,) = iter_write_chunks(plan_shards(checkpoint.tensors.values()), 4 * MIB)
        buffer = HostMemory(buffer_nbytes(4 * MIB)).view()
        os.utime(source / "model.safetensors", ns=(1, 1))
        with pytest.raises(ftw.CheckpointError, match=r"model\.safetensors: file: changed while it was being read"):
            ChunkReader(checkpoint).read(chunk, buffer)


def test_closed_checkpoint_is_refused(tmp_path: Path) -> None:
    with ftw.open_checkpoint(write_source(tmp_path / "source", [5])) as checkpoint:
        (chunk,) = iter_write_chunks(plan_shards(checkpoint.tensors.values()), MIB)
    with pytest.raises(ftw.ClosedError):
        ChunkReader(checkpoint).read(chunk, HostMemory(buffer_nbytes(MIB)).view())


def test_chunk_of_many_files_holds_one_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = {f"model-{number:05}-of-00040.safetensors": {f"t{number}": torch.ones(9)} for number in range(1, 41)}
    source = write_sharded(tmp_path / "source", shards, {})
    most = []
    real = OpenFile.read_in_place

    def count(self: OpenFile, *arguments: Any) -> int:
        names = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        most.append(sum(name.startswith(str(source)) for name in names))
        return real(self, *arguments)

    monkeypatch.setattr(OpenFile, "read_in_place", count)
    check_chunks(source, MIB)
    assert most == [1] * 40


def test_what_lies_in_two_files_is_read_around_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path / "source", [6 * MIB])
    ftw.convert(source, tmp_path / "ftw", shard_limit=3 * MIB)
    monkeypatch.setattr("ftw.files.weight_file.is_cached", lambda *_: False)
    direct = []
    real = OpenFile._read_direct
    monkeypatch.setattr(
        OpenFile, "_read_direct", lambda self, offset, blocks: direct.append(len(blocks)) or real(self, offset, blocks)
    )
    with ftw.open_checkpoint(tmp_path / "ftw") as checkpoint:
        shard_plan = plan_shards(checkpoint.tensors.values())
        (chunk,) = iter_write_chunks(shard_plan, 8 * MIB)
        buffer = HostMemory(buffer_nbytes(8 * MIB)).view()
        assert ChunkReader(checkpoint).read(chunk, buffer) == [0]
    assert sum(direct) == 6 * MIB
