"""Conversion of GGUF models: packed rows unchanged, the metadata beside them, rows equal to the gguf package's."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from folders import read_index, tree
from gguf import GGMLQuantizationType, GGUFEndian, GGUFValueType
from gguf_builder import ARCHITECTURE, Blocks, entry, gguf_bytes, kv, random_blocks, shard_kvs, write_gguf
from inspecting import stored_bytes

import ftw
from ftw.conversion.writing.chunk_reader import ChunkReader
from ftw.ggml_types import PACKED_TYPES, ggml_types_by_name
from ftw.readers import open_reader

TABLE, HEAD = "token_embd.weight", "output.weight"
INDEX, COPY, KEY = "freetoken_weight.json", "source_metadata.gguf", "freetoken.output_weight_present"
NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}
TYPES = [*PACKED_TYPES, *NUMPY, "BF16"]
ROWS = 37
LITTLE, BIG = GGUFEndian.LITTLE, GGUFEndian.BIG


def table_of(name: str, seed: int = 0) -> np.ndarray | Blocks:
    """Return a table of a type: packed rows of random bits under scales of real weights' size, or plain numbers."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((ROWS, 64)).astype("<f4")
    if name in NUMPY:
        return (values * 30).astype(NUMPY[name])
    if name == "BF16":
        halves = np.ascontiguousarray(values.view("<u2").reshape(ROWS, 64, 2)[..., 1])
        return Blocks(halves.view(np.uint8), GGMLQuantizationType.BF16)
    blocks = random_blocks(GGMLQuantizationType[name], ROWS, 2, seed=seed)
    data = blocks.data.reshape(-1, ggml_types_by_name()[name].type_size).copy()
    for field in PACKED_TYPES[name]:
        if field.width == 2 and field.number <= 2:
            scales = (generator.standard_normal((len(data), field.number)) * 0.01).astype("<f2")
            data[:, field.offset : field.offset + 2 * field.number] = scales.view(np.uint8)
    return Blocks(data.reshape(blocks.data.shape), blocks.ggml_type)


def raw_bytes(table: np.ndarray | Blocks) -> bytes:
    """Return the bytes of a table as a little-endian file holds them."""
    return (table.data if isinstance(table, Blocks) else table).tobytes()


def values_of(table: np.ndarray | Blocks) -> np.ndarray:
    """Return the values of a table, decoded by the gguf package."""
    if not isinstance(table, Blocks):
        return table
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(table.data, table.ggml_type)


def kvs_of(columns: int) -> dict[str, Any]:
    return {
        "llama.block_count": (GGUFValueType.UINT32, 1),
        "llama.embedding_length": (GGUFValueType.UINT32, columns),
        "tokenizer.ggml.tokens": (GGUFValueType.ARRAY, [f"tökén {number}" for number in range(ROWS)]),
        "tokenizer.ggml.scores": (GGUFValueType.ARRAY, [0.5, -1.5]),
        "some.flag": (GGUFValueType.BOOL, True),
    }


