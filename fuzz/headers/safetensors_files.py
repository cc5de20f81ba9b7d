"""Drawn safetensors files, read by ftw and by the safetensors library; see `ftw.readers.safetensors.header`."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import safetensors

from ftw.dtypes import DTYPES
from fuzz.findings import require
from fuzz.headers.differences import Difference, compare_answers

if TYPE_CHECKING:
    from random import Random

    import ftw

NAME = "model.safetensors"
_FIELDS = ("dtype", "shape", "data_offsets")
_LARGE = 1.79769e308

# What numbers may look like, right and wrong.
_NUMBERS = (
    "0", "1", "7", "-0", "-1", "0.0", "1.5", "1e2", "1E+2", "1e-2", "1e400", "1e-400", "0e999", "00", "01", "1.", ".5",
    "+1", "1e", "-", "0x1", "1_0", "NaN", "Infinity", "-Infinity", "1" * 309, "1" * 310, "9" * 308, "9" * 309,
    "-" + "9" * 310, "1" * 4301, "2147483648", "4294967296", "9223372036854775807", "9223372036854775808",
    "18446744073709551615", "18446744073709551616", "1.7976931348623157e308", "1.7976931348623159e308",
    "0." + "0" * 400 + "1", "1" + "0" * 400 + "e-400", "17976931348623157" + "0" * 292,
)  # fmt: skip
_STRINGS = (
    '""', '"F32"', '"f32"', '"F4"', '"\\u0046\\u0033\\u0032"', '"é"', '"\\ud83d\\ude00"', '"\\ud83d"', '"\\udc00"',
    '"\\/"', '"\\x"', '"\n"', '"\x7f"', '"\t"', '"a', "'a'", '"\\u00"', '"\u2028"', '"\\u0000"',
)  # fmt: skip
_VALUES = ("null", "true", "false", "nul", "True", "[]", "{}", "[1,]", "[1 2]", '{"a":1}', '{"a":1,"a":2}', '{"a"}', "")
_SPACES = ("", "", "", " ", "\n", "\t\r ", "\f", "\u00a0", "\0", "/**/")
_NAMES = ('"t"', '"u"', '""', '"model.embed_tokens.weight"', '"__metadata__"', '"\\u005f_metadata__"', '"t\\n"', '"ü"')


def draw(random: Random) -> bytes:
    """Return a file: an intact one, in which up to four things were changed."""
    members, data = _intact(random)
    for _ in range(random.choice((0, 1, 1, 1, 1, 1, 2, 2, 3, 4))):
        random.choice(_CHANGES)(random, members)
    text = _render(random, members).encode("utf-8", "surrogatepass")
    if random.random() < 0.1:
        text = _with_other_bytes(random, text)
    if random.random() < 0.1:
        data = random.choice((data + b"\0", data[:-1], b""))
    length = len(text) + (random.choice((-1, 1, 8, -len(text), 1 << 40)) if random.random() < 0.05 else 0)
    return max(length, 0).to_bytes(8, "little") + text + data


def compare(content: bytes, checkpoint: ftw.Checkpoint | None, error: ftw.FtwError | None) -> None:
    """Compare what ftw made of a file with what the library makes of it.

    Raises:
        FindingError: They differ, and no listed difference says so.
    """
    stored: dict[str, dict[str, Any]] = {}
    theirs = ""
    try:
        stored = dict(safetensors.deserialize(content))
    except safetensors.SafetensorError as refusal:
        theirs = str(refusal)
    compare_answers(content, error, theirs, read_here=READ_HERE, read_there=READ_THERE)
    if checkpoint is None or theirs:
        return
    require(set(stored) == set(checkpoint.tensors), f"tensors {sorted(stored)}, not {sorted(checkpoint.tensors)}")
    for name, tensor in checkpoint.tensors.items():
        other, found = stored[name], bytearray(tensor.nbytes)
        checkpoint.read_into(name, found)
        require(other["dtype"] == tensor.dtype, f"{name!r}: {other['dtype']}, not {tensor.dtype}")
        require(tuple(other["shape"]) == tensor.shape, f"{name!r}: shape {other['shape']}, not {tensor.shape}")
        require(bytes(other["data"]) == found, f"{name!r}: other bytes")


def _intact(random: Random) -> tuple[list[list[Any]], bytes]:
    """Return members, each a name and a value, an entry as a list of fields and texts; and the tensors' bytes."""
    members: list[list[Any]] = []
    end = 0
    for number in range(random.choice((0, 1, 1, 1, 2, 3))):
        dtype = random.choice(list(DTYPES.values()))
        shape = [random.choice((1, 2, 3, 8)) for _ in range(random.randrange(3))]
        if random.random() < 0.2:
            shape.insert(0, 0)
        if dtype.bits % 8:
            shape.append(4)
        begin, end = end, end + math.prod(shape) * dtype.bits // 8
        texts = [json.dumps(dtype.name), json.dumps(shape), json.dumps([begin, end])]
        members.append([json.dumps(f"t{number}"), [list(field) for field in zip(_FIELDS, texts, strict=True)]])
    if random.random() < 0.3:
        members.insert(random.randrange(len(members) + 1), ['"__metadata__"', '{"format":"pt"}'])
    return members, random.randbytes(end)


