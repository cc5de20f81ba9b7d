"""Bounds: no claim of a file costs memory, and what is read and done grows with its header and no faster.

Memory is measured in processes of their own; work is counted, in calls and in bytes read, and never timed.
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import ftw_index, llama_config, safetensors_bytes, tensor_entry
from counting import count_steps
from gguf_builder import ARCHITECTURE, entry, gguf_bytes, kv, text

import ftw
from ftw.errors import OutputError
from ftw.readers import tensor_budget
from ftw.readers.gguf import metadata
from ftw.readers.gguf.metadata import ValueType

MIB = 1 << 20
SLACK_NBYTES = 64 * MIB
# Forks, so that each source is measured from the same start; VmHWM is the most that a process has had in memory.
MEASURE = """
import json, os, sys
import ftw.cli.main, ftw.readers
from ftw import ggml_types
ggml_types.ggml_types()
def most():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
for source in sys.argv[1:]:
    if os.fork() == 0:
        before = most()
        try:
            checkpoint = ftw.open_checkpoint(source)
            outcome = f"{len(checkpoint.tensors)} tensors"
            checkpoint.close()
            del checkpoint
            for _ in json.JSONEncoder(indent=2).iterencode(ftw.inspect(source).to_dict()):  # as the command prints it
                pass
        except ftw.FtwError as error:
            outcome = str(error).removeprefix(source)[:300]
        print(most() - before, outcome, flush=True)
        os._exit(0)
    os.wait()
