"""A config.json that contradicts itself is a warning, and no figure is computed of it."""

import re
from pathlib import Path
from typing import Any

import pytest
from builders import llama_config, llama_tensors, write_checkpoint

import ftw
from ftw.checkpoint.contradictions import HEADS_DIVIDE, find_contradictions, find_gguf_contradictions

HEADS = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "layer-types": (
        {"num_hidden_layers": 48, "layer_types": ["full_attention"] * 4},
        "num_hidden_layers is 48, but layer_types has 4 entries",
    ),
    "mlp-layer-types": (
        {"num_hidden_layers": 2, "mlp_layer_types": ["dense"] * 3},
        "num_hidden_layers is 2, but mlp_layer_types has 3 entries",
    ),
    "heads": ({**HEADS, "num_attention_heads": 7, "num_key_value_heads": 7}, "no multiple of 7 attention heads"),
    "heads-llama": (
        {**HEADS, "model_type": "llama", "num_attention_heads": 6, "head_dim": 16}, "no multiple of 6 attention heads",
    ),
    "kv-heads": ({**HEADS, "num_key_value_heads": 3}, "8 attention heads cannot share 3 key and value heads evenly"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS, ids=str)
def test_contradiction_is_named(case: str) -> None:
    config, words = CONFIGS[case]
    [found] = find_contradictions(config)
    assert words in found


@pytest.mark.parametrize(
    "config",
    [{}, HEADS, {**HEADS, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
     {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, {"num_hidden_layers": "2", "layer_types": []},
     {"layer_types": ["full_attention"]},
     {**HEADS, "num_attention_heads": 6, "num_key_value_heads": 6, "kv_lora_rank": 16}],
    ids=["empty", "plain", "head-dim", "layers", "no-number", "no-layers", "mla"],
)  # fmt: skip
def test_what_can_be_true_is_no_contradiction(config: dict[str, Any]) -> None:
    assert find_contradictions(config) == ()


def test_contradiction_is_a_warning_and_leaves_the_figure_out(tmp_path: Path) -> None:
    layers = ["full_attention"] * 4
    config = llama_config(num_hidden_layers=48, layer_types=layers)
    report = ftw.inspect(write_checkpoint(tmp_path, llama_tensors(), config), vram_bytes=1 << 30)
    assert report.verdict.warnings == (
        "config.json: num_hidden_layers is 48, but layer_types has 4 entries; the KV cache is not counted",
    )
    assert (report.gain.kv_tokens, report.gain.kv_bytes_per_token) == (None, None)
    assert report.budget is not None
    assert report.budget.after.kv_tokens is None


@pytest.mark.parametrize(
    ("heads", "found"),
    [
        ((8, 3, 64, None), ("8 attention heads cannot share 3 key and value heads evenly",)),
        ((7, 7, 64, None), ("hidden_size is 64, which is no multiple of 7 attention heads",)),
        ((7, 7, 64, 16), ()), ((8, 2, 64, None), ()), ((None, None, None, None), ()), (([8, 4], [2, 1], 64, None), ()),
    ],
    ids=["kv-heads", "heads", "key-length", "plain", "nothing", "by-layer"],
)  # fmt: skip
def test_contradictions_of_a_gguf(heads: tuple[Any, ...], found: tuple[str, ...]) -> None:
    assert find_gguf_contradictions(*heads) == found


def test_families_are_those_that_transformers_checks() -> None:
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("transformers 4 checks no configuration")
    found = set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/configuration_*.py"):
        for block in re.split(r"\n(?=class )", path.read_text())[1:]:
            named = re.search(r'^    model_type(?:: str)? = "(.+?)"', block, re.MULTILINE)
            if named and "self.hidden_size % self.num_attention_heads" in block:
                found.add(named[1])
    assert found
    assert HEADS_DIVIDE & found
    if transformers.__version__ == "5.24.0":  # from which the list was taken; another release has other families
        assert found == HEADS_DIVIDE
