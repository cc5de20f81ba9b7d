"""Tie claims: under which name and in which part a configuration states the flag, and which part's flag counts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint

import ftw
from ftw.checkpoint.config import parse_model_config
from ftw.verdict.tie_claim import read_claim

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LFM2 = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"}
OMNI = {"architectures": ["Qwen2_5OmniForConditionalGeneration"], "model_type": "qwen2_5_omni"}
OWN = {"architectures": ["OwnForCausalLM"], "model_type": "own"}
TIE = "tie_word_embeddings"


def tensors(head: str) -> dict[str, torch.Tensor]:
    """Return a tiny model's tensors, with an LM head that is absent, equal to the table, or different from it."""
    made = llama_tensors(head=head != "absent")
    return made | {HEAD: made[TABLE].clone()} if head == "equal" else made


def judge(folder: Path, head: str, config: dict[str, Any] | None) -> ftw.Report:
    return ftw.inspect(write_checkpoint(folder, tensors(head), config))


def outcome(folder: Path, head: str, config: dict[str, Any] | None) -> tuple[str, bool | None]:
    report = judge(folder, head, config)
    assert report.is_host_eligible is (report.verdict.token_embedding.reason == "ok")
    return report.verdict.token_embedding.reason, report.verdict.tied


def omni(thinker: bool | None, text: bool | None, **more: Any) -> dict[str, Any]:
    """Return a Qwen-Omni's config with the flag of its thinker and that of the thinker's text model."""
    inner = {"model_type": "qwen2_5_omni_text", **({} if text is None else {TIE: text})}
    part = {"model_type": "qwen2_5_omni_thinker", "text_config": inner, **({} if thinker is None else {TIE: thinker})}
    return {**OMNI, "thinker_config": part, **more}


@pytest.mark.parametrize("model_type", ["lfm2", "lfm2_moe", "lfm2_vl"], ids=str)
@pytest.mark.parametrize(
    ("flags", "equal", "different"),
    [
        ({"tie_embedding": True, TIE: False}, ("tied", True), ("tie_conflict", None)),
        ({"tie_embedding": False, TIE: True}, ("ok", False), ("ok", False)),
        ({"tie_embedding": False}, ("ok", False), ("ok", False)),
        ({"tie_embedding": True}, ("tied", True), ("tie_conflict", None)),
        ({"tie_embedding": None, TIE: False}, ("ok", False), ("ok", False)),
        ({TIE: False}, ("ok", False), ("ok", False)),
        ({}, ("tied", True), ("tie_conflict", None)),
    ],
    ids=["true-over-false", "false-over-true", "false", "true", "null", "other-false", "absent"],
)
def test_flag_of_another_name_counts_first(
    tmp_path: Path, model_type: str, flags: dict[str, Any], equal: tuple[str, bool], different: tuple[str, Any]
) -> None:
    config = {**LFM2, "model_type": model_type, **flags}
    assert outcome(tmp_path / "equal", "equal", config) == equal
    assert outcome(tmp_path / "different", "different", config) == different
    assert outcome(tmp_path / "absent", "absent", config) == ("tied", True)


def test_flag_of_another_name_is_no_flag_of_a_family_that_does_not_read_it(tmp_path: Path) -> None:
    config = llama_config(tie_embedding=True, tie_word_embeddings=False)
    assert outcome(tmp_path, "different", config) == ("ok", False)


@pytest.mark.parametrize(
    ("config", "equal", "different"),
    [
        # As transformers 5 saves every one; transformers 4 reads the text part.
        (omni(thinker=False, text=True), ("tied", True), ("ok", False)),
        (omni(thinker=True, text=False), ("tied", True), ("tie_conflict", None)),
        (omni(thinker=True, text=None), ("tied", True), ("tie_conflict", None)),
        (omni(thinker=False, text=False), ("ok", False), ("ok", False)),
        (omni(thinker=None, text=False), ("ok", False), ("ok", False)),
        (omni(thinker=None, text=True), ("tied", True), ("tie_conflict", None)),
        (omni(thinker=False, text=False, tie_word_embeddings=True), ("ok", False), ("ok", False)),
        (omni(thinker=False, text=False, talker_config={TIE: True}), ("ok", False), ("ok", False)),
    ],
    ids="v5 thinker thinker-alone none text-false text-true top talker".split(),
)
def test_flag_of_the_part_that_has_the_head_counts(
    tmp_path: Path, config: dict[str, Any], equal: tuple[str, bool], different: tuple[str, Any]
) -> None:
    assert outcome(tmp_path / "equal", "equal", config) == equal
    assert outcome(tmp_path / "different", "different", config) == different


