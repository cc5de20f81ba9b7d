"""Sizes: how large the parts of a model are, from its configuration, as a family's row names and combines them.

    hidden              a size that the row defines, or else a key of the configuration
    a.b                 the key b in the part a
    2*heads*head        products and quotients, from the left to the right
    q+kv+kv             sums and differences of such
    q+kv~16             the sum, up to the next multiple of 16

A definition may have alternatives. `a|b` is b where a is missing, null or 0; `a?b` is b where a is null or 0.

A size is not known where a key is missing for which FreeToken has transformers fill in a default.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ftw.checkpoint import config_parts
from ftw.errors import CheckpointError
from ftw.files import short_repr

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftw.checkpoint import Checkpoint
    from ftw.layouts.families.family import Needs

_EXPRESSION = re.compile(r"[*/+~-]|^\d+$")
_MISSING = object()
_BLOCK = 128


class Size(NamedTuple):
    """A number, and the keys that it is made of with the values that they have."""

    value: int
    keys: Mapping[str, int]


class Sizes:
    """The sizes of a checkpoint's model, each worked out once.

    Attributes:
        file: The file that tells them.
        block: Rows and columns that share a scale in block-wise FP8, also a size of this name.

    Raises:
        CheckpointError: By `find`, a key is no count.
    """

    def __init__(self, checkpoint: Checkpoint, needs: Needs) -> None:
        self._source = checkpoint.source
        raw = checkpoint.config.raw
        whole = {**raw, **config_parts(raw)[0]}  # the text model's keys at the top
        self.block = _find_block(whole)
        self.file, self._config = ("config.json", whole) if needs.config is None else needs.config(checkpoint, whole)
        self._definitions = needs.sizes
        self._found: dict[str, Size | None] = {}

    def find(self, text: str) -> Size | None:
        """Return what an expression comes to, None if that is not known."""
        if text not in self._found:
            self._found[text] = self._evaluate(text)
        return self._found[text]

    def read(self, key: str) -> Any:
        """Return what stands under a key, which may lie in parts; None if it is missing."""
        found = self._look_up(key)
        return None if found is _MISSING else found

    def is_null(self, key: str) -> bool:
        """Tell whether null stands under a key."""
        return self._look_up(key) is None

    def _evaluate(self, text: str) -> Size | None:
        if text == "block":
            return Size(self.block, {})
        if text in self._definitions:
            return self._choose(self._definitions[text])
        if not _EXPRESSION.search(text):
            return self._choose(text)
        total, _, multiple = text.partition("~")
        keys: dict[str, int] = {}
        value = 0
        for sign, term in re.findall(r"([+-]?)([^+-]+)", total):
            found = self._multiply(term, keys)
            if found is None:
                return None
            value += -found if sign == "-" else found
        return Size(value + -value % int(multiple or 1), keys)

    def _multiply(self, term: str, keys: dict[str, int]) -> int | None:
        """Return a product, and note its keys."""
        product = 1
        for operator, factor in re.findall(r"([*/]?)([^*/]+)", term):
            found = Size(int(factor), {}) if factor.isdecimal() else self.find(factor)
            if found is None:
                return None
            keys.update(found.keys)
            if operator == "/" and not found.value:
                raise self._refuse(next(iter(found.keys), factor), 0)
            product = product // found.value if operator == "/" else product * found.value
        return product

    def _choose(self, definition: str) -> Size | None:
        """Return the first alternative that counts."""
        first, sign, others = re.fullmatch(r"([^|?]+)([|?]?)(.*)", definition).groups()  # type: ignore[union-attr]
        if first in self._definitions or _EXPRESSION.search(first):
            return self.find(first)
        found = self._look_up(first)
        if sign and (found is None or found == 0):
            return self._choose(others)
        if found is _MISSING:
            return self._choose(others) if sign == "|" else None
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise self._refuse(first, found)
        return Size(found, {first: found})

    def _look_up(self, key: str) -> Any:
        found: Any = self._config
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                return _MISSING
            found = found[part]
        return found

    def _refuse(self, key: str, found: object) -> CheckpointError:
        return CheckpointError(self._source, f"{self.file}: {key}", f"is {_show(found)}, a count is needed")


def _find_block(config: Mapping[str, Any]) -> int:
    declared = config.get("quantization_config")
    size = declared.get("weight_block_size") if isinstance(declared, dict) else None
    return size[0] if isinstance(size, list) and size and isinstance(size[0], int) and size[0] > 0 else _BLOCK


def _show(found: object) -> str:
    return "null" if found is None else short_repr(found)
