"""Ties: the table in ftw/tie.py, row by row, and the families that read their flag in a way of their own."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint

import ftw
from ftw.checkpoint.config import parse_model_config
from ftw.verdict.tie_claim import read_claim

TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FLAGS = list(product((None, True, False), repeat=2))
LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def judge(folder: Path, head: str, config: dict[str, Any] | None) -> tuple[str, bool | None]:
    """Return the reason and the tie for a checkpoint whose head is absent, equal, different, or alone."""
    report = ftw.inspect(write_checkpoint(folder, _tensors(head), config))
    [table] = report.verdict.tables
    assert table.eligible is (table.reason == "ok")
    assert report.is_host_eligible is table.eligible
    assert table.detail
    return table.reason, report.verdict.tied


def _tensors(head: str) -> dict[str, torch.Tensor]:
    tensors = llama_tensors(head=head != "absent")
    if head == "equal":
        tensors[HEAD] = tensors[TABLE].clone()
    elif head == "alone":
        del tensors[TABLE]
    return tensors


def flagged(top: bool | None, base: dict[str, Any] = LLAMA, *, text: Any = ...) -> dict[str, Any]:
    """Return a config with the flag at the top level, and with a language model's part unless `text` is left out."""
    config = dict(base) if top is None else {**base, "tie_word_embeddings": top}
    if text is not ...:
        config["text_config"] = {"model_type": "llama"} if text is None else {"tie_word_embeddings": text}
        config["text_config"]["model_type"] = "llama"
    return config


@pytest.mark.parametrize("text", [..., None, True, False], ids=["flat", "text-absent", "text-true", "text-false"])
@pytest.mark.parametrize("top", [None, True, False], ids=["absent", "true", "false"])
def test_absent_head_is_a_tie_whatever_the_flag_claims(tmp_path: Path, top: bool | None, text: Any) -> None:
    base = LLAMA if text is ... else LLAVA
    assert judge(tmp_path, "absent", flagged(top, base, text=text)) == ("tied", True)


@pytest.mark.parametrize(
    ("top", "text", "expected"),
    [
        (True, ..., ("tied", True)),
        (False, ..., ("ok", False)),
        (None, ..., ("ok", False)),
        (True, None, ("tied", True)),
        (True, False, ("tied", True)),
        (False, None, ("ok", False)),
        (False, False, ("ok", False)),
        (None, True, ("tied", True)),
        (None, False, ("ok", False)),
        (False, True, ("tied", True)),
    ],
    ids=str,
)
def test_equal_head_is_a_tie_where_the_flag_claims_one(
    tmp_path: Path, top: bool | None, text: Any, expected: tuple[str, bool]
) -> None:
    assert judge(tmp_path, "equal", flagged(top, LLAMA if text is ... else LLAVA, text=text)) == expected


@pytest.mark.parametrize(
    ("top", "text", "expected"),
    [
        (True, ..., ("tie_conflict", None)),
        (False, ..., ("ok", False)),
        (None, ..., ("ok", False)),
        (True, None, ("tie_conflict", None)),
        (True, False, ("tie_conflict", None)),
        (False, None, ("ok", False)),
        (False, False, ("ok", False)),
        (None, True, ("tie_conflict", None)),
        (None, False, ("ok", False)),
        (False, True, ("tie_conflict", None)),  # Llava reads either
    ],
    ids=str,
)
def test_different_head_contradicts_a_flag_that_claims_a_tie(
    tmp_path: Path, top: bool | None, text: Any, expected: tuple[str, bool | None]
) -> None:
    assert judge(tmp_path, "different", flagged(top, LLAMA if text is ... else LLAVA, text=text)) == expected


@pytest.mark.parametrize(
    ("head", "expected"),
    [("absent", ("tied", None)), ("equal", ("tied", True)), ("different", ("ok", None))],
    ids=["absent", "equal", "different"],
)
def test_without_config_nothing_is_called_untied(tmp_path: Path, head: str, expected: tuple[str, bool | None]) -> None:
    assert judge(tmp_path, head, None) == expected


