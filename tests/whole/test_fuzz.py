"""Broken checkpoints of all formats, by structure-aware mutations: equal results or `FtwError`, and nothing else."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import TESTS

from fuzz import looked_up, oracle
from fuzz.choosing import choose
from fuzz.seeds import FORMATS, seed_names

CORPUS = TESTS / "corpus"
RECIPES = [json.loads(line) for path in sorted(CORPUS.glob("*.jsonl")) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes a second alone may take twenty on a busy machine; a hang takes any time."""
    monkeypatch.setattr(oracle, "MAX_SECONDS", 300)


@pytest.mark.parametrize("name", seed_names(""))
def test_intact_seed_goes_all_the_way(name: str) -> None:
    assert oracle.run({"seed": name, "steps": []}).kind in ("eligible", "not eligible")


@pytest.mark.parametrize("checkpoint_format", FORMATS)
@settings(max_examples=200, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated_checkpoint_gives_equal_results_or_an_error(checkpoint_format: str, data: st.DataObject) -> None:
    recipe = choose(lambda count: data.draw(st.integers(0, count - 1)), checkpoint_format)
    oracle.run(recipe, level=data.draw(st.sampled_from((0, 2, 2, 3))))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe['seed']}-{recipe['outcome']}")
def test_recipe_that_fuzzing_found_ends_as_before(recipe: dict[str, Any]) -> None:
    assert oracle.run(recipe).kind == recipe["outcome"]


def test_oracle_tells_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = looked_up._rows
    monkeypatch.setattr(looked_up, "_rows", lambda table, contents: rows(table, contents).roll(1, 0))
    with pytest.raises(oracle.FindingError, match=r"row 0 is"):
        oracle.run({"seed": "gguf", "steps": []})


def test_oracle_tells_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "MAX_SECONDS", 0.01)
    monkeypatch.setattr(oracle, "check", lambda *_: [None for _ in iter(int, 1)])
    with pytest.raises(oracle.HangError):
        oracle.run({"seed": "gguf", "steps": []})
