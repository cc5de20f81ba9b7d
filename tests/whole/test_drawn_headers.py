"""Drawn headers of safetensors and GGUF: ftw answers as the packages that own the formats; other ones in each run."""

import re

import pytest
from gguf_builder import entry, gguf_bytes

from ftw.files import json_stream
from ftw.readers.gguf import header
from fuzz.headers.llama_cpp import refusal
from fuzz.headers.run import FORMATS, new_seed, run

SECONDS = 4
MOST = 3000


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_drawn_file_is_answered_as_by_other_code(checkpoint_format: str) -> None:
    seed = new_seed()
    count, findings = run(checkpoint_format, seed, seconds=SECONDS, most=MOST)
    assert count > 10
    assert not findings, f"from seed {seed} on:\n" + "\n".join(map(str, findings))


@pytest.mark.parametrize("checkpoint_format", FORMATS)
def test_seed_draws_the_same_file_again(checkpoint_format: str) -> None:
    assert run(checkpoint_format, 5, seconds=60, most=20) == (20, [])


@pytest.mark.parametrize(
    ("checkpoint_format", "seed", "module", "bound", "value", "problem"),
    [
        ("safetensors", 204, json_stream, "_MAX_PLAIN", 1 << 20, "the other reader alone refuses it: .*out of range"),
        ("gguf", 292, header, "_MAX_NAME_NBYTES", 64, "the other reader alone refuses it: tensor name is too long"),
        ("gguf", 110, header, "_MAX_NAME_NBYTES", 62, "ftw alone refuses it: .*its name is 63 bytes long"),
    ],
    ids=["number", "long-name", "name"],
)
def test_answer_that_differs_is_found(
    monkeypatch: pytest.MonkeyPatch,
    checkpoint_format: str,
    seed: int,
    module: object,
    bound: str,
    value: int,
    problem: str,
) -> None:
    assert run(checkpoint_format, seed, seconds=60, most=1) == (1, [])
    monkeypatch.setattr(module, bound, value)
    count, [finding] = run(checkpoint_format, seed, seconds=60, most=1)
    assert count == 1
    assert re.match(problem, finding.problem)


def test_rules_of_llama_cpp_are_those_of_its_names() -> None:
    assert refusal(gguf_bytes([entry("t" * 63)], bytes(32))) == ""
    assert refusal(gguf_bytes([entry("t" * 64)], bytes(32))) == "tensor name is too long"
