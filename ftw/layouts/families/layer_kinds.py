"""What each layer of a model is, from its configuration: how the rows of families read that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftw.checkpoint import config_parts
from ftw.errors import CheckpointError
from ftw.files import short_repr
from ftw.layouts.families.family import MOE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ftw.checkpoint import Checkpoint

DENSE = "dense"
MAX_LAYERS = 10_000  # a hundred times those of the deepest models; each costs some time and memory

Kinds = list[frozenset[str]]


class LayerConfig:
    """The keys of a configuration that tell of layers: those of the language model's own part count first.

    Raises:
        CheckpointError: By all methods, a key has another type than FreeToken reads.
    """

    def __init__(self, checkpoint: Checkpoint, *, raw: Mapping[str, Any] | None = None, name: str = "config.json"):
        self._source = checkpoint.source
        self._parts = config_parts(checkpoint.config.raw) if raw is None else (raw,)
        self._name = name

    def number(self, *keys: str, default: int | None = None) -> int:
        """Return a count of layers, `MAX_LAYERS` at most, under the first of some keys that is there."""
        found = self._find(keys)
        if found is None and default is not None:
            return default
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= MAX_LAYERS:
            raise self._error(keys, found, f"a count of at most {MAX_LAYERS}")
        return found

    def items(self, *keys: str, length: int | None = None) -> list[Any]:
        """Return a list of plain values under the first of some keys that is there, else an empty one.

        Args:
            keys: The keys.
            length: How many items it needs, if it is there.
        """
        found = self._find(keys)
        if found is None:
            return []
        if not isinstance(found, (list, str)) or len(found) < (length or 0):
            raise self._error(keys, found, "a list" if length is None else f"a list of {length}")
        if not all(item is None or isinstance(item, (int, float, str)) for item in found):
            raise self._error(keys, found, "a list of numbers or names")
        return list(found)

    def counts(self, *keys: str, length: int | None = None) -> list[int]:
        """Return a list of counts under the first of some keys that is there, else an empty one."""
        found = self.items(*keys, length=length)
        if not all(isinstance(item, int) and item >= 0 for item in found):
            raise self._error(keys, found, "a list of counts")
        return found

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Tell whether a key stands for true."""
        found = self._find((key,))
        return default if found is None else bool(found)

    def section(self, key: str) -> Mapping[str, Any]:
        """Return the part under a key, an empty one if there is none."""
        found = self._find((key,))
        return found if isinstance(found, dict) else {}

    def _find(self, keys: Iterable[str]) -> Any:
        found = (part[key] for key in keys for part in self._parts if part.get(key) is not None)
        return next(found, None)

    def _error(self, keys: Sequence[str], found: object, wanted: str) -> CheckpointError:
        stands = "is missing" if found is None else f"is {short_repr(found)}"
        return CheckpointError(self._source, f"{self._name}: {keys[0]}", f"{stands}, {wanted} is needed")


def dense_then_moe(num_layers: int, num_dense: int, *more: str) -> Kinds:
    """Return the kinds of dense layers and of those with experts behind them, and more kinds that all of them are."""
    return [frozenset({DENSE if layer < num_dense else MOE, *more}) for layer in range(num_layers)]


def all_moe(checkpoint: Checkpoint) -> Kinds:
    """Return the kinds of layers that all have experts."""
    return dense_then_moe(LayerConfig(checkpoint).number("num_hidden_layers"), 0)


def moe_if_any(checkpoint: Checkpoint) -> Kinds:
    """Return the kinds of layers that all have experts, or none has."""
    num_layers = LayerConfig(checkpoint).number("num_hidden_layers")
    return dense_then_moe(num_layers, 0 if checkpoint.config.num_experts else num_layers)


def name_layer_types(checkpoint: Checkpoint, num_layers: int, default: Callable[[int], str]) -> list[str]:
    """Return what `layer_types` says of each layer, or what is given where there is no list."""
    return LayerConfig(checkpoint).items("layer_types", length=num_layers) or [default(n) for n in range(num_layers)]


def add_kind(kinds: Kinds, kind: str, layers: Iterable[int]) -> Kinds:
    """Return kinds with one more for some layers."""
    chosen = set(layers)
    return [found | {kind} if layer in chosen else found for layer, found in enumerate(kinds)]
