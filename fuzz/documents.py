r"""Documents: a checkpoint's files as trees of JSON values that can be changed anywhere, and rendered however wrong.

    kind          tree                                                               data
    json          the value                                                          none
    safetensors   {"length": null, "header": {…}}                                    what follows the header
    gguf          {"magic", "version", "order", "alignment", "num_keys", "num_tensors", "kvs": […], "tensors": […]}
                                                                                     what follows the padded header
    raw           none                                                               the whole file
    folder, link  none: a folder in place of the file, a link to nothing

A null count or length is the true one. Strings say what JSON values cannot: "@raw:TEXT" is TEXT without quotes,
"@digits:N" a number of N digits, "@nest:N" N lists in one another, "@rep:N:TEXT" TEXT N times; a NUL is left out, so
that "name" and "name\0" are one key that occurs twice.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_SPECIAL = re.compile(r'"@(raw|digits|nest|rep):((?:[^"\\]|\\.)*)"')
_MAX_REPEATED = 200_000
_LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(slots=True)
class Document:
    """One file; see the module's table."""

    kind: str
    tree: Any = None
    data: bytearray = field(default_factory=bytearray)


def parse(name: str, content: bytes) -> Document:
    """Return an intact file as a document, by its name."""
    if name.endswith(".json"):
        return Document("json", json.loads(content))
    if name.endswith(".safetensors"):
        end = 8 + int.from_bytes(content[:8], "little")
        return Document("safetensors", {"length": None, "header": json.loads(content[8:end])}, bytearray(content[end:]))
    if name.endswith(".gguf"):
        return _GgufParser(content).parse()
    return Document("raw", data=bytearray(content))


def render(document: Document) -> bytes:
    """Return the bytes of a file; never fails, whatever the tree has become."""
    if document.kind == "json":
        return render_json(document.tree)
    if document.kind == "safetensors":
        tree = document.tree if isinstance(document.tree, dict) else {}
        header = render_json(tree.get("header"))
        return _pack("Q", "<", _or(tree.get("length"), len(header))) + header + document.data
    if document.kind == "gguf":
        return _render_gguf(document)
    return bytes(document.data)


def render_json(value: Any) -> bytes:
    """Return JSON text, or nearly so."""
    return _SPECIAL.sub(_expand, json.dumps(value)).replace("\\u0000", "").encode()


def write(files: dict[str, Document], folder: Path) -> None:
    """Write the files into a folder."""
    for name, document in files.items():
        path = folder / name
        if document.kind == "folder":
            path.mkdir()
        elif document.kind == "link":
            path.symlink_to("nothing")
        else:
            path.write_bytes(render(document))


def _expand(match: re.Match[str]) -> str:
    kind, text = match[1], match[2]
    if kind == "raw":
        return str(json.loads(f'"{text}"'))
    count, _, rest = text.partition(":")
    number = min(int(count), _MAX_REPEATED) if count.isdecimal() else 0
    if kind == "digits":
        return "9" * (number or 1)
    return "[" * number + "]" * number if kind == "nest" else f'"{rest * min(number, _MAX_REPEATED)}"'


def _or(value: Any, default: int) -> Any:
    return default if value is None else value


def _pack(letter: str, order: str, value: Any) -> bytes:
    """Return a number in so many bytes, whatever it is; integers wrap."""
    if letter in "fd":
        number = float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else math.nan
        return struct.pack(order + letter, math.inf if letter == "f" and abs(number) > 3e38 else number)
    number = int(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0
    nbytes = struct.calcsize("<" + letter)
    return (number % (1 << (8 * nbytes))).to_bytes(nbytes, "little" if order == "<" else "big")


def _text(order: str, value: Any, length: Any = None) -> bytes:
    text = value if isinstance(value, str) else render_json(value).decode()
    match = _SPECIAL.fullmatch(json.dumps(text))
    encoded = (_expand(match).strip('"') if match else text).encode("utf-8", "surrogatepass")
    return _pack("Q", order, _or(length, len(encoded))) + encoded


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _render_gguf(document: Document) -> bytes:
    tree = document.tree if isinstance(document.tree, dict) else {}
    order = ">" if tree.get("order") == ">" else "<"
    kvs, tensors = _dicts(tree.get("kvs")), _dicts(tree.get("tensors"))
    parts = [
        str(tree.get("magic")).encode("latin-1", "replace")[:4].ljust(4, b"\0"),
        _pack("I", order, tree.get("version")),
        _pack("Q", order, _or(tree.get("num_tensors"), len(tensors))),
        _pack("Q", order, _or(tree.get("num_keys"), len(kvs))),
    ]
    for kv in kvs:
        parts.append(_text(order, kv.get("key"), kv.get("length")) + _pack("I", order, kv.get("type")))
        parts.append(_gguf_value(order, kv.get("type"), kv.get("value")))
    for tensor in tensors:
        sizes = tensor.get("sizes") if isinstance(tensor.get("sizes"), list) else []
        parts.append(_text(order, tensor.get("name"), tensor.get("length")))
        parts.append(_pack("I", order, _or(tensor.get("dims"), len(sizes))))
        parts += [_pack("Q", order, size) for size in sizes]
        parts.append(_pack("I", order, tensor.get("type")) + _pack("Q", order, tensor.get("offset")))
    header = b"".join(parts)
    if not tensors and not document.data:
        return header
    alignment = tree.get("alignment")
    alignment = alignment if isinstance(alignment, int) and 0 < alignment <= 1 << 16 else 32
    return header + bytes(-len(header) % alignment) + document.data


def _gguf_value(order: str, kind: Any, value: Any, depth: int = 0) -> bytes:
    if isinstance(kind, int) and kind in _LETTERS:
        return _pack(_LETTERS[kind], order, value)
    if kind == _ARRAY and isinstance(value, dict) and depth < 40:
        items = value.get("items") if isinstance(value.get("items"), list) else []
        head = _pack("I", order, value.get("of")) + _pack("Q", order, _or(value.get("count"), len(items)))
        return head + b"".join(_gguf_value(order, value.get("of"), item, depth + 1) for item in items)
    return _text(order, value)


class _GgufParser:
    """Reads an intact file."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._order = "<" if content[4:6] != b"\0\0" else ">"
        self._at = 4

    def parse(self) -> Document:
        version, num_tensors, num_keys = self._unpack("IQQ")
        kvs = []
        for _ in range(num_keys):
            key, kind = self._string(), self._unpack("I")[0]
            kvs.append({"key": key, "length": None, "type": kind, "value": self._value(kind)})
        tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = next((kv["value"] for kv in kvs if kv["key"] == "general.alignment"), 32)
        start = -(-self._at // alignment) * alignment if tensors else self._at
        tree = {
            "magic": "GGUF", "version": version, "order": self._order, "alignment": alignment,
            "num_keys": None, "num_tensors": None, "kvs": kvs, "tensors": tensors,
        }  # fmt: skip
        return Document("gguf", tree, bytearray(self._content[start:]))

    def _unpack(self, fields: str) -> tuple[Any, ...]:
        values = struct.unpack_from(self._order + fields, self._content, self._at)
        self._at += struct.calcsize(self._order + fields)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        self._at += length
        return self._content[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_LETTERS[kind])[0]
        of, count = self._unpack("IQ")
        return {"of": of, "count": None, "items": [self._value(of) for _ in range(count)]}

    def _tensor(self) -> dict[str, Any]:
        name, (dims,) = self._string(), self._unpack("I")
        *sizes, kind, offset = self._unpack(f"{dims}QIQ")
        return {"name": name, "length": None, "dims": None, "sizes": sizes, "type": kind, "offset": offset}
