"""Patterns of names: the same answers as Python's own matching, in a time that does not explode."""

import fnmatch
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftw.layouts.freetoken.patterns import PatternError, Patterns

NAMES = [
    *("lm_head", "model.lm_head", "lm_heads", "model.layers.3.mlp.gate", "model.layers.3.mlp.gate_proj"),
    *("visual.blocks.0.attn.qkv", "model.layers.12.mlp.experts.7.up_proj", "model.layers.12.self_attn.q_proj", ""),
]
EXPRESSIONS = [
    *(r".*lm_head", r".*mlp.gate$", r"visual.*", r".*\.experts\.\d+\..*", r".*self_attn.(q|k|v)_proj$", r"^lm_head$"),
    *(r"model\.layers\.(?:0|1|12)\.mlp.*", r"model\.layers\.[0-3]\..*", r".*layers\.\d{2}\.", r"(?P<all>.*)_proj\Z"),
    *(r"", r"\Amodel.+?gate", r".*[^a-z_]$", r"(a|b)*", r"(lm_head)?$", r"\w+\.\w+", r".*\.mlp\.(gate|up)_proj"),
]
PARTS = [
    *"ab.$^|",
    "(",
    ")",
    "*",
    "+",
    "?",
    "{2}",
    "{1,}",
    "{,2}",
    "[ab]",
    "[^a]",
    r"\.",
    r"\w",
    "(?:",
    "[]a]",
    "{",
    "{,}",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_of_releases_match_as_pythons_do(expression):
    patterns = Patterns([expression])
    found = [any(True for _ in patterns.iter_ends(name)) for name in NAMES]
    assert found == [re.match(expression, name) is not None for name in NAMES]


@settings(max_examples=600)
@given(st.lists(st.sampled_from(PARTS), max_size=9).map("".join), st.lists(st.text("ab.{", max_size=7), max_size=6))
def test_any_expression_matches_as_pythons_does_or_is_refused(expression, names):
    try:
        patterns = Patterns([expression])
    except PatternError:
        return
    for name in names:
        assert any(True for _ in patterns.iter_ends(name)) == (re.match(expression, name) is not None)


@settings(max_examples=400)
@given(
    st.lists(st.text("ab-.*?[]!", min_size=1, max_size=8), min_size=1, max_size=3),
    st.lists(st.text("ab.[]-!", max_size=7), max_size=6),
)
def test_wildcards_match_as_fnmatch_does(wildcards, names):
    patterns = Patterns(wildcards=wildcards)
    for name in names:
        wanted = [
            end
            for end in range(len(name) + 1)
            if any(fnmatch.fnmatchcase(name[:end], wildcard) for wildcard in wildcards)
        ]
        assert list(patterns.iter_ends(name)) == wanted


@pytest.mark.parametrize(
    "expression",
    [r"(a*)*b", r"(a|aa)+$", r"(.*.*.*.*)*x", r"a{1,200}a{1,200}b", r"((a?){30}a{30})+b", r".*.*.*.*.*.*=.*"],
)
def test_expression_that_python_would_need_ages_for_is_matched_at_once(expression):
    patterns = Patterns([expression])
    assert not any(True for _ in patterns.iter_ends("a" * 200 + "!"))


@pytest.mark.parametrize(
    ("expressions", "problem"),
    [
        (["("], r"'\(', which is no regular expression"),
        (["(?=a)b"], r"'\(\?=a\)b', which holds \(\?=a, which is not allowed"),
        ([r"(a)\1"], r"which holds \\1, which is not allowed"),
        ([r"a\b"], r"which holds \\b, which is not allowed"),
        (["(?i)a"], r"which holds \(\?i\), which is not allowed"),
        (["[[a]]"], r"which holds one of \[\["),
        (["a" * 1001], r"which has 1001 characters and 0 groups, at most 1000 and 30 are allowed"),
        (["(" * 31 + ")" * 31], r"which has 62 characters and 31 groups"),
        (["a{9999}b"], r"which and those before it take more than 10000 places"),
        (["a{99999999999999999999}"], r"which is no regular expression|which repeats a part more than 9999 times"),
        (["((a{900}){900}){900}"], r"which and those before it take more than 10000 places"),
        (["a" * 999] * 11, r"which and those before it take more than 10000 places"),
    ],
    ids="bracket lookahead reference boundary flags nested long groups times endless powers many".split(),
)
def test_expression_beyond_what_is_known_is_refused(expressions, problem):
    with pytest.raises(PatternError, match=problem):
        Patterns(expressions)


def test_patterns_that_take_too_many_steps_are_refused():
    patterns = Patterns([".{0,99}" * 40 + "x"])

    def match_many():
        for number in range(1_000_000):
            list(patterns.iter_ends(f"{number:0255b}"))

    with pytest.raises(PatternError, match=r"more than 2000000 steps"):
        match_many()
