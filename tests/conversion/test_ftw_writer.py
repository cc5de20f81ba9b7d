"""The FTW writer: the rules of the shard plan, golden bytes, buffers and shards, a disk that refuses."""

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from inspecting import stored_bytes, tensor_bytes
from leaks import descriptors

from ftw import TensorInfo, open_checkpoint
from ftw.conversion.writing import shard_files
from ftw.conversion.writing.shard_plan import Chunk, Shard, ShardPlan, count_shards, iter_write_chunks, plan_shards
from ftw.conversion.writing.writer import FtwWriter
from ftw.host import OpenFolder, write_atomically

INDEX = "freetoken_weight.json"
MIB = 1 << 20


def info(name: str, nbytes: int) -> TensorInfo:
    return TensorInfo(name, "U8", (nbytes,), 0, nbytes)


def pattern(nbytes: int, start: int = 0) -> bytes:
    """Return bytes of a period that is prime to every block and buffer size, so that no misplaced byte is missed."""
    return bytes((start + place) % 251 for place in range(251)) * (nbytes // 251 + 1)


def write(folder: Path, contents: dict[str, bytes], shard_limit: int = 8 << 30, **extra: Any) -> ShardPlan:
    """Write byte tensors of these contents as an FTW folder."""
    return write_infos(folder, [info(name, len(data)) for name, data in contents.items()], contents, shard_limit, extra)


def write_infos(
    folder: Path,
    infos: list[TensorInfo],
    contents: dict[str, bytes],
    shard_limit: int,
    extra: dict[str, Any],
    shift: int = 0,
) -> ShardPlan:
    shard_plan = plan_shards(infos, shard_limit)

    def read(chunk: Chunk, buffer: memoryview) -> list[int]:
        """Leave each part further behind its place than the one before it."""
        places = []
        for number, part in enumerate(chunk.parts):
            place = min(part.start + shift * number, len(buffer) - part.nbytes)
            buffer[place : place + part.nbytes] = contents[part.tensor.name][part.offset :][: part.nbytes]
            places.append(place)
        return places

    with OpenFolder(folder) as opened, FtwWriter(opened, shard_plan) as ftw_writer:
        ftw_writer.write(read)
        ftw_writer.finish(extra)
    return shard_plan


def region_of(folder: Path, shard_plan: ShardPlan) -> bytes:
    return b"".join((folder / shard.name).read_bytes() for shard in shard_plan.shards)


def assert_reads_back(folder: Path, contents: dict[str, bytes]) -> None:
    with open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == set(contents)
        for name, data in contents.items():
            assert stored_bytes(checkpoint, name) == data
            assert checkpoint.tensors[name].xxh3_64 == xxhash.xxh3_64_hexdigest(data)


def test_golden_folder_is_written_byte_for_byte(tmp_path: Path) -> None:
    infos = [
        TensorInfo(
            "table", "U8", (2, 2050), 999, 4100, "source.safetensors",
            role="token_embedding", placement="host", ggml_type="Q4_0", logical_shape=(2, 3644),
        ),
        TensorInfo("none", "BF16", (0, 7), 5, 0, kind="experts_bank"),
        TensorInfo("one", "F32", (), 7, 4),
    ]  # fmt: skip
    contents = {"table": bytes(range(205)) * 20, "none": b"", "one": b"\x00\x00\x80\x3f"}
    write_infos(tmp_path, infos, contents, 8192, {"quant_format": "bf16"})
    assert sorted(os.listdir(tmp_path)) == ["freetoken-00000.ftw", "freetoken-00001.ftw", INDEX]
    assert (tmp_path / "freetoken-00000.ftw").read_bytes() == bytes(range(205)) * 20 + bytes(4092)
    assert (tmp_path / "freetoken-00001.ftw").read_bytes() == b"\x00\x00\x80\x3f" + bytes(4092)
    assert (tmp_path / INDEX).read_text() == (
        '{"format": "freetoken_weight", "version": 1, "align": 4096, "shard_limit": 8192, "total_bytes": 12288, '
        '"quant_format": "bf16", "tensors": [\n'
        '{"name": "table", "kind": "weight", "dtype": "uint8", "shape": [2, 2050], "global_off": 0, "nbytes": 4100, '
        '"ggml_type": "Q4_0", "logical_shape": [2, 3644], "role": "token_embedding", "placement": "host", '
        '"xxh3_64": "142874ca6e7ce75e"},\n'
        '{"name": "none", "kind": "experts_bank", "dtype": "bfloat16", "shape": [0, 7], "global_off": 8192, '
        '"nbytes": 0, "xxh3_64": "2d06800538d394c2"},\n'
        '{"name": "one", "kind": "weight", "dtype": "float32", "shape": [], "global_off": 8192, "nbytes": 4, '
        '"xxh3_64": "f87b05471331b3ae"}],\n"shards": ['
        '{"file": "freetoken-00000.ftw", "global_off": 0, "nbytes": 8192}, '
        '{"file": "freetoken-00001.ftw", "global_off": 8192, "nbytes": 4096}]}\n'
    )


def test_written_checkpoint_reads_back_equal(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(300, 7).to(torch.bfloat16),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "none": torch.empty(3, 0, dtype=torch.int64),
        "flags": torch.arange(9000) % 3 == 0,
        "f8": torch.randn(4096).to(torch.float8_e4m3fn),
    }
    names = {torch.bfloat16: "BF16", torch.float64: "F64", torch.int64: "I64", torch.bool: "BOOL"}
    contents = {name: tensor_bytes(tensor) for name, tensor in tensors.items()}
    infos = [
        TensorInfo(name, names.get(tensor.dtype, "F8_E4M3"), tuple(tensor.shape), 0, len(contents[name]))
        for name, tensor in tensors.items()
    ]
    shard_plan = write_infos(tmp_path, infos, contents, 8192, {})
    assert_reads_back(tmp_path, contents)
    with open_checkpoint(tmp_path) as checkpoint:
        for name, tensor in tensors.items():
            found = checkpoint.tensors[name]
            assert (found.dtype, found.shape) == (names.get(tensor.dtype, "F8_E4M3"), tuple(tensor.shape))
    assert shard_plan.tensors[2].offset == shard_plan.tensors[3].offset


@pytest.mark.parametrize("contents", [{}, {"a": b"", "b": b""}], ids=["no-tensors", "empty-tensors"])
def test_checkpoint_without_bytes_has_no_shards(tmp_path: Path, contents: dict[str, bytes]) -> None:
    write(tmp_path, contents)
    assert os.listdir(tmp_path) == [INDEX]
    assert_reads_back(tmp_path, contents)


def test_many_small_tensors_cross_buffers_with_zero_padding(tmp_path: Path) -> None:
    contents = {f"t{number}": pattern(9000, number)[: number * 37 % 9000] for number in range(4000)}
    shard_plan = write(tmp_path, contents, 12 * MIB)
    assert shard_plan.total_bytes > 24 * MIB
    assert_reads_back(tmp_path, contents)
    region = region_of(tmp_path, shard_plan)
    position = 0
    for tensor in shard_plan.tensors:
        assert region.count(0, position, tensor.offset) == tensor.offset - position
        position = tensor.offset + tensor.nbytes
    assert region.count(0, position) == shard_plan.total_bytes - position


@pytest.mark.parametrize("shard_limit", [8 << 30, 20 * MIB + 4096, 16 * MIB], ids=["one-shard", "odd", "buffer-sized"])
def test_tensor_larger_than_all_buffers_is_written(tmp_path: Path, shard_limit: int) -> None:
    contents = {"small": b"x" * 5000, "large": pattern(60_000_000)[:60_000_000], "last": b"y"}
    shard_plan = write(tmp_path, contents, shard_limit)
    assert_reads_back(tmp_path, contents)
    assert len(shard_plan.shards) == -(-shard_plan.total_bytes // shard_limit)


@pytest.mark.parametrize("shift", [1, 511, 4096])
def test_parts_that_lie_behind_their_places_are_moved(tmp_path: Path, shift: int) -> None:
    contents = {f"t{number}": pattern(3 * MIB, number)[: MIB + 700_001 * number] for number in range(4)}
    write_infos(tmp_path, [info(name, len(data)) for name, data in contents.items()], contents, 8 << 30, {}, shift)
    assert_reads_back(tmp_path, contents)


@settings(max_examples=300)
@given(
    sizes=st.lists(st.integers(0, 5 * 4096) | st.sampled_from([0, 1, 4095, 4096, 4097, 8192]), max_size=30),
    blocks=st.integers(1, 6),
)
def test_shard_plan_keeps_the_rules_of_the_format(sizes: list[int], blocks: int) -> None:
    limit = blocks * 4096
    infos = [info(str(number), nbytes) for number, nbytes in enumerate(sizes)]
    shard_plan = plan_shards(infos, limit)
    assert count_shards(infos, limit) == len(shard_plan.shards)
    assert [(tensor.name, tensor.nbytes) for tensor in shard_plan.tensors] == [(str(n), s) for n, s in enumerate(sizes)]
    padded = [-(-nbytes // 4096) * 4096 for nbytes in sizes]
    assert [tensor.offset for tensor in shard_plan.tensors] == [sum(padded[:number]) for number in range(len(sizes))]
    assert shard_plan.total_bytes == sum(padded)
    assert [shard.name for shard in shard_plan.shards] == [
        f"freetoken-{n:05}.ftw" for n in range(len(shard_plan.shards))
    ]
    ends = [shard.offset + shard.nbytes for shard in shard_plan.shards]
    assert [shard.offset for shard in shard_plan.shards] == [0, *ends][: len(ends)]
    assert all(0 < shard.nbytes <= limit and shard.nbytes % 4096 == 0 for shard in shard_plan.shards)
    for tensor, length in zip(shard_plan.tensors, padded, strict=True):
        if length <= limit:
            assert not any(tensor.offset < end < tensor.offset + length for end in ends)
    for shard, end in zip(shard_plan.shards[:-1], ends[:-1], strict=True):
        if shard.nbytes < limit:  # it ended early: the next tensor fits into a shard, but not into the rest of this one
            following = next(
                length
                for tensor, length in zip(shard_plan.tensors, padded, strict=True)
                if length and tensor.offset == end
            )
            assert shard.nbytes + following > limit >= following


def test_shard_plan_of_known_sizes_is_known() -> None:
    shard_plan = plan_shards(
        [info(name, nbytes) for name, nbytes in (("a", 4096), ("b", 8000), ("c", 9000), ("d", 1))], 8192
    )
    assert [tensor.offset for tensor in shard_plan.tensors] == [0, 4096, 12288, 24576]
    assert shard_plan.shards == (
        Shard("freetoken-00000.ftw", 0, 4096),
        Shard("freetoken-00001.ftw", 4096, 8192),
        Shard("freetoken-00002.ftw", 12288, 8192),
        Shard("freetoken-00003.ftw", 20480, 8192),
    )


def test_shards_of_any_tensor_are_counted_without_planning_them() -> None:
    infos = [info("a", 1), info("b", 1 << 62), info("c", 0), info("d", 1)]
    assert count_shards(infos, 4096) == (1 << 50) + 2
    assert count_shards([], 4096) == count_shards([info("a", 0)], 4096) == 0


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([0, 1, 4095, 4096, 4097, 9000, 40_000]), max_size=9),
    st.sampled_from([4096, 8192, 5 * 4096, 1 << 20]),
    st.sampled_from([4096, 3 * 4096, 1 << 20]),
    st.data(),
)
def test_chunks_cover_each_byte_once_from_any_tensor_on(
    sizes: list[int], shard_limit: int, chunk_nbytes: int, data: st.DataObject
) -> None:
    shard_plan = plan_shards([info(f"t{number}", nbytes) for number, nbytes in enumerate(sizes)], shard_limit)
    first = data.draw(st.integers(0, len(sizes)))
    position = shard_plan.start_of(first)
    done = dict.fromkeys((tensor.name for tensor in shard_plan.tensors[first:]), 0)
    ended = []
    for chunk in iter_write_chunks(shard_plan, chunk_nbytes, first):
        assert chunk.nbytes <= chunk_nbytes
        if chunk.nbytes:
            shard = shard_plan.shards[chunk.shard]
            assert shard.offset + chunk.offset == position
            assert chunk.offset + chunk.nbytes <= shard.nbytes
        for part in chunk.parts:
            assert part.offset == done[part.tensor.name]
            assert not part.nbytes or part.tensor.offset + part.offset == position + part.start
            done[part.tensor.name] += part.nbytes
            ended += [part.tensor.name] * part.is_last
        position += chunk.nbytes
    assert position == shard_plan.total_bytes
    assert ended == [tensor.name for tensor in shard_plan.tensors[first:]]
    assert done == {tensor.name: tensor.nbytes for tensor in shard_plan.tensors[first:]}


@pytest.mark.parametrize("failing", [0, 1], ids=["first", "last"])
def test_full_disk_surfaces_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    pwrite, calls, before = os.pwrite, [], descriptors()

    def refuse(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write(tmp_path, {"a": bytes(40 * MIB), "b": bytes(9 * MIB)})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "freetoken-00000.ftw"))
    assert not (tmp_path / INDEX).exists()
    assert descriptors() <= before


def test_failed_sync_surfaces_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = descriptors()
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error") as caught:
        write(tmp_path, {"a": bytes(4096), "b": bytes(4096)}, 4096)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "freetoken-00000.ftw"))
    assert not (tmp_path / INDEX).exists()
    assert descriptors() <= before