"""


def expert_names(count: int) -> Iterator[str]:
    """Yield names as the largest checkpoints have them."""
    for number in range(count):
        layer, expert = divmod(number // 3, 128)
        yield f"model.layers.{layer}.mlp.experts.{expert}.{('gate', 'up', 'down')[number % 3]}_proj.weight"


def header_of(count: int) -> bytes:
    return safetensors_bytes(dict.fromkeys(expert_names(count), tensor_entry("BF16", [0, 2048], 0, 0)))


def shortest_entries(count: int, prefix: str = "") -> bytes:
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return safetensors_bytes(
        ("{" + ",".join(f'"{prefix}{number:x}":{entry}' for number in range(count)) + "}").encode()
    )


def index_of(count: int) -> str:
    places = {name: f"model-{number // 500:05}-of-02000.safetensors" for number, name in enumerate(expert_names(count))}
    return json.dumps({"weight_map": places})


def ftw_of(count: int) -> str:
    entry = {"kind": "weight", "dtype": "bfloat16", "shape": [0, 2048], "global_off": 0, "nbytes": 0}
    tensors = [{"name": name, **entry, "xxh3_64": f"{number:016x}"} for number, name in enumerate(expert_names(count))]
    return json.dumps(ftw_index(tensors, []))


def named(names: Iterable[str], shape: Callable[[int], list[int]] = lambda number: [0], dtype: str = "U8") -> bytes:
    """Return the JSON of a header of empty tensors; `shape` gives the one of each."""
    entries = {
        name: {"dtype": dtype, "shape": shape(number), "data_offsets": [0, 0]} for number, name in enumerate(names)
    }
    return json.dumps(entries, ensure_ascii=False).encode()


EMPTY = safetensors_bytes({})
STALE = "/".join(["d" * 240] * 12) + "/b.safetensors"
# What lies in the folder, all of it headers; and what becomes of it.
MEMORY: dict[str, tuple[dict[str, Callable[[], bytes | str]], str]] = {
    "safetensors of 100000 tensors": ({"model.safetensors": lambda: header_of(100_000)}, "100000 tensors"),
    "safetensors of short names": (
        {
            "model.safetensors": lambda: safetensors_bytes(
                {str(number): tensor_entry("U8", [0], 0, 0) for number in range(100_000)}
            )
        },
        "100000 tensors",
    ),
    "header of the shortest entries": (
        {"model.safetensors": lambda: shortest_entries(700_000)},
        "bytes of memory hold",
    ),
    "shards of the shortest entries": (
        {
            f"model-{shard:05}-of-00004.safetensors": lambda shard=shard: shortest_entries(140_000, f"{shard}.")
            for shard in range(1, 5)
        },
        "bytes of memory hold",
    ),
    "header of empty objects": (
        {"model.safetensors": lambda: safetensors_bytes(b'{"x":[' + b"{}," * 10 * MIB + b"{}]}")},
        "more than 1048576 characters in one value",
    ),
    "header of entries of lists": (
        {
            "model.safetensors": lambda: safetensors_bytes(
                b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"y":[' + b"[]," * 10 * MIB + b"1]}}"
            )
        },
        "more than 1048576 characters in one value",
    ),
    "header of one name": (
        {"model.safetensors": lambda: safetensors_bytes(b'{"' + b"n" * 40 * MIB)},
        "more than 65538 characters in one value",
    ),
    "header of spaces": ({"model.safetensors": lambda: safetensors_bytes(b" " * 40 * MIB + b"{}")}, "0 tensors"),
    "metadata of short strings": (
        {
            "model.safetensors": lambda: safetensors_bytes(
                b'{"__metadata__":{' + b",".join(b'"%d":""' % number for number in range(300_000)) + b"}}"
            )
        },
        "__metadata__: has more than 262144 entries",
    ),
    "metadata of a wide string": (
        {
            "model.safetensors": lambda: safetensors_bytes(
                b'{"__metadata__":{"x":"' + b"a" * 3 * MIB + "\U0001f600".encode() + b'"}}'
            )
        },
        "0 tensors",
    ),
    "metadata of wide strings": (
        {
            "model.safetensors": lambda: safetensors_bytes(
                b'{"__metadata__":{'
                + b",".join(b'"%d":"' % number + b"a" * MIB + "\U0001f600".encode() + b'"' for number in range(20))
                + b"}}"
            )
        },
        "__metadata__: is longer than 8388608 characters",
    ),
    "index of 100000 tensors": ({"model.safetensors.index.json": lambda: index_of(100_000)}, "is missing"),
    "ftw of 50000 tensors": ({"freetoken_weight.json": lambda: ftw_of(50_000)}, "50000 tensors"),
    "ftw with a large key": (
        {"freetoken_weight.json": lambda: json.dumps(ftw_index([], [], more=[[]] * 900_000))},
        "more than 1048576 characters in one value",
    ),
    "ftw with many keys": (
        {"freetoken_weight.json": lambda: json.dumps(ftw_index([], [], **{str(n): [{}] * 99 for n in range(9000)}))},
        "more than 2097152 characters beside tensors and shards",
    ),
    "config of empty objects": (
        {"config.json": lambda: b'{"x":[' + b"{}," * 10 * MIB + b"{}]}", "model.safetensors": lambda: EMPTY},
        "which could take more than 67108864 bytes of memory",
    ),
    "config of a wide string": (
        {
            "config.json": lambda: b'{"x":"' + b"a" * 20 * MIB + "\U0001f600".encode() + b'"}',
            "model.safetensors": lambda: EMPTY,
        },
        "which could take more than 67108864 bytes of memory",
    ),
    "config of 60000 modules": (
        {
            "config.json": lambda: json.dumps({"x": [{"name": name, "bits": 4} for name in expert_names(60_000)]}),
            "model.safetensors": lambda: EMPTY,
        },
        "0 tensors",
    ),
    "gguf that claims 2^60 keys": ({"m.gguf": lambda: gguf_bytes(num_keys=1 << 60)}, "the number of keys is"),
    "gguf that claims a string of 2^62": (
        {"m.gguf": lambda: gguf_bytes(kvs=[ARCHITECTURE, text("k") + struct.pack("<IQ", 8, 1 << 62)])},
        "is a string of",
    ),
    "gguf of 131072 tensors": (
        {"m.gguf": lambda: gguf_bytes([entry(str(number), (0,)) for number in range(1 << 17)])},
        "131072 tensors",
    ),
    "gguf of wide strings": (
        {
            "m.gguf": lambda: gguf_bytes(
                kvs=[ARCHITECTURE, *(kv(str(number), "str", "a" * 999_999 + "\U0001f600") for number in range(20))]
            )
        },
        "0 tensors",
    ),
    "gguf of a long vocabulary": (
        {
            "m.gguf": lambda: gguf_bytes(
                kvs=[ARCHITECTURE, kv("tokenizer.ggml.tokens", "array", ("str", [str(n) for n in range(500_000)]))]
            )
        },
        "0 tensors",
    ),
    "header of wide names": (
        {
            "model.safetensors": lambda: safetensors_bytes(
                named(f"{number}{'n' * 60_000}\U0001f600" for number in range(1200))
            )
        },
        "bytes of memory hold",
    ),
    "header of a long wide name": (
        {"model.safetensors": lambda: safetensors_bytes(named(["n" * 66_000 + "\U0001f600"]))},
        "holds more than 65538 characters in one value",
    ),
    "header of shapes of 64": (
        {"model.safetensors": lambda: safetensors_bytes(
            named((str(number) for number in range(300_000)), lambda number: [0, *map(int, f"{number:063b}")])
        )},
        "bytes of memory hold",
    ),
    "index of the shortest entries": (
        {"model.safetensors.index.json": lambda: '{"weight_map":{' + ",".join(
            f'"{number:x}":"a.safetensors"' for number in range(1_500_000)) + "}}"},
        "weight_map: describes more than",
    ),
    "index of many keys": (
        {"model.safetensors.index.json": lambda: "{" + ",".join(f'"{n:x}":1' for n in range(3_000_000)) + "}"},
        "json: describes more than",
    ),
    "stale copies in a file of a long name": (
        {
            "model.safetensors.index.json": lambda: json.dumps(
                {"weight_map": {**dict.fromkeys(map(str, range(40_000)), "a.safetensors"), "x": STALE}}
            ),
            "a.safetensors": lambda: safetensors_bytes(named(map(str, range(40_000)))),
            STALE: lambda: safetensors_bytes(named(["x", *map(str, range(40_000))])),
        },
        "40001 tensors",
    ),
    "ftw of many shards": (
        {"freetoken_weight.json": lambda: json.dumps(
            ftw_index([], [{"file": str(number), "global_off": 0, "nbytes": 0} for number in range(300_000)])
        )},
        "shards: describes more than",
    ),
    "ftw of logical shapes of 64": (
        {"freetoken_weight.json": lambda: json.dumps(ftw_index([
            {"name": str(number), "kind": "weight", "dtype": "uint8", "shape": [0], "global_off": 0, "nbytes": 0,
             "logical_shape": [300 + number] * 64} for number in range(60_000)], []))},
        "bytes of memory hold",
    ),
    "n-gram tables in float8 that nest": (
        {"model.safetensors": lambda: safetensors_bytes(named(
            [*("shared." * depth + "weight" for depth in range(1, 70)),
             *("shared." * 69 + str(number) + "!" * 60_000 for number in range(8))], dtype="F8_E4M3"))},
        "77 tensors",
    ),
    "80000 n-gram tables": (
        {"model.safetensors": lambda: safetensors_bytes(named(f"l.{n}.ngram_embedding.weight" for n in range(80_000)))},
        "more than 4096 lookup tables",
    ),
    "130000 token embeddings": (
        {"model.safetensors": lambda: safetensors_bytes(named(f"{n}.wte.weight" for n in range(130_000)))},
        "more than 4096 token embeddings",
    ),
    "80000 LM heads": (
        {"model.safetensors": lambda: safetensors_bytes(named(f"{n}.lm_head.weight" for n in range(80_000)))},
        "more than 4096 LM heads",
    ),
    "as many n-gram tables as are allowed, with scales": (
        {"model.safetensors": lambda: safetensors_bytes(named(
            (f"l.{n // 8}.ngram_embedding.{f'q{n % 8}_scale' if n % 8 else 'weight'}" for n in range(8 * 4096)),
            dtype="F8_E4M3"))},
        "32768 tensors",
    ),
    "gguf of 32768 arrays and 131072 tensors": (
        {"m.gguf": lambda: gguf_bytes(
            [entry(f"t{number:05x}", (0,)) for number in range(1 << 17)],
            kvs=[ARCHITECTURE, *(kv(f"k{number:05x}", "array", ("u8", [])) for number in range((1 << 15) - 1))],
        )},
        "131072 tensors",
    ),
    "gguf of wide names": (
        {"m.gguf": lambda: gguf_bytes(
            [entry(f"{number}{'n' * 65_000}\U0001f600", (0,)) for number in range(1200)]
        )},
        "at most 63 are allowed",
    ),
}  # fmt: skip


def test_memory_is_bounded_by_the_header(tmp_path: Path) -> None:
    limits: dict[Path, int] = {}
    for name, (files, _) in MEMORY.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, make in files.items():
            content = make()
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        limits[folder] = SLACK_NBYTES + 2 * sum((folder / file).stat().st_size for file in files)
    command = [sys.executable, "-c", MEASURE, *map(str, limits)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(limits)
    for line, (folder, limit), (_, expected) in zip(lines, limits.items(), MEMORY.values(), strict=True):
        grown, _, outcome = line.partition(" ")
        assert expected in outcome, folder.name
        print(f"{folder.name}: {int(grown) / MIB:.0f} of {limit / MIB:.0f} MiB")
        assert int(grown) <= limit, f"{folder.name}: {int(grown) / MIB:.0f} MiB, {limit / MIB:.0f} MiB are allowed"


@pytest.mark.parametrize(
    ("name", "content", "nbytes"),
    [
        ("model.safetensors", safetensors_bytes({"t": tensor_entry("U8", [1 << 40], 0, 1 << 40)}), 1 << 40),
        ("m.gguf", gguf_bytes([entry(sizes=(1 << 38,))]), 1 << 40),
    ],
    ids=["safetensors", "gguf"],
)
def test_opening_reads_no_more_than_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, nbytes: int
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    os.truncate(path, len(content) + nbytes)  # a hole
    read, real = [], os.preadv

    def count(descriptor: int, views: list[memoryview], offset: int) -> int:
        read.append(real(descriptor, views, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", count)
    with ftw.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.nbytes == nbytes
    assert sum(read) <= len(content) + MIB


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each read by position from now on."""
    read, real = [], os.preadv

    def count(descriptor: int, views: list[memoryview], offset: int) -> int:
        read.append(real(descriptor, views, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", count)
    return read


def write_sparse_gguf(path: Path, *arrays: tuple[int, int, int]) -> None:
    """Write a GGUF of arrays, each by its elements' type, their number and their bytes, which are a hole of zeros."""
    with path.open("wb") as file:
        file.write(gguf_bytes(num_keys=1 + len(arrays), alignment=1))
        for number, (element, count, nbytes) in enumerate(arrays):
            file.write(text(f"k{number}") + struct.pack("<IIQ", 9, element, count))
            file.seek(nbytes, os.SEEK_CUR)
        file.truncate()


SPARSE_ARRAYS = {"STRING": (8, 600, 4800), "ARRAY": (9, 600, 7200)}  # strings of no bytes, arrays of no numbers


@pytest.mark.parametrize("kind", SPARSE_ARRAYS)
@pytest.mark.parametrize("is_split", [False, True], ids=["one-file", "shards"])
def test_arrays_of_a_gguf_are_bounded_over_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_split: bool
) -> None:
    monkeypatch.setitem(metadata._MAX_WALKED, ValueType[kind], 1000)
    array = SPARSE_ARRAYS[kind]
    write_sparse_gguf(tmp_path / "good.gguf", array)
    ftw.open_checkpoint(tmp_path / "good.gguf").close()
    if is_split:
        for number in (1, 2):
            write_sparse_gguf(tmp_path / f"m-{number:05}-of-00002.gguf", array)
        source, key = tmp_path / "m-00001-of-00002.gguf", "m-00002-of-00002.gguf: k0"
    else:
        write_sparse_gguf(tmp_path / "m.gguf", array, array)
        source, key = tmp_path / "m.gguf", "m.gguf: k1"
    problem = f"{key}: is an array of 600 {kind} elements, 1200 in all arrays up to here, at most 1000 are allowed"
    with pytest.raises(ftw.CheckpointError, match=problem):
        ftw.open_checkpoint(source)


@pytest.mark.parametrize("counts", [[1 << 40], [100 * MIB] * 3], ids=["one-array", "three-arrays"])
def test_holes_in_the_header_of_a_gguf_are_bounded_over_all_of_it(
    tmp_path: Path, num_read: list[int], counts: list[int]
) -> None:
    write_sparse_gguf(tmp_path / "m.gguf", *((0, count, count) for count in counts))
    problem = f"k{len(counts) - 1}: the header reaches byte .*, at most {256 * MIB} bytes are allowed for all of a"
    with pytest.raises(ftw.CheckpointError, match=problem):
        ftw.open_checkpoint(tmp_path)
    assert sum(num_read) <= 2 * MIB * len(counts)


def test_copy_of_the_metadata_in_an_ftw_has_the_bounds_of_a_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(metadata._MAX_WALKED, ValueType.STRING, 1000)
    (tmp_path / "freetoken_weight.json").write_text(json.dumps(ftw_index([], [])))
    write_sparse_gguf(tmp_path / "source_metadata.gguf", SPARSE_ARRAYS["STRING"])
    ftw.inspect(tmp_path)
    write_sparse_gguf(tmp_path / "source_metadata.gguf", *[SPARSE_ARRAYS["STRING"]] * 2)
    with pytest.raises(ftw.CheckpointError, match="1200 in all arrays up to here"):
        ftw.inspect(tmp_path)


def test_header_that_many_links_name_is_not_read_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_read: list[int]
) -> None:
    header = safetensors_bytes(b"{}" + b" " * (64 << 10))
    (tmp_path / "one").write_bytes(header)
    names = [f"{number}.safetensors" for number in range(100)]
    for name in names:
        (tmp_path / name).symlink_to("one")
    monkeypatch.setattr(tensor_budget, "MAX_HEADERS_NBYTES", 5 * len(header))
    with pytest.raises(ftw.CheckpointError, match=r"safetensors: header: the headers take \d+ bytes up to here, at"):
        ftw.open_checkpoint(write(tmp_path / "model.safetensors.index.json", index_of_files(names)))
    assert sum(num_read) <= 6 * len(header)


