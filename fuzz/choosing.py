"""Choosing: the next steps of a recipe, with a knowledge of what the files are made of; see `fuzz.mutations`."""

from __future__ import annotations

import copy
import json
import math
from typing import TYPE_CHECKING, Any

from fuzz import words
from fuzz.documents import Document, render
from fuzz.mutations import ELEMENT_NBYTES, INDEX, apply, tensor_names
from fuzz.seeds import make_seed, seed_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fuzz.mutations import Files, Path

MAX_STEPS = 6
_LIST_PREVIEW = 6  # of a list as long as a vocabulary's, elements that are looked at


def choose(pick: Callable[[int], int], checkpoint_format: str = "") -> dict[str, Any]:
    """Return a new recipe; `pick(n)` returns a number below n."""
    names = seed_names(checkpoint_format)
    seed = make_seed(_one_of(pick, names))
    files, opened = seed.documents(), [seed.opened]
    steps: list[list[Any]] = []
    choose_step = (_choose_step, _choose_gentle_step)[pick(2)]
    for _ in range(1 + pick(1 + pick(MAX_STEPS))):
        if not files:
            break
        step = choose_step(pick, files)
        steps.append(json.loads(json.dumps(step)))  # what a recipe that was written and read again holds
        apply(files, opened, steps[-1])
    if seed.name.startswith("ftw") and pick(3):
        steps.append(["seal"])
    return {"seed": seed.name, "steps": steps}


def _one_of(pick: Callable[[int], int], choices: Sequence[Any]) -> Any:
    return choices[pick(len(choices))]


def _choose_step(pick: Callable[[int], int], files: Files) -> list[Any]:
    name = list(files)[pick(len(files))]
    document = files[name]
    kind = pick(20)
    if document.tree is None and kind < 16:
        return _choose_bytes(pick, name, document)
    if kind < 8:
        path, value = _choose_node(pick, document.tree)
        return ["set", name, path, _choose_value(pick, value, document.tree)]
    if kind < 12:
        return _choose_structural(pick, name, document)
    if kind < 15:
        return _choose_tensor(pick, name)
    if kind < 18:
        return _choose_bytes(pick, name, document)
    if kind == 18:
        return ["seal"]
    return _choose_file(pick, files, name)


def _choose_gentle_step(pick: Callable[[int], int], files: Files) -> list[Any]:
    """Choose a step that leaves a checkpoint whole, but means something else, more often than not."""
    name = list(files)[pick(len(files))]
    document = files[name]
    kind = pick(6)
    names = tensor_names(document)
    if name == "config.json" and document.kind == "json":
        path, value = _choose_node(pick, document.tree)
        new = _choose_value(pick, value, document.tree)
        return ["set", name, [*path[:-1], _one_of(pick, words.KEYS)] if kind < 4 else path, new]
    if kind == 0 and document.kind == "gguf":
        return _choose_new_key(pick, name)
    if kind == 1 and names:
        return ["alias", name, _one_of(pick, names), _one_of(pick, names)]
    if kind < 4 and names:
        return _choose_new_name(pick, name, document)
    if kind == 4 and document.kind in ("safetensors", "gguf"):
        return ["data", name, pick(len(document.data) + 1), bytes(pick(256) for _ in range(4)).hex()]
    return _choose_tensor(pick, name)


def _choose_tensor(pick: Callable[[int], int], name: str) -> list[Any]:
    dtype = list(ELEMENT_NBYTES)[pick(len(ELEMENT_NBYTES))]
    shape = [_one_of(pick, words.SIZES) for _ in range((2, 2, 2, 1, 3, 0)[pick(6)])]
    return ["add", name, _one_of(pick, words.NAMES), dtype, shape]


def _choose_new_name(pick: Callable[[int], int], name: str, document: Document) -> list[Any]:
    """Choose another name, or another shape, for one of a document's tensors."""
    new = _one_of(pick, words.NAMES)
    if document.kind == "safetensors":
        names = tensor_names(document)
        old, other = _one_of(pick, names), _one_of(pick, names)
        header, kind = document.tree["header"], pick(4)
        if kind == 0 and isinstance(header[old].get("shape"), list):
            return ["set", name, ["header", old, "shape"], _choose_list(pick, header[old]["shape"])]
        if kind == 1:  # the place of another tensor
            return ["set", name, ["header", old, "data_offsets"], header[other]["data_offsets"]]
        return ["rename", name, ["header", old], new]
    place = pick(len(document.tree["tensors"]))
    kind = pick(5)
    if kind == 0 and name == INDEX:
        key = ("role", "placement", "ggml_type", "xxh3_64", "logical_shape", "sha256")[pick(6)]
        return ["set", name, ["tensors", place, key], (None, "Q4_0", "Q8_0", "host", [24, 64])[pick(5)]]
    if kind == 1:
        key = "sizes" if document.kind == "gguf" else "shape"
        entry = document.tree["tensors"][place]
        shape = entry.get(key) if isinstance(entry, dict) else None
        return ["set", name, ["tensors", place, key], _choose_list(pick, shape if isinstance(shape, list) else [])]
    if kind == 2:
        key = "offset" if document.kind == "gguf" else "global_off"
        other = _one_of(pick, document.tree["tensors"])
        return ["set", name, ["tensors", place, key], other.get(key) if isinstance(other, dict) else 0]
    return ["set", name, ["tensors", place, "name"], new]