def test_absent_head_without_architecture_may_be_a_tie(tmp_path: Path) -> None:
    assert judge(tmp_path, "absent", {"model_type": "llama"}) == ("tied", None)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Tied by default in transformers 4 and 5.
        (flagged(None, {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}), ("tie_conflict", None)),
        (flagged(False, {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}), ("ok", False)),
        # Mistral-Small-3.1 as published: no flag, tied by transformers 5's default and not by 4's.
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
                "text_config": {"model_type": "mistral"},
            },
            ("ok", False),
        ),
        # Gemma 3, untied and saved by transformers 5, which leaves the old flag in the text part.
        (
            {
                "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                "tie_word_embeddings": False, "text_config": {"model_type": "gemma3_text", "tie_word_embeddings": True},
            },
            ("ok", False),
        ),
        (
            {
                "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                "text_config": {"model_type": "gemma3_text"},
            },
            ("tie_conflict", None),
        ),
        # In a T5, false says that the head is a weight of its own, and true is a plain claim.
        (flagged(False, {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}), ("ok", False)),
        (flagged(True, {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}), ("tie_conflict", None)),
        (flagged(None, {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}), ("tie_conflict", None)),
        # Blip-2 and Llama 4 read the text part alone.
        (flagged(True, {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}, text=False),
         ("ok", False)),
        (flagged(False, {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}, text=True),
         ("tie_conflict", None)),
        # transformers 5 has no effect of the flag here, 4 has.
        (flagged(True, {"architectures": ["RemBertForMaskedLM"], "model_type": "rembert"}), ("ok", False)),
        (flagged(None, {"architectures": ["LukeForMaskedLM"], "model_type": "luke"}), ("ok", False)),
        # Remote code, of which nothing is known.
        (flagged(None, {"architectures": ["OwnForCausalLM"], "model_type": "own"}), ("ok", False)),
        (flagged(True, {"architectures": ["OwnForCausalLM"], "model_type": "own"}), ("tie_conflict", None)),
    ],
    ids="gpt2 gpt2-false mistral3 gemma3-untied gemma3 t5-false t5-true t5 llama4-top llama4-text rembert luke own "
    "own-true".split(),
)  # fmt: skip
def test_different_head_of_a_family(tmp_path: Path, config: dict[str, Any], expected: tuple[str, bool | None]) -> None:
    assert judge(tmp_path, "different", config) == expected


@pytest.mark.parametrize(
    ("model_type", "top", "text", "v5", "v4"),
    [
        # The matrix of transformers 5.24.0: absent, true and false at the top, absent, true and false in the text part.
        ("gpt2", None, ..., True, True),
        ("llama", None, ..., False, False),
        ("t5", False, ..., True, False),
        ("kimi_linear", True, ..., False, True),
        *[("qwen3_vl", top, text, top is True, text is True) for top, text in FLAGS],
        *[("gemma3", top, text, top is not False, text is True) for top, text in FLAGS],
        *[("llava", top, text, True in (top, text), text is True) for top, text in FLAGS],
        *[("llama4", top, text, text is True, text is True) for top, text in FLAGS],
        ("own", None, ..., False, True),
        (None, None, ..., False, True),
    ],
    ids=str,
)  # fmt: skip
def test_claim_follows_the_family(model_type: str | None, top: Any, text: Any, v5: bool, v4: bool) -> None:
    config = flagged(top, {"model_type": model_type} if model_type else {}, text=text)
    claim = read_claim(parse_model_config(config, Path("config.json")))
    assert (claim.v5, claim.v4) == (v5, v4)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (llama_config(tie_word_embeddings=True), [(HEAD, "tied")]),
        (llama_config(tie_word_embeddings=False), [("", "no_table")]),
        (None, [("", "no_table")]),
    ],
    ids=["true", "false", "no-config"],
)
def test_head_alone_is_the_tied_table(
    tmp_path: Path, config: dict[str, Any] | None, expected: list[tuple[str, str]]
) -> None:
    report = ftw.inspect(write_checkpoint(tmp_path, _tensors("alone"), config))
    assert [(table.name, table.reason) for table in report.verdict.tables] == expected
    assert not report.is_host_eligible


@pytest.mark.parametrize("head", ["absent", "equal", "different"], ids=str)
@pytest.mark.parametrize("architecture", ["LlamaModel", "LlamaForSequenceClassification"], ids=str)
def test_class_without_head_is_not_tied_by_its_flag(tmp_path: Path, head: str, architecture: str) -> None:
    config = llama_config(architectures=[architecture], tie_word_embeddings=True)
    report = ftw.inspect(write_checkpoint(tmp_path, _of_class(architecture, _tensors(head)), config))
    expected = {"absent": ("ok", False), "equal": ("tied", True), "different": ("tie_conflict", None)}
    assert (report.verdict.token_embedding.reason, report.verdict.tied) == expected[head]