def _render(random: Random, members: list[list[Any]]) -> str:
    def space() -> str:
        return random.choice(_SPACES) if random.random() < 0.01 else ""

    def render(value: Any) -> str:
        if isinstance(value, str):
            return value
        return space() + "{" + ",".join(f'{space()}"{key}":{space()}{text}' for key, text in value) + "}" + space()

    return space() + "{" + ",".join(f"{name}:{render(value)}" for name, value in members) + "}" + space()


def _with_other_bytes(random: Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(random.choice((1, 1, 2))):
        place = random.randrange(len(changed) + 1)
        new = random.choice(
            (b"", b"0", b"-", b",", b'"', b"{", b"}", b"[", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b" ")
        )
        changed[place : place + random.choice((0, 1))] = new
    return bytes(changed)


def _odd(random: Random) -> str:
    """Return the text of a value, of any kind."""
    kind = random.randrange(6)
    if kind < 2:
        return random.choice(_NUMBERS)
    if kind == 2:
        return random.choice(_STRINGS)
    if kind == 3:
        return random.choice(_VALUES)
    if kind == 4:
        return "[" + ",".join(random.choice(_NUMBERS) for _ in range(random.randrange(4))) + "]"
    levels = random.choice((1, 64, 124, 125, 126, 127, 128, 200))
    opened, closed = random.choice((("[", "]"), ('{"a":', "}")))
    return opened * levels + "1" + closed * levels


def _entry(random: Random, members: list[list[Any]]) -> list[list[str]] | None:
    """Return the fields of a tensor that has some."""
    entries = [value for _, value in members if isinstance(value, list) and value]
    return random.choice(entries) if entries else None


def _change_field(random: Random, members: list[list[Any]]) -> None:
    entry = _entry(random, members)
    if entry:
        random.choice(entry)[1] = _odd(random)


def _change_number(random: Random, members: list[list[Any]]) -> None:
    entry = _entry(random, members)
    if entry:
        field = random.choice(entry)
        places = [match.span() for match in re.finditer(r"[0-9]+", field[1])]
        if places:
            begin, end = random.choice(places)
            field[1] = field[1][:begin] + random.choice(_NUMBERS) + field[1][end:]


def _add_sizes(random: Random, members: list[list[Any]]) -> None:
    entry = _entry(random, members)
    if entry:
        field = random.choice(entry)
        more = random.choice(("1", "1", "2", "0", "4611686018427387904", "9223372036854775808"))
        count = random.choice((1, 2, 61, 64, 70))
        field[1] = field[1].replace("[", "[" + f"{more}," * count, 1).replace(",]", "]")


def _add_field(random: Random, members: list[list[Any]]) -> None:
    entry = _entry(random, members)
    if entry is not None:
        entry.insert(random.randrange(len(entry) + 1), [random.choice(("more", "x", "dtype", "shape")), _odd(random)])


def _add_ignored_field(random: Random, members: list[list[Any]]) -> None:
    entry = _entry(random, members)
    if entry is not None:
        entry.append([f"x{len(entry)}", _odd(random)])


def _double_field(random: Random, members: list[list[Any]]) -> None:
    entry = _entry(random, members)
    if entry:
        entry.insert(random.randrange(len(entry) + 1), list(random.choice(entry)))


def _drop_field(random: Random, members: list[list[Any]]) -> None:
    entry = _entry(random, members)
    if entry:
        del entry[random.randrange(len(entry))]


def _shuffle(random: Random, members: list[list[Any]]) -> None:
    random.shuffle(_entry(random, members) or members)


def _make_list(random: Random, members: list[list[Any]]) -> None:
    """Write an entry as a list of its values, or its dtype as an object."""
    entry = _entry(random, members)
    if entry and random.random() < 0.5:
        entry[0][1] = "{" + entry[0][1] + ":null}"
    elif entry:
        place = next(number for number, (_, value) in enumerate(members) if value is entry)
        members[place][1] = "[" + ",".join(text for _, text in entry) + "]"


def _change_member(random: Random, members: list[list[Any]]) -> None:
    if members:
        random.choice(members)[random.randrange(2)] = random.choice((random.choice(_NAMES), _odd(random)))


def _add_member(random: Random, members: list[list[Any]]) -> None:
    value = random.choice(members)[1] if members and random.random() < 0.5 else _odd(random)
    members.insert(random.randrange(len(members) + 1), [random.choice(_NAMES), value])


def _add_metadata(random: Random, members: list[list[Any]]) -> None:
    texts = [f"{random.choice(_NAMES)}:{random.choice((*_STRINGS, _odd(random)))}" for _ in range(random.randrange(3))]
    value = random.choice(("null", _odd(random), "{" + ",".join(texts) + "}", "{" + ",".join(texts) + "}"))
    members.insert(random.randrange(len(members) + 1), ['"__metadata__"', value])


# Of how an intact file is changed; those that find most stand here several times.
_CHANGES = (
    _change_field, _change_number, _change_number, _add_sizes, _add_field,
    _add_ignored_field, _add_ignored_field, _add_ignored_field, _double_field, _drop_field,
    _shuffle, _make_list, _change_member, _add_member, _add_metadata,
)  # fmt: skip


class _Object(list[tuple[str, Any]]):
    """An object's members, of which two may have one name."""


class _Seen:
    """The values of a header, by Python's own parser: all of them, one by one."""

    def __init__(self, content: bytes) -> None:
        length = int.from_bytes(content[:8], "little")
        text = content[8 : 8 + length].decode()
        self.numbers: list[float] = []
        self.top: Any = json.loads(
            text, object_pairs_hook=_Object, parse_int=self._number, parse_float=self._number, parse_constant=None
        )
        self.values: list[Any] = [self.top]
        for value in self.values:
            self.values += [child for _, child in value] if isinstance(value, _Object) else list(_items(value))

    def entries(self) -> list[tuple[dict[str, Any], Any]]:
        """Return the fields of each tensor, and its value as it is written."""
        members = [value for name, value in self.top if name != "__metadata__"]
        return [(dict(value) if isinstance(value, _Object) else _as_fields(value), value) for value in members]

    def _number(self, text: str) -> int | float:
        value = float(text)
        self.numbers.append(value)
        return value if not re.fullmatch("[0-9]+", text) or math.isinf(value) else int(text)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_fields(value: Any) -> dict[str, Any]:
    return dict(zip(_FIELDS, value, strict=False)) if isinstance(value, list) else {}


def _has_key_twice(content: bytes) -> bool:
    objects = [value for value in _Seen(content).values if isinstance(value, _Object)]
    return any(len({key for key, _ in members}) < len(members) for members in objects)


def _has_list(content: bytes) -> bool:
    return any(not isinstance(value, _Object) and isinstance(value, list) for _, value in _Seen(content).entries())


def _has_dtype_object(content: bytes) -> bool:
    return any(isinstance(fields.get("dtype"), _Object) for fields, _ in _Seen(content).entries())


def _shapes(content: bytes) -> list[list[int]]:
    return [_items(fields.get("shape")) for fields, _ in _Seen(content).entries()]


def _has_large_shape(content: bytes) -> bool:
    return any(math.prod(size or 1 for size in shape) >= 1 << 63 for shape in _shapes(content))


def _has_many_dimensions(content: bytes) -> bool:
    return any(len(shape) > 64 for shape in _shapes(content))


def _has_large_number(content: bytes) -> bool:
    return any(_LARGE <= abs(number) < math.inf for number in _Seen(content).numbers)


READ_HERE = (Difference("number out of range", _has_large_number),)
READ_THERE = (
    Difference("occurs twice", _has_key_twice),
    Difference("is a list, an object is needed", _has_list),
    Difference("dtype is {", _has_dtype_object),
    Difference("has 2^63 elements or more", _has_large_shape),
    Difference("at most 64 are allowed", _has_many_dimensions),
)
