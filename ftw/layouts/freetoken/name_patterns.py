"""How a quantization_config names modules: by name, with wildcards or by a regular expression, each tool in its way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.errors import CheckpointError
from ftw.files import short_repr
from ftw.layouts.freetoken.patterns import PatternError, Patterns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from typing import TypeAlias

    IsNamed: TypeAlias = Callable[[str], bool]

_WILDCARDS = frozenset("*?[")
_REGEX_MARK = "re:"
_ANY_LINEAR = "Linear"


def iter_above(module: str) -> Iterator[str]:
    """Yield a module's name, and those of the modules that it lies in."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def is_below(source: str, names: Collection[str]) -> IsNamed:
    """Return a test of whether a module is one of some, or lies in one; names may have wildcards.

    Raises:
        CheckpointError: One with wildcards is too long; by the test, too, they are too many.
    """
    plain = frozenset(name for name in names if not _WILDCARDS & set(name))
    iter_ends = _find_ends(source, wildcards=[name for name in names if name not in plain])

    def is_named(module: str) -> bool:
        if any(above in plain for above in iter_above(module)):
            return True
        return any(end == len(module) or module[end] == "." for end in iter_ends(module) if end)

    return is_named


def holds_part(names: Iterable[str]) -> IsNamed:
    """Return a test of whether one of some names ends a part of a module's name, as transformers skips FP8 layers."""
    wanted = frozenset(names)
    lengths = {len(name) for name in wanted}

    def is_held(module: str) -> bool:
        ends = [place for place, character in enumerate(f"{module}.") if character == "."]
        return any(module[end - length : end] in wanted for end in ends for length in lengths if length <= end)

    return is_held


def is_target(source: str, names: Collection[str], *, takes_classes: bool) -> IsNamed:
    """Return a test of whether compressed-tensors means a module itself: what lies in one of the names is not meant.

    Raises:
        CheckpointError: A regular expression is none, or holds what ftw does not match, or a class of layers is named
            that is not Linear; by the test, the expressions take too long.
    """
    plain = frozenset(name for name in names if not name.startswith(_REGEX_MARK)) - {_ANY_LINEAR}
    unknown = next((name for name in sorted(plain) if name[:1].isupper() and "." not in name), None)
    if takes_classes and unknown is not None:
        named = f"names layers of the class {short_repr(unknown)[1:-1]}"
        problem = f"{named}, FreeToken takes {_ANY_LINEAR}, names and {_REGEX_MARK}..."
        raise CheckpointError(source, "quantization_config", problem)
    expressions = [name[len(_REGEX_MARK) :] for name in names if name.startswith(_REGEX_MARK)]
    iter_ends = _find_ends(source, expressions=expressions)
    means_all = takes_classes and _ANY_LINEAR in names
    return lambda module: means_all or module in plain or any(True for _ in iter_ends(module))


def _find_ends(
    source: str, *, expressions: Collection[str] = (), wildcards: Collection[str] = ()
) -> Callable[[str], list[int]]:
    """Return a function that tells where matches of some patterns end in a name."""
    try:
        patterns = Patterns(expressions, wildcards)
    except PatternError as error:
        raise CheckpointError(source, "quantization_config", f"holds {error}") from error

    def find_ends(module: str) -> list[int]:
        try:
            return list(patterns.iter_ends(module))
        except PatternError as error:
            raise CheckpointError(source, "quantization_config", f"holds {error}") from error

    return find_ends