def test_error_of_the_source_leaves_no_index(tmp_path: Path) -> None:
    shard_plan = plan_shards([info("a", 40 * MIB)])
    before = descriptors()

    def read(chunk: Chunk, buffer: memoryview) -> list[int]:
        if chunk.parts[0].offset:
            raise ConnectionError("the source went away")
        return [part.start for part in chunk.parts]

    opened = OpenFolder(tmp_path)
    with pytest.raises(ConnectionError, match="went away"), opened, FtwWriter(opened, shard_plan) as ftw_writer:
        ftw_writer.write(read)
    assert not (tmp_path / INDEX).exists()
    assert descriptors() <= before


@pytest.mark.parametrize("leaves_file", [False, True], ids=["before", "after-creating"])
def test_file_system_without_direct_io_gets_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves_file: bool
) -> None:
    contents = {"a": pattern(70_000)[:70_000], "b": b"b", "c": pattern(9000)[:9000]}
    folders = [tmp_path / "direct", tmp_path / "buffered"]
    for folder in folders:
        folder.mkdir()
    shard_plan = write(folders[0], contents, 8192)
    real_open = os.open
    refused = []

    def refuse(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            if leaves_file:
                os.close(real_open(path, flags & ~os.O_DIRECT, *arguments, **keywords))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real_open(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    write(folders[1], contents, 8192)
    assert len(refused) == len(shard_plan.shards)
    assert region_of(folders[1], shard_plan) == region_of(folders[0], shard_plan)
    assert (folders[1] / INDEX).read_bytes() == (folders[0] / INDEX).read_bytes()


def test_write_that_direct_io_refuses_is_done_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, refused = os.pwrite, []

    def refuse(descriptor: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(descriptor, data[:1000], offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    contents = {"a": pattern(70_000)[:70_000], "b": b"b"}
    shard_plan = write(tmp_path, contents, 20 * 4096)
    assert refused == [0] * len(shard_plan.shards)
    assert_reads_back(tmp_path, contents)


def test_write_that_is_refused_either_way_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="Invalid argument") as caught:
        write(tmp_path, {"a": b"a"})
    assert caught.value.filename == str(tmp_path / "freetoken-00000.ftw")
    assert not (tmp_path / INDEX).exists()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:4096], offset))
    contents = {"a": pattern(70_000)[:70_000], "b": b"b"}
    write(tmp_path, contents)
    assert_reads_back(tmp_path, contents)


