r"""Patterns: regular expressions and wildcards of a checkpoint's configuration, matched without going back.

Python's own matching of an expression from a file may take longer than anybody waits. Here all patterns become one
automaton, which reads a name once. What it has learned of a character in a state it keeps; to learn it takes steps,
and these are counted.

    . \d \w \s \D \W \S [...]        a character of some
    * + ? {2} {2,} {,3} {2,3}         the last part again and again, also with a ? behind, which changes nothing
    (...) (?:...) (?P<name>...) |     groups and choices
    ^ \A $ \Z                         begin and end; $ is no newline's place

Of wildcards, * is anything, ? a character, [...] and [!...] one of some.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import translate
from typing import TYPE_CHECKING

from ftw.files import short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

_MAX_LENGTH = 1000  # characters of a pattern
_MAX_GROUPS = 30  # opened in a pattern; the parser calls itself for each
_MAX_NODES = 10_000  # of all patterns
_MAX_DIGITS = 4  # of a number of times
_MAX_STEPS = 2_000_000  # of learning, a second's worth; patterns of releases take some thousand
_QUANTIFIER = re.compile(r"[*+?]|\{(?=[\d,]+\})(\d*)(,?)(\d*)\}", re.ASCII)
_CHARACTER_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
_GROUP = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))")
_WILDCARD = re.compile(r"\[(?:!|(?!!))(?:\](?=[^\]]*\])|(?!\]))[^\]]*\]|.", re.DOTALL)
_WARNED = ("[[", "[^[", "--", "&&", "~~", "||")  # of what Python warns, since it may mean something else one day


class PatternError(Exception):
    """A pattern cannot be used; the message goes on behind the pattern itself."""


@dataclass(slots=True)
class _Node:
    """A place in a pattern: a test that a character must pass, or an anchor, or neither; and where it goes on."""

    test: Callable[[str], object] | None = None
    anchor: str = ""
    nexts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _State:
    """Places that a name may have reached, of which each waits for a character.

    Attributes:
        nodes: These places.
        is_end: Whether a pattern ends here.
        is_end_of_name: Whether one does, if the name ends here.
        known: Where a character leads from here.
    """

    nodes: tuple[int, ...]
    is_end: bool
    is_end_of_name: bool
    known: dict[str, _State] = field(default_factory=dict)


class Patterns:
    """Regular expressions and wildcards, of which one must match from the first character of a name on.

    Raises:
        PatternError: One is no regular expression, or holds what this does not know, or they are too large.
    """

    def __init__(self, expressions: Iterable[str] = (), wildcards: Iterable[str] = ()) -> None:
        self._nodes = [_Node()]  # the end of all
        starts = [self._add(_add_expression, text) for text in expressions]
        starts += [self._add(_add_wildcards, text) for text in wildcards]
        self._steps = _MAX_STEPS
        self._states: dict[frozenset[int], _State] = {}
        self._first = self._close(starts, is_begin=True)

    def iter_ends(self, name: str) -> Iterator[int]:
        """Yield how many characters of a name each match takes, from the shortest to the longest.

        Raises:
            PatternError: The patterns take too many steps.
        """
        state = self._first
        for position, character in enumerate(name):
            if state.is_end:
                yield position
            if not state.nodes:
                return
            found = state.known.get(character)
            state = found if found is not None else self._learn(state, character)
        if state.is_end_of_name:
            yield len(name)

    def _add(self, add: Callable[[list[_Node], str], int], pattern: str) -> int:
        try:
            return add(self._nodes, pattern)
        except PatternError as error:
            raise PatternError(f"{short_repr(pattern)}, which {error}") from error

    def _learn(self, state: _State, character: str) -> _State:
        self._count(len(state.nodes))
        passed = [node for node in map(self._nodes.__getitem__, state.nodes) if node.test and node.test(character)]
        reached = frozenset(number for node in passed for number in node.nexts)
        if reached not in self._states:
            self._states[reached] = self._close(reached, is_begin=False)
        state.known[character] = self._states[reached]
        return self._states[reached]

    def _close(self, numbers: Collection[int], *, is_begin: bool) -> _State:
        """Return the state of all places that some lead to without a character."""
        inner = self._reach(numbers, {"^"} if is_begin else set())
        last = self._reach(numbers, {"^", "$"} if is_begin else {"$"})
        return _State(tuple(number for number in inner if self._nodes[number].test), 0 in inner, 0 in last)

    def _reach(self, numbers: Collection[int], anchors: set[str]) -> set[int]:
        reached: set[int] = set()
        pending = list(numbers)
        while pending:
            number = pending.pop()
            node = self._nodes[number]
            if number not in reached and (not node.anchor or node.anchor in anchors):
                reached.add(number)
                pending += node.nexts if node.test is None else ()
        self._count(len(reached) + len(numbers))
        return reached

    def _count(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise PatternError(f"patterns that take more than {_MAX_STEPS} steps to match")


def _checked(pattern: str) -> str:
    """Return a regular expression that Python, too, takes for one."""
    if len(pattern) > _MAX_LENGTH or pattern.count("(") > _MAX_GROUPS:
        problem = f"has {len(pattern)} characters and {pattern.count('(')} groups"
        raise PatternError(f"{problem}, at most {_MAX_LENGTH} and {_MAX_GROUPS} are allowed")
    if any(mark in pattern for mark in _WARNED):
        raise PatternError(f"holds one of {' '.join(_WARNED)}, which is not allowed")
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise PatternError(f"is no regular expression: {error}") from error
    return pattern


def _add_expression(nodes: list[_Node], pattern: str) -> int:
    """Return the node at which a regular expression begins."""
    return _Parser(nodes, _checked(pattern)).parse()


class _Parser:
    """Turns a regular expression that is known to be one into nodes, from its end to its begin."""

    def __init__(self, nodes: list[_Node], pattern: str) -> None:
        self._nodes = nodes
        self._pattern = pattern
        self._position = 0

    def parse(self) -> int:
        """Return the node at which the expression begins."""
        return self._choices()(0)

    def _choices(self) -> Callable[[int], int]:
        builds = [self._sequence()]
        while self._peek() == "|":
            self._position += 1
            builds.append(self._sequence())
        return lambda end: _add(self._nodes, _Node(nexts=[build(end) for build in builds]))

    def _sequence(self) -> Callable[[int], int]:
        builds: list[Callable[[int], int]] = []
        while self._peek() not in ("", "|", ")"):
            builds.append(self._repeated(self._part()))

        def build_all(end: int) -> int:
            for build in reversed(builds):
                end = build(end)
            return end

        return build_all

    def _repeated(self, build: Callable[[int], int]) -> Callable[[int], int]:
        found = _QUANTIFIER.match(self._pattern, self._position)
        if found is None:
            return build
        self._position = found.end()
        if self._peek() == "?":
            self._position += 1
        elif self._peek() == "+":
            raise PatternError("holds a + behind another sign of repetition, which is not allowed")
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[0], (0, None))
        if found[0][0] == "{":
            if max(len(found[1]), len(found[3])) > _MAX_DIGITS:
                raise PatternError(f"repeats a part more than {10**_MAX_DIGITS - 1} times, which is not allowed")
            least = int(found[1] or 0)
            most = int(found[3]) if found[3] else None if found[2] else least
        return lambda end: self._build_repeated(build, least, most, end)

    def _build_repeated(self, build: Callable[[int], int], least: int, most: int | None, end: int) -> int:
        if most is None:
            loop = _Node(nexts=[end])
            end = _add(self._nodes, loop)
            loop.nexts.append(build(end))
        else:
            for _ in range(most - least):
                end = _add(self._nodes, _Node(nexts=[end, build(end)]))
        for _ in range(least):
            end = build(end)
        return end

    def _part(self) -> Callable[[int], int]:
        group = _GROUP.match(self._pattern, self._position)
        if group is not None:
            self._position = group.end()
            build = self._choices()
            self._position += 1  # the bracket that closes it
            return build
        text = self._take()
        if text in ("^", r"\A", "$", r"\Z"):
            anchor = "^" if text in ("^", r"\A") else "$"
            return lambda end: _add(self._nodes, _Node(anchor=anchor, nexts=[end]))
        test = text.__eq__ if len(text) == 1 and text != "." else re.compile(text).fullmatch
        return lambda end: _add(self._nodes, _Node(test=test, nexts=[end]))

    def _take(self) -> str:
        """Return the text of what stands for one character, or of an anchor."""
        start, first = self._position, self._peek()
        bracket = _CHARACTER_CLASS.match(self._pattern, start)
        self._position = bracket.end() if bracket is not None else start + (2 if first == "\\" else 1)
        text = self._pattern[start : self._position]
        if first == "(" or (first == "\\" and text[1].isalnum() and text[1] not in "dwsDWSAZ"):
            raise PatternError(f"holds {self._pattern[start : start + 4]}, which is not allowed")
        return text

    def _peek(self) -> str:
        return self._pattern[self._position : self._position + 1]


def _add_wildcards(nodes: list[_Node], pattern: str) -> int:
    """Return the node at which a name with wildcards begins."""
    if len(pattern) > _MAX_LENGTH:
        raise PatternError(f"has {len(pattern)} characters, at most {_MAX_LENGTH} are allowed")
    end = 0
    for part in reversed(_WILDCARD.findall(pattern)):
        node = _Node(nexts=[end])
        end = _add(nodes, node)
        if part == "*":
            node.nexts.append(_add(nodes, _Node(test=bool, nexts=[end])))
        else:
            node.test = re.compile(translate(part)).match
    return end


def _add(nodes: list[_Node], node: _Node) -> int:
    if len(nodes) >= _MAX_NODES:
        raise PatternError(f"and those before it take more than {_MAX_NODES} places")
    nodes.append(node)
    return len(nodes) - 1
