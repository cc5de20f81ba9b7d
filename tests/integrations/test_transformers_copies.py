"""A folder with two copies of a model: transformers takes model.safetensors, and so does `load`, which says so."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ftw.integrations.transformers import close, load

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("has_shards", [True, False], ids=["both", "index-alone"])
def test_model_is_that_of_from_pretrained(tmp_path: Path, caplog: pytest.LogCaptureFixture, has_shards: bool) -> None:
    for seed, options in ((0, {"max_shard_size": "9KB"}), (1, {})):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))
        model.save_pretrained(tmp_path / str(seed), **options)
    folder = tmp_path / "1"
    for path in (tmp_path / "0").glob("model*"):
        if has_shards or path.name.endswith(".json"):
            path.rename(folder / path.name)
    expected = LlamaForCausalLM.from_pretrained(folder)
    with caplog.at_level(logging.WARNING, "ftw"):
        found = load(folder, device="cpu")
    ids = torch.arange(5)[None]
    assert torch.equal(found(ids).logits, expected(ids).logits)
    assert torch.equal(model(ids).logits, expected(ids).logits)
    difference = "they differ: " if has_shards else "which are not there"
    assert any(f"{folder}: model.safetensors is taken" in text and difference in text for text in caplog.messages)
    close(found)