@pytest.mark.parametrize("error", [None, errno.EMFILE, errno.EACCES], ids=["exists", "too-many-files", "no-permission"])
def test_existing_shard_is_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None) -> None:
    file = tmp_path / "freetoken-00000.ftw"
    file.write_bytes(b"somebody's")
    if error is not None:

        def refuse(*arguments: Any, **keywords: Any) -> int:
            raise OSError(error, os.strerror(error), str(file))

        monkeypatch.setattr(shard_files.os, "open", refuse)
    with pytest.raises(OSError, match="freetoken-00000"):
        write(tmp_path, {"a": b"a"})
    monkeypatch.undo()
    assert file.read_bytes() == b"somebody's"
    assert not (tmp_path / INDEX).exists()


def test_index_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.json"
    path.write_bytes(b"old")
    seen = []
    real_fsync: Callable[[int], None] = os.fsync

    def fsync(descriptor: int) -> None:
        seen.append(path.read_bytes())
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(path, [b"n", b"ew"])
    assert seen == [b"old", b"new"]  # the content is on disk before the name is, and then the name
    assert os.listdir(tmp_path) == ["index.json"]


def test_names_of_any_characters_survive(tmp_path: Path) -> None:
    contents = {"": b"1", "naïve.\u4e2d\U0001f600": b"2", 'a"\\\n\0': b"3"}
    write(tmp_path, contents)
    assert_reads_back(tmp_path, contents)
    assert json.loads((tmp_path / INDEX).read_bytes())["tensors"][0]["name"] == ""