def index_of_files(names: list[str]) -> str:
    return json.dumps({"weight_map": dict(zip(names, names, strict=True))})


@pytest.mark.timeout(300)  # it took hours
def test_shards_of_a_sparse_file_are_counted_before_they_are_planned(tmp_path: Path) -> None:
    content = safetensors_bytes({"t": tensor_entry("U8", [1 << 40], 0, 1 << 40)})
    source = write(tmp_path / "m" / "model.safetensors", content)
    os.truncate(source / "model.safetensors", len(content) + (1 << 40))

    def convert() -> None:
        with pytest.raises(OutputError, match=f"shards: {1 << 28} of at most 4096 bytes would be needed, at most"):
            ftw.convert(source, tmp_path / "out", shard_limit=4096, dry_run=True)

    convert()  # what is imported once
    assert count_steps(convert) < 20_000


def put(folder: Path, header: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def none(dtype: str = "BF16") -> dict[str, Any]:
    return tensor_entry(dtype, [0, 8], 0, 0)


def numbered(folder: Path, count: int) -> Path:
    for number in range(1, count + 1):
        (folder / f"m-{number:05}-of-{count:05}.safetensors").write_bytes(EMPTY)
    return folder


def sided(folder: Path, count: int) -> Path:
    names = [f"s{number}.safetensors" for number in range(count)]
    for name in names:
        (folder / name).write_bytes(EMPTY)
    (folder / "freetoken_weight.json").write_text(json.dumps(ftw_index([], [], side_files=names)))
    return folder


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path.parent


WORK: dict[str, Callable[[Path, int], Path]] = {
    "tensors of a safetensors file": lambda folder, n: put(folder, dict.fromkeys(map(str, range(n)), none())),
    "tensors of a gguf": lambda folder, n: write(
        folder / "m.gguf", gguf_bytes([entry(str(number), (0,)) for number in range(n)])
    ),
    "keys of a gguf": lambda folder, n: write(
        folder / "m.gguf", gguf_bytes(kvs=[ARCHITECTURE, *(kv(str(number), "u8", 1) for number in range(n))])
    ),
    "tensors of an ftw": lambda folder, n: write(folder / "freetoken_weight.json", ftw_of(n)),
    "side files of an ftw": lambda folder, n: sided(folder, n // 10),
    "numbered files": lambda folder, n: numbered(folder, n // 10),
    "n-gram tables in float8": lambda folder, n: put(
        folder, dict.fromkeys((f"layers.{number}.ngram_embedding.weight" for number in range(n)), none("F8_E4M3"))
    ),
    "parts of one n-gram table": lambda folder, n: put(
        folder, dict.fromkeys((f"layers.0.ngram_embedding.shard_{number}.weight" for number in range(n)), none())
    ),
    "tensors beside one table": lambda folder, n: put(
        folder, dict.fromkeys((f"model.embed_tokens.q{number}_scale" for number in range(n)), none()), llama_config()
    ),
    "listed layers": lambda folder, n: put(
        folder, {}, llama_config(num_hidden_layers=n, attn_layer_indices=list(range(n)))
    ),
    "kinds of layers": lambda folder, n: put(
        folder, {}, llama_config(num_hidden_layers=n, layer_types=["full_attention"] * n)
    ),
    "experts": lambda folder, n: put(folder, dict.fromkeys(expert_names(n), none()), llama_config(num_experts=8)),
}


@pytest.mark.parametrize("name", WORK)
def test_work_grows_no_faster_than_the_header(tmp_path: Path, name: str) -> None:
    calls = []
    for count in (500, 2000):
        folder = tmp_path / str(count)
        folder.mkdir()
        source = WORK[name](folder, count)
        ftw.inspect(source)  # what is cached and imported once
        calls.append(count_steps(lambda source=source: ftw.inspect(source)))
    assert calls[1] < 5 * calls[0]
