"""Mutations: steps that change a checkpoint's files; `fuzz.choosing` chooses them.

A recipe is JSON, `{"seed": NAME, "steps": [[OPERATION, …], …]}`, and says literally what is done, so that it stays the
same when the choice of steps changes:

    ["set", file, path, value]          a node of the file's tree; a path ends in a key or an index that may be new
    ["drop", file, path]                remove one
    ["copy", file, path, key]           the same node once more, in the same object or list
    ["rename", file, path, key]         under another key
    ["swap", file, path, path]          two nodes of one file
    ["add", file, name, dtype, shape]   a tensor with data, all of whose numbers are right
    ["alias", file, name, name]         the second tensor's data become the first one's
    ["data", file, offset, hex]         overwrite what follows the header
    ["bytes", file, offset, hex, n]     of the rendered file, replace n bytes
    ["resize", file, nbytes]            cut the rendered file, or fill it up with zeros
    ["file", kind, file, file]          drop, folder, link, move, twin (a copy of the second under the first's name)
    ["take", file, seed, file]          another seed's file
    ["seal"]                            make an FTW's checksums right again
    ["open", file]                      what is opened; "" for the folder

A step that does not fit what the files have become does nothing.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from typing import TYPE_CHECKING, Any

import xxhash

from fuzz.documents import Document, parse, render
from fuzz.seeds import make_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    Path = list[str | int]
    Files = dict[str, Document]

INDEX = "freetoken_weight.json"
ELEMENT_NBYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "U8": 1, "I8": 1, "I64": 8, "F8_E4M3": 1, "BOOL": 1}
TORCH_NAMES = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "U8": "uint8", "I8": "int8",
    "I64": "int64", "F8_E4M3": "float8_e4m3fn", "BOOL": "bool",
}  # fmt: skip
_GGML_CODES = {"BF16": 30, "F16": 1, "F32": 0, "F64": 28, "I8": 24, "I64": 27}


def make(recipe: dict[str, Any]) -> tuple[dict[str, Document], str]:
    """Return the files that a recipe makes, and which of them is to be opened."""
    seed = make_seed(recipe["seed"])
    files, opened = seed.documents(), [seed.opened]
    for step in recipe["steps"]:
        apply(files, opened, step)
    return files, opened[0]


def apply(files: Files, opened: list[str], step: list[Any]) -> None:
    """Change the files as a step says."""
    operation, *arguments = step
    if operation == "open":
        opened[0] = arguments[0]
    elif operation == "seal":
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):  # the index is no index any more
            _seal(files)
    elif operation == "file":
        _change_file(files, *arguments)
    elif operation == "take":
        name, seed, other = arguments
        files[name] = parse(other, make_seed(seed).files[other])
    elif arguments[0] in files:
        name, *rest = arguments
        if operation in _RAW:
            content = render(files[name])
            files[name] = Document("raw", data=bytearray(_RAW[operation](content, *rest)))
        else:
            _TREE[operation](files, name, *rest)


def tensor_names(document: Document) -> list[str]:
    """Return the names of the tensors of a file whose tree still looks like one of a format."""
    return [name for name, _ in _places(document)]


def _holder(tree: Any, path: Path) -> tuple[Any, str | int] | None:
    """Return what holds the node of a path, and its key or index there; None where there is no such holder."""
    for key in path[:-1]:
        if (isinstance(tree, dict) and key in tree) or (
            isinstance(tree, list) and isinstance(key, int) and 0 <= key < len(tree)
        ):
            tree = tree[key]
        else:
            return None
    last = path[-1] if path else ""
    if isinstance(tree, dict):
        return tree, str(last)
    return (tree, last) if isinstance(tree, list) and isinstance(last, int) else None


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, list) and not 0 <= key < len(holder):
        holder.append(value)
    else:
        holder[key] = value


def _node(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key)
    return holder[key] if 0 <= key < len(holder) else None


def _set(files: Files, name: str, path: Path, value: Any) -> None:
    found = _holder(files[name].tree, path)
    if found:
        _put(*found, copy.deepcopy(value))


def _drop(files: Files, name: str, path: Path) -> None:
    found = _holder(files[name].tree, path)
    if found and isinstance(found[0], dict):
        found[0].pop(found[1], None)
    elif found and 0 <= found[1] < len(found[0]):
        del found[0][found[1]]


def _copy(files: Files, name: str, path: Path, key: str | int) -> None:
    found = _holder(files[name].tree, path)
    if found:
        holder, old = found
        value = copy.deepcopy(_node(holder, old))
        if isinstance(holder, dict):
            holder[str(key)] = value
        else:
            holder.insert(key if isinstance(key, int) else 0, value)


def _rename(files: Files, name: str, path: Path, key: str | int) -> None:
    _copy(files, name, path, key)
    if path and key != path[-1]:
        _drop(files, name, path)


def _swap(files: Files, name: str, path: Path, other: Path) -> None:
    first, second = _holder(files[name].tree, path), _holder(files[name].tree, other)
    if first and second:
        one, two = copy.deepcopy(_node(*first)), copy.deepcopy(_node(*second))
        _put(*first, two)
        second = _holder(files[name].tree, other)
        if second:
            _put(*second, one)


def _add(files: Files, name: str, tensor: str, dtype: str, shape: list[int]) -> None:
    document = files[name]
    elements = math.prod(shape)
    shape = list(shape)  # a step is not changed by those after it
    nbytes = elements * ELEMENT_NBYTES[dtype]
    data = bytes((31 * at + len(tensor)) % 251 for at in range(nbytes))
    with contextlib.suppress(KeyError, TypeError, AttributeError, IndexError):  # the tree is no longer a checkpoint's
        if document.kind == "safetensors":
            begin = len(document.data)
            document.tree["header"][tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + nbytes]}
            document.data += data
        elif document.kind == "gguf" and dtype in _GGML_CODES:
            alignment = document.tree["alignment"]
            document.data += bytes(-len(document.data) % alignment)
            entry = {"name": tensor, "length": None, "dims": None, "sizes": shape[::-1], "type": _GGML_CODES[dtype]}
            document.tree["tensors"].append({**entry, "offset": len(document.data)})
            document.data += data
        elif name == INDEX:
            _add_to_region(files, document.tree, tensor, dtype, shape, data)


def _add_to_region(files: Files, index: dict[str, Any], tensor: str, dtype: str, shape: list[int], data: bytes) -> None:
    shard = index["shards"][-1]
    region = files[shard["file"]].data
    begin = shard["global_off"] + len(region)
    entry = {"name": tensor, "kind": "weight", "dtype": TORCH_NAMES[dtype], "shape": shape}
    index["tensors"].append({**entry, "global_off": begin, "nbytes": len(data)})
    region += data + bytes(-len(data) % 4096)
    shard["nbytes"] = len(region)
    index["total_bytes"] = shard["global_off"] + len(region)
    index["shard_limit"] = max(index["shard_limit"], len(region))


def _alias(files: Files, name: str, tensor: str, other: str) -> None:
    document = files[name]
    places = dict(_places(document))
    if tensor in places and other in places:
        (begin, end), (start, stop) = places[tensor], places[other]
        length = min(end - begin, stop - start)
        document.data[start : start + length] = document.data[begin : begin + length]


def _places(document: Document) -> list[tuple[str, tuple[int, int]]]:
    """Return where in a document's data its tensors lie, as far as that can be told."""
    places: list[tuple[str, tuple[int, int]]] = []
    tree = document.tree if isinstance(document.tree, dict) else {}
    if document.kind == "safetensors" and isinstance(tree.get("header"), dict):
        for name, entry in tree["header"].items():
            offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
            if isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets):
                places.append((name, (max(offsets[0], 0), max(offsets[1], 0))))
    entries = tree.get("tensors")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            begin = entry.get("offset", 0)
            begin = begin if type(begin) is int and begin >= 0 else 0
            places.append((entry["name"], (begin, begin + 64)))
    return places