def write_model(
    folder: Path, name: str = "Q8_0", *, head: bool = True, order: GGUFEndian = LITTLE, split: bool = False
) -> Path:
    """Write a model whose table is of a type, and return what opens it."""
    table = table_of(name)
    columns = values_of(table).shape[1]
    tensors: dict[str, np.ndarray | Blocks] = {
        "blk.0.attn_norm.weight": np.linspace(-1, 1, 48, dtype=np.float32),
        TABLE: table,
        "blk.0.ffn_up_exps.weight": Blocks(np.stack([random_blocks(GGMLQuantizationType.Q4_0).data] * 3), q4_0()),
        **({HEAD: table_of(name, seed=1)} if head else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / "m.gguf", tensors, kvs_of(columns), order=order, **({"split_max_tensors": 1} if split else {}))
    return folder


def q4_0() -> GGMLQuantizationType:
    return GGMLQuantizationType.Q4_0


def assert_rows(source: Path, table: np.ndarray | Blocks, *, embed: str, dtype: torch.dtype | None) -> None:
    """Check that the rows of a loaded table have the bits of the gguf package's."""
    expected = torch.from_numpy(values_of(table))
    ids = torch.tensor([*range(ROWS), -1, ROWS, 5])
    with ftw.load(source, embed=embed, device="cpu", dtype=dtype) as model:
        found = model.embedding(ids)
    assert not found[ROWS : ROWS + 2].count_nonzero()
    assert torch.equal(found[[*range(ROWS), ROWS + 2]].nan_to_num(), expected[[*range(ROWS), 5]].nan_to_num())
    assert torch.equal(found[:ROWS].isnan(), expected.isnan())
    assert found.dtype == expected.dtype


@pytest.mark.parametrize(
    ("order", "split"), [(LITTLE, False), (LITTLE, True), (BIG, False), (BIG, True)],
    ids=["little", "little-split", "big", "big-split"],
)  # fmt: skip
@pytest.mark.parametrize("name", TYPES)
def test_table_of_every_type_goes_the_whole_way(tmp_path: Path, name: str, order: GGUFEndian, split: bool) -> None:
    source, out, table = write_model(tmp_path / "src", name, order=order, split=split), tmp_path / "out", table_of(name)
    assert len(list(source.iterdir())) == (4 if split else 1)
    assert ftw.inspect(source).is_host_eligible
    result = ftw.convert(source, out, embed="host" if split else "auto")
    assert result.plan.placement.placement == "host"
    checked = ftw.verify(out, against=source)
    assert (checked.is_ok, checked.num_checksums, checked.num_compared) == (True, 4, 4)
    dtype = None if isinstance(table, np.ndarray) else torch.float32
    assert_rows(source, table, embed="host", dtype=dtype)
    assert_rows(out, table, embed="host", dtype=dtype)
    first = read_index(out)["tensors"][0]
    assert (first["name"], first["global_off"], first["nbytes"]) == (TABLE, 0, len(raw_bytes(table)))
    stored = (out / "freetoken-00000.ftw").read_bytes()[: first["nbytes"]]
    assert stored == raw_bytes(table)


@pytest.mark.parametrize("order", [LITTLE, BIG], ids=["little", "big"])
def test_region_holds_the_files_own_bytes(tmp_path: Path, order: GGUFEndian) -> None:
    source = write_model(tmp_path / "src", order=order)
    ftw.convert(source, tmp_path / "out")
    whole, reader = (source / "m.gguf").read_bytes(), open_reader(source)
    with ftw.open_checkpoint(tmp_path / "out") as checkpoint:
        for name in (TABLE, HEAD, "blk.0.ffn_up_exps.weight"):
            tensor = reader.tensors[name]
            assert stored_bytes(checkpoint, name) == whole[tensor.offset : tensor.offset + tensor.nbytes]
        norm = np.linspace(-1, 1, 48, dtype="<f4").tobytes()
        assert stored_bytes(checkpoint, "blk.0.attn_norm.weight") == norm


def test_index_tells_how_rows_are_packed(tmp_path: Path) -> None:
    ftw.convert(write_model(tmp_path / "src", "Q6_K"), tmp_path / "out", embed="host")
    keys = ("dtype", "shape", "ggml_type", "logical_shape", "role", "placement")
    found = {entry["name"]: tuple(entry.get(key) for key in keys) for entry in read_index(tmp_path / "out")["tensors"]}
    assert found == {
        TABLE: ("uint8", [ROWS, 420], "Q6_K", [ROWS, 512], "token_embedding", "host"),
        HEAD: ("uint8", [ROWS, 420], "Q6_K", [ROWS, 512], None, None),
        "blk.0.attn_norm.weight": ("float32", [48], None, None, None, None),
        "blk.0.ffn_up_exps.weight": ("uint8", [3, 3, 36], "Q4_0", [3, 3, 64], None, None),
    }
    index = read_index(tmp_path / "out")
    assert index["copied_metadata"] == [COPY]
    assert index["ftw"]["source"] == {
        "format": "gguf",
        "files": [{"name": "m.gguf", "bytes": (tmp_path / "src" / "m.gguf").stat().st_size}],
    }


@pytest.mark.parametrize("head", [True, False], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("order", "split"), [(LITTLE, False), (LITTLE, True), (BIG, False)], ids=["little", "split", "big"]
)
def test_copy_of_the_metadata_is_read_by_the_gguf_package(
    tmp_path: Path, order: GGUFEndian, split: bool, head: bool
) -> None:
    source = write_model(tmp_path / "src", head=head, order=order, split=split)
    ftw.convert(source, tmp_path / "out")
    first = next(iter(sorted(source.iterdir())))
    before, after = gguf.GGUFReader(first), gguf.GGUFReader(tmp_path / "out" / COPY)
    keys = [key for key in before.fields if not key.startswith("GGUF.")]
    assert [key for key in after.fields if not key.startswith("GGUF.")] == [*keys, KEY]
    assert [after.fields[key].contents() for key in keys] == [before.fields[key].contents() for key in keys]
    assert after.fields[KEY].contents() is head
    assert (after.fields["GGUF.tensor_count"].contents(), after.tensors) == (0, [])
    assert after.fields["GGUF.version"].contents() == before.fields["GGUF.version"].contents()
    assert after.endianess == before.endianess == order


def test_copy_of_the_metadata_is_the_source_byte_for_byte(tmp_path: Path) -> None:
    source = write_model(tmp_path / "src")
    ftw.convert(source, tmp_path / "out")
    whole, copy = (source / "m.gguf").read_bytes(), (tmp_path / "out" / COPY).read_bytes()
    end = open_reader(source).metadata_end
    assert copy[:8] == whole[:8]
    assert copy[8:24] == bytes(8) + (int.from_bytes(whole[16:24], "little") + 1).to_bytes(8, "little")
    assert copy[24:end] == whole[24:end]
    assert copy[end:] == kv(KEY, "bool", True)


def test_key_that_the_source_has_already_is_not_added_again(tmp_path: Path) -> None:
    kvs = {**kvs_of(64), KEY: (GGUFValueType.BOOL, False)}
    write_gguf(tmp_path / "m.gguf", {TABLE: table_of("Q8_0")}, kvs)
    ftw.convert(tmp_path / "m.gguf", tmp_path / "out")
    fields = gguf.GGUFReader(tmp_path / "out" / COPY).fields
    assert (fields[KEY].contents(), fields["GGUF.kv_count"].contents()) == (False, 1 + len(kvs))


def test_ftw_made_from_the_ftw_keeps_all_of_it(tmp_path: Path) -> None:
    ftw.convert(write_model(tmp_path / "src"), tmp_path / "one", embed="host", shard_limit=4096)
    shutil.rmtree(tmp_path / "src")
    ftw.convert(tmp_path / "one", tmp_path / "two", embed="host")
    one, two = read_index(tmp_path / "one"), read_index(tmp_path / "two")
    keys = ("name", "dtype", "shape", "nbytes", "ggml_type", "logical_shape", "role", "placement", "xxh3_64")
    described = [
        {entry["name"]: {key: entry.get(key) for key in keys} for entry in index["tensors"]} for index in (one, two)
    ]
    assert described[0] == described[1]
    assert (len(one["shards"]), len(two["shards"])) == (4, 1)
    assert (tmp_path / "two" / COPY).read_bytes() == (tmp_path / "one" / COPY).read_bytes()
    assert ftw.verify(tmp_path / "two", against=tmp_path / "one").is_ok
    assert_rows(tmp_path / "two", table_of("Q8_0"), embed="host", dtype=torch.float32)


def test_conversion_writes_the_same_bytes_twice(tmp_path: Path) -> None:
    source = write_model(tmp_path / "src")
    for name in ("one", "two"):
        ftw.convert(source, tmp_path / name, embed="host")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_little_and_big_endian_files_become_the_same_region(tmp_path: Path) -> None:
    for order in (LITTLE, BIG):
        ftw.convert(write_model(tmp_path / f"src-{order.name}", order=order), tmp_path / order.name)
    little, big = (tree(tmp_path / order.name) for order in (LITTLE, BIG))
    assert little["freetoken-00000.ftw"] == big["freetoken-00000.ftw"]
    assert json.loads(little[INDEX])["tensors"] == json.loads(big[INDEX])["tensors"]


# the tie


def test_auto_leaves_a_tied_table_where_it_is(tmp_path: Path) -> None:
    source = write_model(tmp_path / "src", head=False)
    found = ftw.convert(source, tmp_path / "out", embed="auto").to_dict()["embed"]
    reason = "tied to the LM head: llama has one, and none is stored"
    assert found == {"placement": "gpu", "tables": [], "reason": reason}
    assert all("placement" not in entry for entry in read_index(tmp_path / "out")["tensors"])
    assert_rows(tmp_path / "out", table_of("Q8_0"), embed="auto", dtype=torch.float32)


def test_host_is_refused_on_a_tied_table(tmp_path: Path) -> None:
    source = write_model(tmp_path / "src", head=False)
    with pytest.raises(ftw.NotEligibleError, match=r"token_embd\.weight: refused: the LM head uses this same"):
        ftw.convert(source, tmp_path / "out", embed="host")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_auto_lays_a_per_layer_table_out_for_the_host(tmp_path: Path) -> None:
    name = "per_layer_token_embd.weight"
    tensors = {TABLE: table_of("Q8_0"), name: table_of("Q5_K")}
    kvs = {"gemma3n.embedding_length": (GGUFValueType.UINT32, 64)}
    write_gguf(tmp_path / "m.gguf", tensors, kvs, architecture="gemma3n")
    result = ftw.convert(tmp_path / "m.gguf", tmp_path / "out", embed="auto")
    assert (result.plan.placement.placement, [table.name for table in result.plan.placement.host_tables]) == (
        "gpu",
        [name],
    )
    first = read_index(tmp_path / "out")["tensors"][0]
    assert (first["name"], first["role"], first["placement"]) == (name, "per_layer_embedding", "host")


# what else a file may hold


def test_tensors_without_elements_and_of_three_dimensions_go_through(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray | Blocks] = {
        TABLE: table_of("Q8_0"),
        "empty": np.empty((0, 7), np.float32),
        "stack": np.arange(24, dtype=np.float16).reshape(2, 3, 4),
        "four": np.arange(16, dtype=np.int64).reshape(2, 2, 2, 2),
        "empty.packed": Blocks(np.empty((0, 34), np.uint8), GGMLQuantizationType.Q8_0),
    }
    write_gguf(tmp_path / "m.gguf", tensors, kvs_of(64))
    ftw.convert(tmp_path / "m.gguf", tmp_path / "out")
    assert ftw.verify(tmp_path / "out", against=tmp_path / "m.gguf").is_ok
    with ftw.open_checkpoint(tmp_path / "out") as checkpoint:
        shapes = {
            name: (tensor.dtype, tensor.shape, tensor.logical_shape) for name, tensor in checkpoint.tensors.items()
        }
        assert stored_bytes(checkpoint, "stack") == np.arange(24, dtype="<f2").tobytes()
    del shapes[TABLE]
    assert shapes == {
        "empty": ("F32", (0, 7), None),
        "stack": ("F16", (2, 3, 4), None),
        "four": ("I64", (2, 2, 2, 2), None),
        "empty.packed": ("U8", (0, 34), (0, 32)),
    }


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K", "Q1_0"])
def test_type_without_a_decoder_goes_through(tmp_path: Path, name: str) -> None:
    blocks = random_blocks(GGMLQuantizationType[name])
    write_gguf(tmp_path / "m.gguf", {"blk.0.odd.weight": blocks}, kvs_of(64))
    ftw.convert(tmp_path / "m.gguf", tmp_path / "out")
    assert ftw.verify(tmp_path / "out", against=tmp_path / "m.gguf").is_ok
    [entry] = read_index(tmp_path / "out")["tensors"]
    assert (entry["ggml_type"], entry["shape"]) == (name, list(blocks.data.shape))


def test_vocabulary_alone_is_converted(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {}, kvs_of(64))
    ftw.convert(tmp_path / "m.gguf", tmp_path / "out", embed="auto")
    assert ftw.verify(tmp_path / "out", against=tmp_path / "m.gguf").is_ok
    report = ftw.inspect(tmp_path / "out")
    assert (report.num_tensors, report.config.num_tokens, report.verdict.token_embedding.reason) == (
        0,
        ROWS,
        "no_table",
    )


def test_neighbours_go_along_and_the_gguf_metadata_decide(tmp_path: Path) -> None:
    source = write_model(tmp_path / "src", head=False)
    config = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 5, "tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text("{}")
    (source / "taxes.txt").write_text("secret")
    result = ftw.convert(source / "m.gguf", tmp_path / "out", embed="auto")
    assert sorted(tree(tmp_path / "out")) == [
        "config.json", "freetoken-00000.ftw", INDEX, COPY, "tokenizer.json",
    ]  # fmt: skip
    assert result.to_dict()["metadata_files"] == ["config.json", "tokenizer.json", COPY]
    for path in (source / "m.gguf", tmp_path / "out"):
        verdict = ftw.inspect(path).verdict
        assert (verdict.tied, verdict.token_embedding.reason, verdict.warnings) == (True, "tied", ())
    with ftw.open_checkpoint(tmp_path / "out") as checkpoint:
        assert (checkpoint.config.architecture, checkpoint.config.vocab_size) == ("llama", ROWS)


def test_projector_beside_the_model_is_left_out_and_named(tmp_path: Path) -> None:
    source = write_model(tmp_path / "src")
    write_gguf(source / "mmproj-f16.gguf", {"v.patch_embd.weight": np.ones((2, 32), np.float32)}, architecture="clip")
    (source / "README.md").write_text("text")
    result = ftw.convert(source, tmp_path / "out")
    assert {entry.name: entry.reason for entry in result.plan.left_out} == {
        "mmproj-f16.gguf": "a projector of images or sound, not the model"
    }
    assert sorted(tree(tmp_path / "out")) == ["README.md", "freetoken-00000.ftw", INDEX, COPY]


def test_stale_copy_beside_the_file_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    source = write_model(tmp_path / "src")
    (source / COPY).write_bytes(b"stale")
    ftw.convert(source / "m.gguf", tmp_path / "out")
    assert gguf.GGUFReader(tmp_path / "out" / COPY).fields[KEY].contents() is True


# plans and failures


def test_dry_run_counts_the_copys_bytes(tmp_path: Path) -> None:
    source = write_model(tmp_path / "src")
    planned = ftw.convert(source, tmp_path / "out", embed="host", dry_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    result = ftw.convert(source, tmp_path / "out", embed="host")
    assert result.to_dict() == planned.to_dict() | {"dry_run": False, "free_bytes": result.free_nbytes}
    assert planned.to_dict()["metadata_files"] == [COPY]
    [copy] = planned.plan.derived_files
    assert copy.nbytes == (tmp_path / "out" / COPY).stat().st_size
    assert planned.needed_nbytes == sum(len(content) for content in tree(tmp_path / "out").values())


@pytest.mark.parametrize("where", ["copy", "weights"])
def test_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    source = write_model(tmp_path / "src")

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if where == "copy":
        monkeypatch.setattr("ftw.readers.gguf.metadata_copy._iter_copy", fail)
    else:
        monkeypatch.setattr(ChunkReader, "read", fail)
    with pytest.raises(OSError, match="Input/output error"):
        ftw.convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_interrupted_conversion_goes_on(tmp_path: Path) -> None:
    source = write_model(tmp_path / "src")
    ftw.convert(source, tmp_path / "whole")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ftw.convert(source, tmp_path / "out", progress=interrupt)
    assert ftw.convert(source, tmp_path / "out", resume=True).resumed_nbytes
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_changed_byte_of_the_ftw_is_found(tmp_path: Path) -> None:
    source = write_model(tmp_path / "src")
    ftw.convert(source, tmp_path / "out", embed="host")
    with (tmp_path / "out" / "freetoken-00000.ftw").open("r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))
    checked = ftw.verify(tmp_path / "out", against=source)
    assert not checked.is_ok
    assert all(TABLE in problem for problem in checked.problems)


def test_broken_copy_of_the_metadata_is_named(tmp_path: Path) -> None:
    ftw.convert(write_model(tmp_path / "src"), tmp_path / "out")
    (tmp_path / "out" / COPY).write_bytes(b"GGUF")
    with pytest.raises(ftw.CheckpointError) as caught:
        ftw.inspect(tmp_path / "out")
    assert str(caught.value).startswith(f"{tmp_path / 'out' / COPY}: ")


def test_split_whose_shards_disagree_writes_nothing(tmp_path: Path) -> None:
    for number in range(2):
        kvs = [ARCHITECTURE, *shard_kvs(number, 2, 3)]
        content = gguf_bytes([entry(f"t{number}")], bytes(32), kvs=kvs)
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(content)
    with pytest.raises(ftw.CheckpointError, match=r"split\.tensors\.count: is 3, 2 is needed"):
        ftw.convert(tmp_path / "m-00001-of-00002.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
