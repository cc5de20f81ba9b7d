"""How a quantization_config names modules: by name, with wildcards or by a regular expression, each tool in its way."""

from __future__ import annotations

import re
from fnmatch import translate
from typing import TYPE_CHECKING

from ftw.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from typing import TypeAlias

    IsNamed: TypeAlias = Callable[[str], bool]

_WILDCARDS = re.compile(r"[*?\[]")
_REGEX_MARK = "re:"
_ANY_LINEAR = "Linear"


def iter_above(module: str) -> Iterator[str]:
    """Yield a module's name, and those of the modules that it lies in."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def is_below(names: Collection[str]) -> IsNamed:
    """Return a test of whether a module is one of some, or lies in one; names may have wildcards."""
    plain = frozenset(name for name in names if not _WILDCARDS.search(name))
    patterns = [re.compile(translate(name)) for name in names if name not in plain]

    def is_named(module: str) -> bool:
        return any(above in plain or any(one.match(above) for one in patterns) for above in iter_above(module))

    return is_named


def holds_part(names: Iterable[str]) -> IsNamed:
    """Return a test of whether one of some names ends a part of a module's name, as transformers skips FP8 layers."""
    parts = [f"{name}." for name in names]
    return lambda module: any(part in f"{module}." for part in parts)


def is_target(source: str, names: Collection[str], *, takes_classes: bool) -> IsNamed:
    """Return a test of whether compressed-tensors means a module itself: what lies in one of the names is not meant.

    Raises:
        CheckpointError: A regular expression is none, or a class of layers is named that is not Linear.
    """
    plain = frozenset(name for name in names if not name.startswith(_REGEX_MARK)) - {_ANY_LINEAR}
    unknown = next((name for name in sorted(plain) if name[:1].isupper() and "." not in name), None)
    if takes_classes and unknown is not None:
        problem = f"names layers of the class {unknown}, FreeToken takes {_ANY_LINEAR}, names and {_REGEX_MARK}..."
        raise CheckpointError(source, "quantization_config", problem)
    patterns = [_compile(source, name[len(_REGEX_MARK) :]) for name in names if name.startswith(_REGEX_MARK)]
    means_all = takes_classes and _ANY_LINEAR in names
    return lambda module: means_all or module in plain or any(one.match(module) for one in patterns)


def _compile(source: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        problem = f"holds the regular expression {pattern!r}, which is none: {error}"
        raise CheckpointError(source, "quantization_config", problem) from error