def _overwrite(files: Files, name: str, offset: int, noise: str) -> None:
    data = files[name].data
    new = bytes.fromhex(noise)[: max(len(data) - offset, 0)]
    data[offset : offset + len(new)] = new


def _replace_bytes(content: bytes, offset: int, noise: str, length: int) -> bytes:
    return content[:offset] + bytes.fromhex(noise) + content[offset + length :]


def _resize(content: bytes, nbytes: int) -> bytes:
    return content[:nbytes].ljust(min(nbytes, 1 << 20), b"\0")


def _change_file(files: Files, kind: str, name: str, other: str) -> None:
    if name not in files:
        return
    if kind == "drop":
        del files[name]
    elif kind in ("folder", "link"):
        files[name] = Document(kind)
    elif kind == "move":
        files[other] = files.pop(name)
    elif kind == "twin":
        files[other] = copy.deepcopy(files[name])


def _seal(files: Files) -> None:
    """Make the checksums that an FTW's index records those of the bytes that it describes."""
    index = files[INDEX].tree
    region = b"".join(bytes(files[shard["file"]].data) for shard in index["shards"])
    for entry in index["tensors"]:
        if "xxh3_64" in entry:
            begin, nbytes = entry["global_off"], entry["nbytes"]
            entry["xxh3_64"] = xxhash.xxh3_64_hexdigest(region[begin : begin + nbytes])
            if "sha256" in entry:
                entry["sha256"] = hashlib.sha256(region[begin : begin + nbytes]).hexdigest()
    for derived in index.get("ftw", {}).get("derived", []):
        content = render(files[derived["name"]])
        derived.update(bytes=len(content), xxh3_64=xxhash.xxh3_64_hexdigest(content))


_RAW: dict[str, Callable[..., bytes]] = {"bytes": _replace_bytes, "resize": _resize}
_TREE: dict[str, Callable[..., None]] = {
    "set": _set, "drop": _drop, "copy": _copy, "rename": _rename, "swap": _swap, "add": _add, "alias": _alias,
    "data": _overwrite,
}  # fmt: skip