def _of_class(architecture: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name a Llama's tensors as a class without LM head does."""
    if architecture == "LlamaModel":
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return {**tensors, "score.weight": torch.ones(2, 8, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("architectures", "detail"),
    [
        (["LlamaModel"], "LlamaModel has no LM head, but its table is called model.embed_tokens, as in a class"),
        (["LlamaForSequenceClassification"], "has no LM head, but all tensors are model.…, as in a class that has one"),
        (["LlamaModel", "LlamaForSequenceClassification"], "LlamaModel has no LM head, but its table is called"),
    ],
    ids=["base", "classifier", "both"],
)
@pytest.mark.parametrize("tie", [True, False], ids=["true", "false"])
def test_class_without_head_over_names_of_one_with_a_head_is_not_known(
    tmp_path: Path, architectures: list[str], detail: str, tie: bool
) -> None:
    config = llama_config(architectures=architectures, tie_word_embeddings=tie)
    report = ftw.inspect(write_checkpoint(tmp_path, _tensors("absent"), config))
    assert (report.verdict.token_embedding.reason, report.verdict.tied) == ("tied", None)
    assert detail in report.verdict.token_embedding.detail


@pytest.mark.parametrize("names", [["LlamaForCausalLM", "LlamaModel"], ["LlamaModel", "LlamaForCausalLM"]], ids=str)
def test_every_architecture_counts(tmp_path: Path, names: list[str]) -> None:
    config = llama_config(architectures=names, tie_word_embeddings=True)
    report = ftw.inspect(write_checkpoint(tmp_path, _of_class("LlamaModel", _tensors("absent")), config))
    assert report.verdict.tied is True
    assert report.verdict.token_embedding.detail == (
        "tied to the LM head: LlamaForCausalLM has one, and none is stored"
    )


@pytest.mark.parametrize(("flag", "tied"), [(None, None), (False, None), (True, True)], ids=["absent", "false", "true"])
def test_absent_head_of_an_unknown_class_is_a_tie_where_a_flag_says_so(
    tmp_path: Path, flag: bool | None, tied: bool | None
) -> None:
    config = flagged(flag, {"architectures": ["OwnForCausalLM"], "model_type": "own"})
    report = ftw.inspect(write_checkpoint(tmp_path, _tensors("absent"), config))
    assert (report.verdict.token_embedding.reason, report.verdict.tied) == ("tied", tied)
    is_known = "no LM head is stored, and whether OwnForCausalLM has one is not known"
    assert (report.verdict.token_embedding.detail == is_known) is (tied is None)


def test_second_head_that_is_a_copy_of_the_table_is_a_tie(tmp_path: Path) -> None:
    tensors = {"decoder.lm_head.weight": llama_tensors()[HEAD], **_tensors("equal")}
    report = ftw.inspect(write_checkpoint(tmp_path, tensors, llama_config(tie_word_embeddings=True)))
    assert [table.reason for table in report.verdict.tables] == ["tied"]


@pytest.mark.parametrize("name", ["cls.weight", "head.weight", "output.weight"], ids=str)
def test_small_head_of_another_kind_does_not_pass_for_the_lm_head(tmp_path: Path, name: str) -> None:
    tensors = {**_tensors("absent"), name: torch.ones(2, 8, dtype=torch.bfloat16)}
    own = {"architectures": ["OwnForCausalLM"], "model_type": "own"}
    assert [table.reason for table in ftw.inspect(write_checkpoint(tmp_path, tensors, own)).verdict.tables] == ["tied"]
    tensors |= {HEAD: _tensors("different")[HEAD]}
    assert ftw.inspect(write_checkpoint(tmp_path, tensors, own)).is_host_eligible


@pytest.mark.parametrize("suffix", ["qweight", "weight_packed", "luts"], ids=str)
@pytest.mark.parametrize("top", [False, None], ids=["false", "absent"])
def test_quantised_head_is_a_head_of_its_own(tmp_path: Path, suffix: str, top: bool | None) -> None:
    tensors = {**_tensors("absent"), f"lm_head.{suffix}": torch.ones(8, 8, dtype=torch.int32)}
    report = ftw.inspect(write_checkpoint(tmp_path, tensors, flagged(top)))
    assert [(table.name, table.reason) for table in report.verdict.tables] == [(TABLE, "ok")]


def test_bias_alone_is_no_head(tmp_path: Path) -> None:
    tensors = {**_tensors("absent"), "lm_head.bias": torch.ones(64, dtype=torch.bfloat16)}
    report = ftw.inspect(write_checkpoint(tmp_path, tensors, llama_config()))
    assert [table.reason for table in report.verdict.tables] == ["tied"]


def test_evidence_names_flag_head_and_bytes(tmp_path: Path) -> None:
    untied = ftw.inspect(write_checkpoint(tmp_path / "untied", _tensors("different"), llama_config()))
    assert untied.verdict.tie_evidence == ("config:tie_word_embeddings=false", "tensor:lm_head.weight")
    assert untied.verdict.tables[0].detail == (
        "untied: config says tie_word_embeddings=false and lm_head.weight is stored"
    )
    tied = ftw.inspect(write_checkpoint(tmp_path / "tied", _tensors("equal"), llama_config(tie_word_embeddings=True)))
    assert tied.verdict.tie_evidence == ("config:tie_word_embeddings=true", "tensor:lm_head.weight", "bytes:equal")
    default = ftw.inspect(write_checkpoint(tmp_path / "default", _tensors("absent"), flagged(None)))
    assert default.verdict.tie_evidence == ("default:llama tie_word_embeddings=false", "no LM head stored")
    text = ftw.inspect(write_checkpoint(tmp_path / "text", _tensors("absent"), flagged(None, LLAVA, text=True)))
    assert text.verdict.tie_evidence[0] == "config:text_config.tie_word_embeddings=true"


def test_difference_in_the_last_byte_is_a_difference(tmp_path: Path) -> None:
    table = torch.zeros(64, 4096, dtype=torch.bfloat16)
    head = table.clone()
    head[-1, -1] = 1
    folder = write_checkpoint(tmp_path, {TABLE: table, HEAD: head}, llama_config(tie_word_embeddings=True))
    assert ftw.inspect(folder).verdict.tables[0].reason == "tie_conflict"
