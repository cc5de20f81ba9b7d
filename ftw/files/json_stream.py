"""JsonStream: JSON text taken one value at a time, so that what a header becomes is all that it costs.

A header of 100 MB may hold 33 million empty lists, which as Python objects take 2.4 GB. Here the text passes through a
window; objects and lists that a caller walks are never there as a whole, and a value that it reads is at most 1 MiB of
text, or, a string, 4 MiB; a key 64 Ki characters. What `ftw.files.strict_json` refuses is refused here. Numbers are
those of the safetensors library's parser: an integer that no double holds is refused, and -0 is a float.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any

from ftw.errors import CheckpointError
from ftw.files.strict_json import (
    LONG_INTEGER,
    MAX_DEPTH,
    NESTED,
    SURROGATE,
    describe_json_error,
    duplicate_key,
    is_shallow,
    is_unicode,
    json_type,
    make_decoder,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WINDOW_NBYTES = 256 << 10
MAX_VALUE = 1 << 20  # characters of one value; as Python objects they take up to 26 MiB
MAX_KEY = 64 << 10  # characters of a key, such as a tensor's name
MAX_STRING = 4 << 20  # of a string, which takes up to 4 bytes for each, here and in the window
_MAX_PLAIN = 308  # characters; a shorter value without a minus sign holds no number that needs a look
_SPACE = re.compile(r"[ \t\n\r]*")
# Most members by one pattern: what separates them, and a key without escapes.
_NEXT_KEY = re.compile(r'[ \t\n\r]*,[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*')
_TYPES = {"{": "an object", "[": "a list", '"': "a string"}


class JsonStream:
    """The text of one JSON object. Peak memory: a few windows, one value, and the keys of the objects being walked.

    Args:
        read: Returns the next bytes, at most as many as it is asked for; nothing at the end.
        path: The file, for errors.
        subject: The part of it, for errors.
    """

    def __init__(self, read: Callable[[int], bytes], path: Path, subject: str) -> None:
        self._read = read
        self._path = path
        self._subject = subject
        self._decode_bytes = codecs.getincrementaldecoder("utf-8")()
        self._decode = make_decoder(path, subject).raw_decode
        self._decode_numbers = make_decoder(path, subject, are_doubles=True).raw_decode
        self._text = ""
        self._at = 0
        self._start = 0  # of the window, in characters
        self._nbytes = 0  # that were read
        self._is_ended = False
        self._has_surrogates = False
        self._depth = 0  # of the objects and lists being walked

    @property
    def position(self) -> int:
        """Characters that were taken."""
        return self._start + self._at

    def kind(self) -> str:
        """Return "an object", "a list" or "a string", by the first character of the next value; or else nothing."""
        return _TYPES.get(self._peek(), "")

    def describe(self) -> str:
        """Return what the next value is, for a message; it is taken if it is none of the three.

        Raises:
            CheckpointError: It is not JSON.
        """
        return self.kind() or json_type(self.read_value())

    def iter_members(self) -> Iterator[str]:
        """Yield the keys of the object that comes next; the value of each has to be taken before the next key.

        Raises:
            CheckpointError: There is no object, or its text is refused.
        """
        if self._peek() != "{":
            raise self._error(f"holds {self.describe()}, an object is needed")
        self._at += 1
        self._depth += 1
        keys: set[str] = set()
        if self._take("}"):
            self._depth -= 1
            return
        key = self._read_key()
        while True:
            if len(key) > MAX_KEY:
                raise self._error(f"holds a key of more than {MAX_KEY} characters, before character {self.position}")
            if key in keys:
                raise self._error(duplicate_key(key))
            keys.add(key)
            yield key
            match = _NEXT_KEY.match(self._text, self._at)
            if match:
                key, self._at = match[1], match.end()
            elif self._take(","):
                key = self._read_key()
            elif self._take("}"):
                self._depth -= 1
                return
            else:
                raise self._syntax_error("expecting ',' delimiter")

    def iter_elements(self) -> Iterator[None]:
        """Yield for each element of the list that comes next, as `kind` said; each has to be taken.

        Raises:
            CheckpointError: Its text is refused.
        """
        self._peek()
        self._at += 1
        self._depth += 1
        if self._take("]"):
            self._depth -= 1
            return
        while True:
            yield
            if self._take("]"):
                self._depth -= 1
                return
            if not self._take(","):
                raise self._syntax_error("expecting ',' delimiter")

    def read_value(self) -> Any:
        """Take the next value.

        Raises:
            CheckpointError: Its text is refused, or too long.
        """
        return self._read_value(MAX_STRING if self._peek() == '"' else MAX_VALUE)

    def _read_value(self, limit: int) -> Any:
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at <= limit and self._fill():
                    continue
                if not self._is_ended and (error.pos >= len(self._text) - 8 or error.msg.startswith("Unterminated")):
                    raise self._too_long(limit) from None
                raise self._error(describe_json_error(error, self._start)) from error
            except RecursionError as error:
                raise self._error(NESTED) from error
            except CheckpointError:
                raise
            except ValueError as error:  # an integer of more than 4300 digits
                raise self._error(LONG_INTEGER) from error
            if end + 2 < len(self._text) or not self._fill():  # a number may go on in the next window: 1.|5, 1e+|5
                break
        if end - self._at > limit:  # whatever the window holds
            raise self._too_long(limit)
        if end - self._at > _MAX_PLAIN or self._text.find("-", self._at, end) >= 0:
            value, end = self._decode_numbers(self._text, self._at)
        # Brackets are counted first: 100,000 entries of a header are flat.
        opened = self._text.count("[", self._at, end) + self._text.count("{", self._at, end)
        if opened + self._depth > MAX_DEPTH and not is_shallow(value, self._depth):
            raise self._error(NESTED)
        if self._has_surrogates and not is_unicode(value):
            raise self._error("holds half a surrogate pair, which is not Unicode")
        self._at = end
        return value

    def finish(self) -> None:
        """Check that nothing follows.

        Raises:
            CheckpointError: Something does.
        """
        if self._peek():
            raise self._syntax_error("extra data")

    def _read_key(self) -> str:
        if self._peek() != '"':
            raise self._syntax_error("expecting a property name in double quotes")
        key: str = self._read_value(MAX_KEY + 2)  # with its quotes; escapes may make it shorter
        if not self._take(":"):
            raise self._syntax_error("expecting ':' delimiter")
        return key

    def _take(self, wanted: str) -> bool:
        """Take one character if it is the next one but for spaces, and the spaces in any case."""
        if self._peek() != wanted:
            return False
        self._at += 1
        return True

    def _peek(self) -> str:
        """Return the next character that is not a space; nothing at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # matches anything
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._fill():
                return ""

    def _fill(self) -> bool:
        """Drop what was taken and make the window longer, by as much as it holds; False at the end."""
        if self._is_ended:
            return False
        content = self._read(max(WINDOW_NBYTES, len(self._text) - self._at))
        self._is_ended = not content
        kept = len(self._decode_bytes.getstate()[0])
        try:
            new = self._decode_bytes.decode(content, final=self._is_ended)
        except UnicodeDecodeError as error:
            raise self._error(f"is not UTF-8 at byte {self._nbytes - kept + error.start}") from error
        if self._is_ended:
            return False
        self._nbytes += len(content)
        self._start += self._at
        self._text, self._at = self._text[self._at :] + new, 0
        self._has_surrogates = SURROGATE.search(self._text) is not None
        return True

    def _too_long(self, limit: int) -> CheckpointError:
        return self._error(f"holds more than {limit} characters in one value, at character {self.position}")

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(self._path, self._subject, problem)

    def _syntax_error(self, problem: str) -> CheckpointError:
        return self._error(f"is not JSON: {problem} at character {self.position}")