def test_evidence_names_the_part_by_its_path(tmp_path: Path) -> None:
    report = judge(tmp_path / "flags", "different", omni(thinker=False, text=True))
    assert report.verdict.tie_evidence == (
        "config:thinker_config.tie_word_embeddings=false",
        "config:thinker_config.text_config.tie_word_embeddings=true",
        "tensor:lm_head.weight",
    )
    words = "untied: config says thinker_config.tie_word_embeddings=false and lm_head.weight is stored"
    assert report.verdict.token_embedding.detail == words
    report = judge(tmp_path / "default", "absent", omni(thinker=None, text=None))
    assert report.verdict.tie_evidence[0] == "default:qwen2_5_omni_thinker tie_word_embeddings=false"
    report = judge(tmp_path / "lfm2", "different", {**LFM2, "tie_embedding": False, TIE: True})
    assert report.verdict.tie_evidence[0] == "config:tie_embedding=false"


@pytest.mark.parametrize(
    ("config", "v5"),
    [
        ({"model_type": "blip-2", "text_config": {"model_type": "t5", TIE: False}}, True),  # T5 always ties
        ({"model_type": "blip-2", "text_config": {"model_type": "opt", TIE: False}}, False),
        ({"model_type": "blip", TIE: False, "text_config": {"model_type": "blip_text_model", TIE: True}}, True),
        ({"model_type": "blip", TIE: False, "text_config": {"model_type": "blip_text_model", TIE: False}}, False),
        ({"model_type": "encoder-decoder", "decoder": {"model_type": "bert"}}, True),
        ({"model_type": "encoder-decoder", "decoder": {"model_type": "bert", TIE: False}}, False),
        ({"model_type": "vision-encoder-decoder", TIE: True, "decoder": {"model_type": "gpt2", TIE: False}}, False),
        ({"model_type": "speech-encoder-decoder", "decoder": {"model_type": "llama", TIE: True}}, True),
        ({"model_type": "vision-encoder-decoder", "decoder": {"model_type": "cpmant", TIE: True}}, False),
        ({"model_type": "rag", "generator": {"model_type": "bart", TIE: False}}, False),
        ({"model_type": "perception_lm", "text_config": {"model_type": "llama", TIE: True}}, True),
        ({"model_type": "perception_lm", TIE: False, "text_config": {"model_type": "llama", TIE: True}}, False),
        ({"model_type": "shieldgemma2", TIE: False, "text_config": {"model_type": "gemma3_text", TIE: True}}, True),
        ({"model_type": "encoder-decoder", "decoder": {"model_type": "rembert", TIE: True}}, False),
        ({"model_type": "csm", "tie_codebooks_embeddings": True, TIE: True}, False),
    ],
    ids="t5 opt blip-text blip decoder-default decoder-false decoder-over-top decoder-true decoder-no_effect "
    "rag perception perception-top shieldgemma decoder-never csm".split(),
)
def test_rule_of_a_part_is_that_of_its_family(config: dict[str, Any], v5: bool) -> None:
    assert read_claim(parse_model_config(config, Path("config.json"))).v5 is v5


@pytest.mark.parametrize(
    "path", ["lm_config", "llm_cfg", "vlm_config", "language_model", "model.llm", "config.backbone"], ids=str
)
@pytest.mark.parametrize("base", [OWN, {"architectures": ["OwnForCausalLM"]}], ids=["unknown", "no-type"])
def test_flag_in_any_part_that_may_have_the_head_is_evidence(tmp_path: Path, path: str, base: dict[str, Any]) -> None:
    def at(flag: bool) -> dict[str, Any]:
        part: dict[str, Any] = {TIE: flag}
        for key in reversed(path.split(".")):
            part = {key: part}
        return {**base, **part}

    assert outcome(tmp_path / "true", "different", at(flag=True)) == ("tie_conflict", None)
    assert outcome(tmp_path / "equal", "equal", at(flag=True)) == ("tied", True)
    assert outcome(tmp_path / "false", "different", at(flag=False)) == ("ok", False)
    report = judge(tmp_path / "evidence", "different", at(flag=True))
    assert report.verdict.tie_evidence[0] == f"config:{path}.tie_word_embeddings=true"
    with pytest.raises(ftw.CheckpointError) as caught:
        parse_model_config({path: {TIE: "true"}}, Path("config.json"))
    assert caught.value.subject == f"{path}.tie_word_embeddings"


@pytest.mark.parametrize(
    "key", "vision_config vision_tower_cfg audio_config qformer_config text_encoder encoder talker_config".split()
)
def test_flag_in_a_part_without_the_head_is_none(tmp_path: Path, key: str) -> None:
    assert outcome(tmp_path, "different", {**OWN, key: {TIE: True}}) == ("ok", False)
    assert parse_model_config({key: {TIE: "true"}}, Path("config.json")).text_tie_flag is None


