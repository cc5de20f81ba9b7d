"""Heads of other parts than the table's, rests of heads, and classes that only look like ones without a head."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint

import ftw

TABLE = "model.embed_tokens.weight"
OWN = {"architectures": ["OwnForCausalLM"], "model_type": "own"}
SIDE_PARTS = """
    action_head assistant codec critic depth dflash draft drafter eagle ema encoder image_decoder local_transformer
    medusa.0 mimi model.mtp_layers.0 projector reward_model spec speech teacher text_encoder tts vision vocoder vq
    """.split()


def judge(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> tuple[bool, str, bool | None]:
    found = ftw.inspect(write_checkpoint(folder, {**llama_tensors(head=False), **tensors}, config)).verdict
    return found.token_embedding.eligible, found.token_embedding.reason, found.tied


@pytest.mark.parametrize("part", SIDE_PARTS)
def test_head_of_another_part_unties_nothing(tmp_path: Path, part: str) -> None:
    tensors = {f"{part}.lm_head.weight": torch.randn(64, 8)}
    for number, config in enumerate((OWN, {**OWN, "tie_word_embeddings": False}, llama_config())):
        assert judge(tmp_path / str(number), tensors, config)[:2] == (False, "tied")
    # Nor does it contradict a tie that is claimed.
    assert judge(tmp_path / "tied", tensors, llama_config(tie_word_embeddings=True)) == (False, "tied", True)


@pytest.mark.parametrize("part", ["language_model", "model.language_model", "thinker", "llm.model"])
def test_head_of_a_part_of_language_counts(tmp_path: Path, part: str) -> None:
    tensors = {f"{part}.lm_head.weight": torch.randn(64, 8)}
    assert judge(tmp_path, tensors, llama_config()) == (True, "ok", False)


def test_head_beside_its_table_counts_in_any_part(tmp_path: Path) -> None:
    tensors = {"net.model.embed_tokens.weight": torch.randn(64, 8), "net.lm_head.weight": torch.randn(64, 8)}
    report = ftw.inspect(write_checkpoint(tmp_path, tensors, llama_config()))
    assert (report.is_host_eligible, report.verdict.tied) == (True, False)


@pytest.mark.parametrize(
    ("suffix", "shape", "dtype"),
    [
        ("vocab_mask", (64,), torch.float32), ("token_ids", (64,), torch.int64), ("freqs", (64,), torch.float32),
        ("weight_g", (64, 1), torch.float32), ("weight_mask", (64, 8), torch.bool), ("prune_mask", (64, 8), torch.bool),
        ("weight.grad", (64, 8), torch.float32), ("ema", (64, 8), torch.float32), ("mult", (64, 1), torch.float32),
    ],
)  # fmt: skip
def test_what_lies_beside_a_weight_is_no_head(
    tmp_path: Path, suffix: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensors = {f"lm_head.{suffix}": torch.ones(shape, dtype=dtype)}
    for number, config in enumerate((OWN, {**OWN, "tie_word_embeddings": False}, llama_config())):
        assert judge(tmp_path / str(number), tensors, config)[:2] == (False, "tied")


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("LlavaLlamaModel", "llava"), ("FooCausalLMModel", "llama"), ("FooVLModel", "qwen2"), ("FooDecoder", "gpt2"),
     ("FooStack", "bert"), ("LlamaFooModel", "llama")],
)  # fmt: skip
def test_class_that_transformers_has_not_may_have_a_head(tmp_path: Path, name: str, model_type: str) -> None:
    config = llama_config(architectures=[name], model_type=model_type, tie_word_embeddings=True)
    tensors = {"embed_tokens.weight": torch.randn(64, 8), "norm.weight": torch.ones(8)}
    assert not ftw.inspect(write_checkpoint(tmp_path, tensors, config)).is_host_eligible


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaTextModel"])
def test_bare_class_of_a_family_has_none(tmp_path: Path, name: str) -> None:
    config = llama_config(architectures=[name], tie_word_embeddings=True)
    tensors = {"embed_tokens.weight": torch.randn(64, 8), "norm.weight": torch.ones(8)}
    assert ftw.inspect(write_checkpoint(tmp_path, tensors, config)).is_host_eligible


@pytest.mark.parametrize("rest", ["lm_head.bias", "lm_head.weight_scale", "cls.predictions.bias", "mtp.x", "visual.x"])
def test_rest_of_a_head_makes_no_classifier(tmp_path: Path, rest: str) -> None:
    config = llama_config(architectures=["LlamaForSequenceClassification"], tie_word_embeddings=True)
    assert judge(tmp_path / "rest", {rest: torch.ones(64)}, config) == (False, "tied", None)
    assert judge(tmp_path / "whole", {"score.weight": torch.ones(2, 8)}, config) == (True, "ok", False)