def _choose_new_key(pick: Callable[[int], int], name: str) -> list[Any]:
    key, code = _one_of(pick, words.GGUF_KEYS), pick(14)
    new = {"key": key, "length": None, "type": code, "value": _choose_kv(pick, code)}
    return ["set", name, ["kvs", 1 << 20], new]


def _choose_structural(pick: Callable[[int], int], name: str, document: Document) -> list[Any]:
    path, value = _choose_node(pick, document.tree)
    other, _ = _choose_node(pick, document.tree)
    kind = pick(6)
    if kind == 0:
        return ["drop", name, path]
    if kind == 1:
        return ["copy", name, path, _choose_key(pick, path, document)]
    if kind == 2:
        return ["rename", name, path, _choose_key(pick, path, document)]
    if kind == 3:
        return ["swap", name, path, other]
    if kind == 4:
        names = tensor_names(document)
        if names:
            return ["alias", name, _one_of(pick, names), _one_of(pick, names)]
        return ["swap", name, path, other]
    if document.kind == "gguf":
        return _choose_new_key(pick, name)
    return ["set", name, [*path[:-1], _one_of(pick, words.KEYS)], _choose_value(pick, value, document.tree)]


def _choose_kv(pick: Callable[[int], int], code: int) -> Any:
    if code == 9:
        of = pick(13)
        return {"of": of, "count": None, "items": [_choose_kv(pick, of) for _ in range(pick(5))]}
    if code == 8:
        return _one_of(pick, (*words.WORDS, *words.NAMES[:4], ""))
    return _one_of(pick, words.NUMBERS)


def _choose_key(pick: Callable[[int], int], path: Path, document: Document) -> str | int:
    if isinstance(path[-1], int):
        return pick(8)
    kind = pick(4)
    if kind == 0:
        return f"{path[-1]}\0"  # the same key twice
    if kind == 1:
        return _one_of(pick, tensor_names(document) or words.NAMES)
    return _one_of(pick, words.NAMES if kind == 2 else words.KEYS)


def _choose_node(pick: Callable[[int], int], tree: Any) -> tuple[Path, Any]:
    nodes = list(_iter_nodes(tree, []))
    return _one_of(pick, nodes) if nodes else (["x"], tree)


def _choose_value(pick: Callable[[int], int], value: Any, tree: Any) -> Any:
    kind = pick(8)
    if kind == 0:
        return _one_of(pick, words.OTHERS)
    if kind == 1:  # what stands elsewhere: offsets, names and shapes of another tensor
        return copy.deepcopy(_choose_node(pick, tree)[1])
    if isinstance(value, bool):
        return (not value, None, "true", int(value))[pick(4)]
    if isinstance(value, int):
        if kind < 5:
            return _one_of(pick, words.NUMBERS)
        if kind == 5:
            return (value * 2, value // 2, value << 32, -value)[pick(4)]
        return value + _one_of(pick, words.STEPS)
    if isinstance(value, str):
        alike = words.DTYPES if value in words.DTYPES else words.NAMES
        return _one_of(pick, _one_of(pick, (alike, alike, words.WORDS, words.FILES)))
    if isinstance(value, list):
        return _choose_list(pick, value)
    return _one_of(pick, words.OTHERS)


def _choose_list(pick: Callable[[int], int], items: list[Any]) -> Any:
    kind = pick(6)
    if items and all(type(item) is int for item in items):
        product = math.prod(items)
        flat = ([product], [1, *items], [*items, 1], items[::-1], [items[0] * 2, *items[1:]], [0, *items])
        return flat[kind]
    return (items[::-1], items[1:], items[:-1], items * 2, [*items, None], {})[kind]


def _choose_bytes(pick: Callable[[int], int], name: str, document: Document) -> list[Any]:
    kind = pick(6)
    noise = bytes(pick(256) for _ in range(1 + pick(4))).hex()
    if kind < 2 and document.kind in ("safetensors", "gguf"):
        return ["data", name, pick(len(document.data) + 1), noise]
    size = len(render(document))
    offset = pick(min(size, 1 << (4 + 4 * pick(4))) + 1)
    if kind < 4:
        return ["bytes", name, offset, noise, (0, 1, len(noise) // 2, 8)[pick(4)]]
    sizes = (offset, size - 1 - pick(16), size + 1 + pick(64), size + 4096, 0, size // 2)
    return ["resize", name, max(_one_of(pick, sizes), 0)]


def _choose_file(pick: Callable[[int], int], files: Files, name: str) -> list[Any]:
    other = _one_of(pick, words.FILES)
    kind = pick(7)
    if kind < 5:
        return ["file", ("drop", "folder", "link", "move", "twin")[kind], name, other]
    if kind == 5:
        return ["open", _one_of(pick, ["", *files])]
    seed = make_seed(_one_of(pick, seed_names("")))
    return ["take", (name, other)[pick(2)], seed.name, list(seed.files)[pick(len(seed.files))]]


def _iter_nodes(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    items: list[tuple[str | int, Any]] = []
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree[:_LIST_PREVIEW]))
    for key, value in items:
        yield [*path, key], value
        if len(path) < 12:
            yield from _iter_nodes(value, [*path, key])