def test_flag_beside_the_text_part_of_a_known_family_is_evidence(tmp_path: Path) -> None:
    llava = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    config = {**llava, "text_config": {"model_type": "llama"}, "lm_config": {TIE: True}}
    assert outcome(tmp_path / "true", "different", config) == ("tie_conflict", None)
    config["text_config"] = {"model_type": "llama", TIE: False}
    assert outcome(tmp_path / "false", "different", config) == ("ok", False)


def test_parts_of_a_hostile_config_are_bounded() -> None:
    many = {f"part{number}": {TIE: True} for number in range(300)}
    with pytest.raises(ftw.CheckpointError, match="more than 256 parts"):
        parse_model_config(many, Path("config.json"))
    long: dict[str, Any] = {TIE: True}
    for _ in range(100):
        long = {"k" * 60: long}
    assert len(parse_model_config({"x" * 1_000_000: {TIE: True}, **long}, Path("config.json")).parts) == 1


def test_default_is_not_told_as_what_the_config_says(tmp_path: Path) -> None:
    silent = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    detail = judge(tmp_path / "equal", "equal", silent).verdict.token_embedding.detail
    assert detail == (
        "untied: config has no tie_word_embeddings, and false is the default of llama, though lm_head.weight holds the "
        "same bytes"
    )
    detail = judge(tmp_path / "different", "different", silent).verdict.token_embedding.detail
    assert "config says" not in detail
    kimi = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
    detail = judge(tmp_path / "kimi", "different", kimi).verdict.token_embedding.detail
    assert detail == "untied: kimi_linear does not tie by tie_word_embeddings and lm_head.weight is stored"


def test_config_that_is_not_read_frees_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, tensors("different"), llama_config(tie_word_embeddings=True))
    (folder / "config.json").rename(tmp_path / "elsewhere.json")
    (folder / "config.json").symlink_to(tmp_path / "elsewhere.json")
    report = ftw.inspect(folder)
    assert (report.verdict.token_embedding.reason, report.verdict.tied) == ("tied", None)
    assert report.verdict.token_embedding.detail == (
        "lm_head.weight is stored with other bytes, but config.json, which may claim a tie, is not read"
    )
    (folder / "config.json").unlink()
    assert ftw.inspect(folder).is_host_eligible  # without any config.json the tensors are the evidence


@pytest.mark.parametrize(
    ("model_type", "name", "flag", "words"),
    [
        (
            "bart",
            "BartModel",
            None,
            "as an LM class of transformers, vLLM or llama.cpp's converter, gives it a head",
        ),
        ("bloom", "BloomModel", True, "all the same, as an LM class of transformers, vLLM or llama.cpp's converter"),
        (
            "llama",
            "LlamaModel",
            False,
            "for a language model all the same, as llama.cpp's converter, gives it a head that",
        ),
        ("llama", "LlamaModel", True, "gives it a head that is embed_tokens.weight"),
        ("clip", "CLIPModel", None, None),
        ("llama", "LlamaForSequenceClassification", True, None),
        ("llama", "LlamaForCausalLM", False, None),
    ],
    ids="bart bloom llama-false llama-true clip classifier lm".split(),
)
def test_base_model_of_language_models_is_warned_of(
    tmp_path: Path, model_type: str, name: str, flag: bool | None, words: str | None
) -> None:
    config = llama_config(architectures=[name], model_type=model_type, tie_word_embeddings=flag)
    stored = {tensor.removeprefix("model."): data for tensor, data in tensors("absent").items()}
    report = ftw.inspect(write_checkpoint(tmp_path, stored | {"score.weight": torch.ones(2, 8)}, config))
    assert report.is_host_eligible is (name != "LlamaForCausalLM")
    assert bool(report.verdict.warnings) is (words is not None)
    assert all(words in warning for warning in report.verdict.warnings if words)


def test_base_model_beside_a_head_is_not_warned_of(tmp_path: Path) -> None:
    config = llama_config(architectures=["LlamaModel"], tie_word_embeddings=False)
    assert judge(tmp_path, "different", config).verdict.warnings == ()


@pytest.mark.parametrize("head", ["absent", "different", "equal"], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "csm", "tie_codebooks_embeddings": True},
        {"model_type": "qwen2_5_omni_talker"},
        {"model_type": "vision-encoder-decoder", "decoder": {"model_type": "rembert", TIE: True}},
    ],
    ids=["csm", "talker", "decoder"],
)
def test_family_that_never_ties_has_a_free_table(tmp_path: Path, head: str, config: dict[str, Any]) -> None:
    config = {"architectures": ["OwnForCausalLM"], TIE: True, **config}
    assert outcome(tmp_path, head, config) == ("ok", False)
