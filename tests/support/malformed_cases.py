"""All malformed checkpoints, as what writes them: for the test that opens each in every way and for docs/malformed.md.

A case writes into an empty folder, beside which it may write too, and returns what is to be opened.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import malformed_ftw as ftw_cases
import malformed_gguf as gguf_cases
import malformed_safetensors as safetensors_cases
from builders import llama_config, safetensors_bytes, tensor_entry
from gguf_builder import entry, gguf_bytes, shard_kvs

from ftw.checkpoint.stored_modules import MAX_MODULES

LFS_POINTER = safetensors_cases.LFS_POINTER
INDEX, FTW_INDEX = safetensors_cases.INDEX, ftw_cases.INDEX
GOOD = safetensors_cases.GOOD


class Case(NamedTuple):
    """One malformed checkpoint; `name` says what is wrong."""

    section: str
    name: str
    write: Callable[[Path], Path]

    @property
    def id(self) -> str:
        return f"{self.section}-{self.name}".replace(" ", "_")


def put(name: str, content: bytes | str, source: str | None = None) -> Callable[[Path], Path]:
    """Return what writes one file, which is the source unless another one is named, "" for the folder."""

    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder / (name if source is None else source)

    return write


def plain(folder: Path, config: str | None = None) -> Path:
    """Write a checkpoint of one tensor."""
    (folder / "model.safetensors").write_bytes(GOOD)
    if config is not None:
        (folder / "config.json").write_text(config)
    return folder


def tensors_named(pattern: str, count: int) -> Callable[[Path], Path]:
    """Return what writes a checkpoint of empty tensors, whose names a pattern gives for each number."""
    entry = tensor_entry("BF16", [0, 8], 0, 0)
    return put("model.safetensors", safetensors_bytes({pattern.format(number): entry for number in range(count)}))


def indexed(text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        safetensors_cases.write_index(folder, text)
        return folder

    return write


def variant(place: tuple[Any, ...], values: dict[str, Any]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "s.safetensors").write_bytes(GOOD)
        ftw_cases.write_variant(folder, place, values)
        return folder

    return write


def in_golden(change: Callable[[Path], object]) -> Callable[[Path], Path]:
    """Return what writes a good FTW folder and then changes it."""

    def write(folder: Path) -> Path:
        ftw_cases.write_golden(folder)
        change(folder)
        return folder

    return write


def in_set(change: Callable[[list[Path]], object]) -> Callable[[Path], Path]:
    """Return what writes a good GGUF in three shards and then changes it."""

    def write(folder: Path) -> Path:
        change(gguf_cases.write_set(folder))
        return folder

    return write


def beside(change: Callable[[Path], object]) -> Callable[[Path], Path]:
    """Return what writes a good safetensors checkpoint and then changes it."""

    def write(folder: Path) -> Path:
        plain(folder)
        change(folder)
        return folder

    return write


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path) -> None:
    """Move a file out of its folder, and leave a link to it."""
    outside = path.parent.with_name(f"{path.parent.name}-outside")
    outside.mkdir()
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def swap(first: Path, second: Path) -> None:
    first.rename(first.with_name("kept"))
    second.rename(first)
    first.with_name("kept").rename(second)


def two_files(second: bytes = GOOD) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "a.safetensors").write_bytes(GOOD)
        (folder / "b.safetensors").write_bytes(second)
        return folder

    return write


SECOND_NAME = "freetoken-00001.ftw"
FTW_OTHERS: dict[str, Callable[[Path], Path]] = {
    "index empty": in_golden(lambda folder: (folder / FTW_INDEX).write_bytes(b"")),
    "index list": in_golden(lambda folder: (folder / FTW_INDEX).write_text("[]")),
    "index cut": in_golden(lambda folder: (folder / FTW_INDEX).write_bytes(ftw_cases.GOLDEN_INDEX[:300])),
    "index with a key twice": in_golden(lambda folder: (folder / FTW_INDEX).write_text('{"a":1,"a":1}')),
    "index lfs pointer": in_golden(lambda folder: (folder / FTW_INDEX).write_bytes(LFS_POINTER)),
    "index with more after its end": in_golden(
        lambda folder: (folder / FTW_INDEX).write_bytes(ftw_cases.GOLDEN_INDEX + b"{}")
    ),
    "index nested deeply": in_golden(
        lambda folder: (folder / FTW_INDEX).write_bytes(b'{"x":' + b"[" * 200 + b"]" * 200 + b"}")
    ),
    "index is a link out of the folder": in_golden(lambda folder: replace_by_link(folder / FTW_INDEX)),
    "shard missing": in_golden(lambda folder: (folder / SECOND_NAME).unlink()),
    "shard of no bytes": in_golden(lambda folder: (folder / SECOND_NAME).write_bytes(b"")),
    "shard cut by a byte": in_golden(lambda folder: os.truncate(folder / SECOND_NAME, 4095)),
    "shard longer by a byte": in_golden(lambda folder: os.truncate(folder / SECOND_NAME, 4097)),
    "shard is an lfs pointer": in_golden(lambda folder: (folder / SECOND_NAME).write_bytes(LFS_POINTER)),
    "shard is a folder": in_golden(lambda folder: replace_by_folder(folder / SECOND_NAME)),
    "shard is a link out of the folder": in_golden(lambda folder: replace_by_link(folder / SECOND_NAME)),
    "copy of metadata is no gguf": in_golden(lambda folder: (folder / "source_metadata.gguf").write_bytes(GOOD)),
    "copy of metadata without architecture": in_golden(
        lambda folder: (folder / "source_metadata.gguf").write_bytes(gguf_bytes(kvs=[]))
    ),
    "copy of metadata is a link to nothing": in_golden(
        lambda folder: (folder / "source_metadata.gguf").symlink_to("nowhere")
    ),
}
GGUF_OTHERS: dict[str, Callable[[Path], Path]] = {
    "first shard missing": in_set(lambda shards: shards[0].unlink()),
    "last shard missing": in_set(lambda shards: shards[2].unlink()),
    "shard of no bytes": in_set(lambda shards: shards[1].write_bytes(b"")),
    "shard is a folder": in_set(lambda shards: replace_by_folder(shards[1])),
    "shard is a link to itself": in_set(lambda shards: (shards[1].unlink(), shards[1].symlink_to(shards[1].name))),
    "shards in each others place": in_set(lambda shards: swap(shards[1], shards[2])),
    "shard twice": in_set(lambda shards: shutil.copy(shards[1], shards[2])),
    "name in two shards": in_set(
        lambda shards: shards[2].write_bytes(gguf_bytes([entry("t1")], bytes(32), kvs=shard_kvs(2, 3, 3)))
    ),
    "shard of another byte order": in_set(
        lambda shards: shards[2].write_bytes(
            gguf_bytes([entry("t2", order=">")], bytes(32), kvs=shard_kvs(2, 3, 3, order=">"), order=">")
        )
    ),
    "first shard without architecture": in_set(
        lambda shards: shards[0].write_bytes(gguf_bytes([entry("t0")], bytes(32), kvs=shard_kvs(0, 3, 3)))
    ),
    "whole file under a shards name": in_set(
        lambda shards: shards[1].write_bytes(gguf_bytes([entry("t1")], bytes(32)))
    ),
    "shard under another name": in_set(
        lambda shards: (shards[1].rename(shards[1].with_name("m.gguf")), shards[0].unlink(), shards[2].unlink())
    ),
    "two models in a folder": in_set(
        lambda shards: [shutil.copy(shard, shard.with_name(f"n{shard.name[1:]}")) for shard in shards]
    ),
    "too many tensors": put("model.gguf", gguf_bytes(num_tensors=1 << 18) + bytes(33 << 18)),
    "too many keys": put("model.gguf", gguf_bytes(num_keys=1 << 17) + bytes(14 << 17)),
}
FILES: dict[str, Callable[[Path], Path]] = {
    "path that is not there": lambda folder: folder / "nothing",
    "path with a nul": lambda folder: folder / "a\0b",
    "folder without a checkpoint": lambda folder: folder,
    "file of another kind": put("note.txt", "no weights"),
    "pickles alone": put("pytorch_model.bin", b"\x80\x04.", ""),
    "safetensors file is a folder": beside(lambda folder: replace_by_folder(folder / "model.safetensors")),
    "safetensors file is a link to nothing": beside(
        lambda folder: ((folder / "model.safetensors").unlink(), (folder / "model.safetensors").symlink_to("nowhere"))
    ),
    "safetensors file is a pipe": beside(
        lambda folder: ((folder / "model.safetensors").unlink(), os.mkfifo(folder / "model.safetensors"))
    ),
    "gguf file is a folder": lambda folder: ((folder / "m.gguf").mkdir(), folder)[1],
    "gguf file is a link to nothing": lambda folder: ((folder / "m.gguf").symlink_to("nowhere"), folder)[1],
    "index is a folder": lambda folder: ((folder / INDEX).mkdir(), folder)[1],
    "index is a link to nothing": lambda folder: ((folder / INDEX).symlink_to("nowhere"), folder)[1],
    "index of no bytes": lambda folder: ((folder / INDEX).write_bytes(b""), folder)[1],
    "several indexes": lambda folder: (
        [(folder / f"{name}.safetensors.index.json").write_text("{}") for name in "ab"],
        folder,
    )[1],
    "name in two files without an index": two_files(),
    "second file broken": two_files(GOOD[:-1]),
    "numbered shard missing": put("model-00001-of-00002.safetensors", GOOD, ""),
    "numbered shard alone": put("model-00001-of-00002.safetensors", GOOD),
    "config is a folder": beside(lambda folder: (folder / "config.json").mkdir()),
    "config is a link to nothing": beside(lambda folder: (folder / "config.json").symlink_to("nowhere")),
    "config is a link to itself": beside(lambda folder: (folder / "config.json").symlink_to("config.json")),
    "config is a pipe": beside(lambda folder: os.mkfifo(folder / "config.json")),
}
CONFIG_OTHERS = {
    "lfs pointer": LFS_POINTER.decode(),
    "null": "null",
    "nested deeply": '{"x":' + "[" * 200 + "]" * 200 + "}",
    "nested very deeply": '{"x":' + "[" * 100_000,
    "of too many values": '{"x":[' + "{}," * 300_000 + "{}]}",
    "integer of 5000 digits": '{"x":' + "9" * 5000 + "}",
    "half a surrogate pair": '{"x":"\\ud800"}',
    "no value": '{"x":}',
    "of too many parts": json.dumps({f"part{number}": {"tie_word_embeddings": True} for number in range(300)}),
}
# Opened, since their bytes lie where the headers say, and refused where somebody asks for their tables.
UNJUDGED: dict[str, Callable[[Path], Path]] = {
    "more token embeddings than any model has": tensors_named("m{}.embed_tokens.weight", MAX_MODULES + 1),
    "more further lookup tables than any model has": tensors_named("m{}.ngram_embedding.weight", MAX_MODULES + 1),
    "more LM heads than any model has": tensors_named("m{}.lm_head.weight", MAX_MODULES + 1),
    "more token embeddings than are compared": tensors_named("m{}.embed_tokens.weight", 101),
}
# Read, and what is odd about them is told.
EITHER: dict[str, Callable[[Path], Path]] = {
    "index of no bytes beside model.safetensors": beside(lambda folder: (folder / INDEX).write_bytes(b"")),
    "index beside model.safetensors of shards that are not there": beside(
        lambda folder: (folder / INDEX).write_text('{"weight_map":{"t":"a.safetensors"}}')
    ),
    "folder called like an index beside model.safetensors": beside(lambda folder: (folder / INDEX).mkdir()),
    "config missing": lambda folder: plain(folder),
    "config with NaN": lambda folder: plain(folder, '{"x":NaN}'),
    "config without anything": lambda folder: plain(folder, "{}"),
    "config with facts of wrong types": lambda folder: plain(
        folder, json.dumps(llama_config(vocab_size="64", hidden_size=-1, num_hidden_layers=[1], architectures="x"))
    ),
    "config with a vocabulary of another size": lambda folder: (
        plain(folder, json.dumps(llama_config(vocab_size=1000))),
        (folder / "model.safetensors").write_bytes(
            safetensors_bytes({"model.embed_tokens.weight": tensor_entry("F32", [2, 1], 0, 8)}, bytes(8))
        ),
        folder,
    )[2],
    "copy of a tensor that the index does not name": lambda folder: (
        two_files()(folder),
        (folder / INDEX).write_text('{"weight_map":{"t":"b.safetensors"}}'),
        folder,
    )[2],
    "tensor that the index does not name": lambda folder: (
        (folder / "a.safetensors").write_bytes(
            safetensors_bytes({"t": tensor_entry("U8", [1], 0, 1), "u": tensor_entry("U8", [1], 1, 2)}, bytes(2))
        ),
        (folder / INDEX).write_text('{"weight_map":{"t":"a.safetensors"}}'),
        folder,
    )[2],
    "pickle beside the weights": beside(lambda folder: (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")),
    "header without tensors": put("model.safetensors", safetensors_bytes({})),
    "space before the header": put("model.safetensors", safetensors_bytes(b"  {}")),
    "tensor without a name": put("model.safetensors", safetensors_bytes({"": tensor_entry("U8", [1], 0, 1)}, b"x")),
    "further fields of an entry": put(
        "model.safetensors", safetensors_bytes({"t": {**tensor_entry("U8", [1], 0, 1), "x": [1]}}, b"x")
    ),
    "gguf without tensors": put("model.gguf", gguf_bytes()),
    "gguf with holes between its tensors": put("model.gguf", gguf_bytes([entry(offset=64)], bytes(96))),
    "gguf table that is no matrix": put("model.gguf", gguf_bytes([entry("token_embd.weight")], bytes(32))),
    "unknown keys of an ftw index": in_golden(lambda folder: None),
}


def iter_cases() -> Iterator[Case]:
    """Yield every case that is refused."""
    for name, (content, _) in safetensors_cases.HEADERS.items():
        yield Case("safetensors file", words(name), put("model.safetensors", content))
    for name, (text, _, _) in safetensors_cases.INDEXES.items():
        yield Case("safetensors index", words(name), indexed(text))
    for name, (content, _) in gguf_cases.FILES.items():
        yield Case("GGUF file", words(name), put("model.gguf", content))
    for name, (overrides, _) in gguf_cases.SECOND_SHARDS.items():
        yield Case("GGUF shards", words(name), lambda folder, more=overrides: gguf_cases.write_set(folder, **more)[0])
    for name, write in GGUF_OTHERS.items():
        yield Case("GGUF shards", name, write)
    for name, (place, values, _) in ftw_cases.VARIANTS.items():
        yield Case("FTW folder", words(name), variant(place, values))
    for name, write in FTW_OTHERS.items():
        yield Case("FTW folder", name, write)
    for name, (text, _) in safetensors_cases.CONFIGS.items():
        yield Case("config.json", words(name), lambda folder, text=text: plain(folder, text))
    for name, text in CONFIG_OTHERS.items():
        yield Case("config.json", name, lambda folder, text=text: plain(folder, text))
    for name, write in FILES.items():
        yield Case("files and folders", name, write)


def words(name: str) -> str:
    """Return an id in words, without the number of its list."""
    number, _, rest = name.partition("_")
    return (rest if number.isdigit() else name).replace("_", " ")
