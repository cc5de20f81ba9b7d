"""GGUF checkpoints in shards: sets that are whole, sets that are not, and where the data of a shard begin."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian
from gguf_builder import (
    ARCHITECTURE,
    entry,
    gguf_bytes,
    kv,
    little_endian,
    random_blocks,
    shard_kvs,
    stored,
    write_gguf,
)
from inspecting import assert_names_file
from malformed_gguf import SECOND_SHARDS, write_set

from ftw import CheckpointError
from ftw.readers import open_reader
from ftw.readers.gguf.reader import GgufReader

ARRAYS = {f"t{number}": np.arange(3 + number, dtype=np.float32) + number for number in range(5)}


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096], ids=["default", "8", "64", "4096"])
@pytest.mark.parametrize("order", [GGUFEndian.LITTLE, GGUFEndian.BIG], ids=["little", "big"])
@pytest.mark.parametrize("small_first", [False, True], ids=["all-alike", "small-first"])
def test_library_written_shards_are_one_checkpoint(
    tmp_path: Path, alignment: int | None, order: GGUFEndian, small_first: bool
) -> None:
    write_gguf(
        tmp_path / "m.gguf",
        ARRAYS,
        alignment=alignment,
        order=order,
        split_max_tensors=2,
        small_first_shard=small_first,
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == (4 if small_first else 3)
    for source in (tmp_path, *tmp_path.iterdir()):
        reader = open_reader(source)
        assert isinstance(reader, GgufReader)
        assert [file.path.name for file in reader.files] == names
        assert {name: little_endian(reader, name) for name in reader.tensors} == {
            name: array.tobytes() for name, array in ARRAYS.items()
        }
        assert list(reader.tensors) == list(ARRAYS)
        assert (reader.place.folder, reader.left_out, reader.header_file) == (tmp_path, (), reader.files[0])
        assert reader.metadata["general.architecture"] == "llama"
        assert reader.metadata["split.no"] == 0
    assert [reader.tensors[f"t{number}"].shard for number in (0, 4)] == [names[small_first], names[-1]]


def test_library_written_packed_shards_read_equal(tmp_path: Path) -> None:
    tensors = {str(number): random_blocks(GGMLQuantizationType.Q4_K, seed=number) for number in range(5)}
    write_gguf(tmp_path / "m.gguf", tensors, alignment=128, split_max_tensors=1)
    reader = open_reader(tmp_path)
    assert len(reader.files) == 5
    assert {name: stored(reader, name) for name in reader.tensors} == {
        name: blocks.data.tobytes() for name, blocks in tensors.items()
    }


def _second_shard(alignment: int, padding: int, own: int | None = None) -> Callable[[Path], None]:
    """Return what writes a set whose first shard says 64, and whose second has its data where `alignment` puts them."""

    def write(folder: Path) -> None:
        first = [ARCHITECTURE, kv("general.alignment", "u32", 64), *shard_kvs(0, 2, 2)]
        second = shard_kvs(1, 2, 2) + ([kv("general.alignment", "u32", own)] if own else [])
        (folder / "m-00001-of-00002.gguf").write_bytes(gguf_bytes([entry("a")], bytes(32), kvs=first, alignment=64))
        content = gguf_bytes([entry("b", (12,))], b"b" * 48 + bytes(padding), kvs=second, alignment=alignment)
        assert own or len(gguf_bytes([entry("b")], kvs=second, alignment=32)) % 64 == 32
        (folder / "m-00002-of-00002.gguf").write_bytes(content)

    return write


@pytest.mark.parametrize(
    "write",
    [
        _second_shard(64, 0),
        _second_shard(64, 16),
        _second_shard(32, 0),
        _second_shard(32, 16),
        _second_shard(128, 0, own=128),
    ],
    ids=["first-shards", "first-shards-padded", "default", "default-padded", "its-own"],
)
def test_shard_begins_its_data_where_they_fill_the_file(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    assert stored(open_reader(tmp_path), "b") == b"b" * 48


def test_shard_whose_data_fill_the_file_under_no_alignment_is_refused(tmp_path: Path) -> None:
    _second_shard(32, 7)(tmp_path)
    with pytest.raises(CheckpointError, match="under neither 64 nor 32 the data fill the file"):
        open_reader(tmp_path)


def test_set_that_the_broken_ones_differ_from_is_read(tmp_path: Path) -> None:
    reader = open_reader(write_set(tmp_path)[1])
    assert {name: stored(reader, name) for name in reader.tensors} == {f"t{n}": bytes([n]) * 32 for n in range(3)}


@pytest.mark.parametrize(("overrides", "problem"), SECOND_SHARDS.values(), ids=SECOND_SHARDS)
def test_shard_that_contradicts_its_place_is_refused(tmp_path: Path, overrides: dict[str, Any], problem: str) -> None:
    paths = write_set(tmp_path, **overrides)
    for source in (tmp_path, *paths):
        with pytest.raises(CheckpointError, match=problem) as caught:
            open_reader(source)
        assert_names_file(caught.value, paths[1])


@pytest.mark.parametrize("missing", [0, 1, 2], ids=["first", "second", "third"])
def test_missing_shard_is_named(tmp_path: Path, missing: int) -> None:
    paths = write_set(tmp_path)
    paths[missing].unlink()
    for source in (tmp_path, *(path for path in paths if path.exists())):
        with pytest.raises(CheckpointError, match=f"shard {missing + 1} of 3: is missing") as caught:
            open_reader(source)
        assert_names_file(caught.value, paths[missing])


def test_shards_in_each_others_place_are_refused(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[1].rename(tmp_path / "kept")
    paths[2].rename(paths[1])
    (tmp_path / "kept").rename(paths[2])
    with pytest.raises(CheckpointError, match=r"split\.no: is 2, 1 is needed") as caught:
        open_reader(tmp_path)
    assert_names_file(caught.value, paths[1])


def test_shard_twice_is_refused(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    shutil.copy(paths[1], paths[2])
    with pytest.raises(CheckpointError, match=r"split\.no: is 1, 2 is needed") as caught:
        open_reader(tmp_path)
    assert_names_file(caught.value, paths[2])


def test_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[2].write_bytes(gguf_bytes([entry("t1")], bytes(32), kvs=shard_kvs(2, 3, 3)))
    with pytest.raises(CheckpointError, match=r"t1: lies in m-00002-of-00003\.gguf too, names must be") as caught:
        open_reader(tmp_path)
    assert_names_file(caught.value, paths[2])


def test_shard_of_another_byte_order_is_refused(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[2].write_bytes(gguf_bytes([entry("t2", order=">")], bytes(32), kvs=shard_kvs(2, 3, 3, order=">"), order=">"))
    with pytest.raises(CheckpointError, match="header: has another byte order than the first shard") as caught:
        open_reader(tmp_path)
    assert_names_file(caught.value, paths[2])


def test_first_shard_without_an_architecture_is_refused(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[0].write_bytes(gguf_bytes([entry("t0")], bytes(32), kvs=shard_kvs(0, 3, 3)))
    with pytest.raises(CheckpointError, match=r"general\.architecture: is missing, the name of an") as caught:
        open_reader(paths[2])
    assert_names_file(caught.value, paths[0])


@pytest.mark.parametrize(
    "name",
    [
        "m.gguf",
        "m-00002-OF-00003.gguf",
        "m-00002-of-00003.GGUF",
        "m-2-of-3.gguf",
        "m-000002-of-000003.gguf",
        "m-00004-of-00003.gguf",
        "m-00000-of-00003.gguf",
        "m-00001-of-00001.gguf",
        "m-00002-of-00000.gguf",
        "-00002-of-00003.gguf",
    ],
)
def test_shard_under_another_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "set").mkdir()
    path = write_set(tmp_path / "set")[1].rename(tmp_path / name)
    for source in (tmp_path, path):
        with pytest.raises(CheckpointError, match=r"split\.count: is 3, but the file's name is not that of") as caught:
            open_reader(source)
        assert_names_file(caught.value, path)


def test_whole_file_under_a_shards_name_is_refused(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[1].write_bytes(gguf_bytes([entry("t1")], bytes(32)))
    with pytest.raises(CheckpointError, match=r"split\.no: is missing, 1 is needed") as caught:
        open_reader(tmp_path)
    assert_names_file(caught.value, paths[1])


def test_set_counts_as_one_model_of_a_folder(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    shutil.copy(paths[0], tmp_path / "mmproj-f16.gguf")
    reader = open_reader(tmp_path)
    assert [file.path for file in reader.files] == paths
    assert [left.name for left in reader.left_out] == ["mmproj-f16.gguf"]


def test_two_sets_in_a_folder_are_refused_by_their_first_shards(tmp_path: Path) -> None:
    for path in write_set(tmp_path):
        shutil.copy(path, tmp_path / path.name.replace("m-", "n-"))
    problem = r"holds 2 GGUF models \(m-00001-of-00003\.gguf, n-00001-of-00003\.gguf\), name one of them"
    with pytest.raises(CheckpointError, match=problem):
        open_reader(tmp_path)
    assert len(open_reader(tmp_path / "n-00003-of-00003.gguf").files) == 3


def test_set_of_a_projector_alone_is_taken(tmp_path: Path) -> None:
    for path in write_set(tmp_path):
        path.rename(tmp_path / path.name.replace("m-", "mmproj-"))
    assert len(open_reader(tmp_path).files) == 3


def test_lone_shard_of_many_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "m-99999-of-99999.gguf").write_bytes(gguf_bytes())
    with pytest.raises(CheckpointError, match="shard 1 of 99999: is missing"):
        open_reader(tmp_path)


def test_shards_with_too_many_tensors_in_all_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_set(tmp_path)
    monkeypatch.setattr("ftw.readers.gguf.reader.MAX_TENSORS", 2)
    with pytest.raises(CheckpointError, match="the number of tensors is 3 up to this shard, at most 2") as caught:
        open_reader(tmp_path)
    assert_names_file(caught.value, paths[2])
