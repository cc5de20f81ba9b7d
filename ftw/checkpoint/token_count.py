"""How many tokens a tokenizer has at least, by the ids of the tokens that were added to it.

    tokenizer.json           "added_tokens", near its beginning; the vocabulary, megabytes behind them, is not read
    tokenizer_config.json    "added_tokens_decoder", by id, where there is no tokenizer.json
    added_tokens.json        ids by token, likewise

Tokens are added behind the vocabulary, so the last of these ids is nearly always the tokenizer's last. Files that are
no JSON, or not what they should be, tell nothing: no weight depends on them.
"""

from __future__ import annotations

import io
from itertools import islice
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError
from ftw.files import JsonStream, is_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ftw.hub import Place

_WHOLE, _CONFIG, _ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
_START_NBYTES = 1 << 20  # of tokenizer.json; 256 added tokens, Llama 3's, take 45 KB
_MAX_ADDED = 1 << 20


def count_tokens(place: Place) -> int | None:
    """Return one more than the highest id of a token that was added; None if nothing tells of one.

    Raises:
        OSError: The disk fails, or the hub does.
    """
    try:
        return max(_ids(place), default=-1) + 1 or None
    except CheckpointError:
        return None


def _ids(place: Place) -> Iterator[int]:
    if place.has(_WHOLE):
        file = place.open_file(_WHOLE)
        start = bytearray(min(file.nbytes, _START_NBYTES))
        file.read_into(0, memoryview(start))
        yield from _counts(_added(JsonStream(io.BytesIO(start).read, file.path, "json")))
        return
    if place.has(_CONFIG):
        decoder = (place.read_json(_CONFIG) or {}).get("added_tokens_decoder")
        ids = decoder if isinstance(decoder, dict) else ()
        yield from (int(key) for key in islice(ids, _MAX_ADDED) if key.isdecimal() and len(key) < 10)
    if place.has(_ADDED):
        yield from _counts((place.read_json(_ADDED) or {}).values())


def _added(stream: JsonStream) -> Iterator[object]:
    """Yield the ids in "added_tokens", a list of objects."""
    for key in stream.iter_members():
        if key == "added_tokens" and stream.kind() == "a list":
            for _ in stream.iter_elements():
                token = stream.read_value()
                yield token.get("id") if isinstance(token, dict) else None
            return
        if key == "model":
            return
        stream.read_value()


def _counts(values: Iterable[object]) -> Iterator[int]:
    return (value for value in islice(values, _MAX_ADDED) if is_count(value))
