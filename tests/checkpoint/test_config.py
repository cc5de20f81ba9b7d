"""config.json: one name for each fact, under every name that families give it."""

import json
from pathlib import Path
from typing import Any

import pytest

import ftw
from ftw.checkpoint.config import ModelConfig, parse_model_config, read_model_config
from ftw.hub import Place


def parse(**raw: Any) -> ModelConfig:
    """Parse a config.json of these keys."""
    return parse_model_config(raw, Path("config.json"))


@pytest.mark.parametrize(
    ("field", "keys"),
    [
        ("vocab_size", ["vocab_size"]),
        ("hidden_size", ["hidden_size", "n_embd", "d_model", "dim", "model_dim"]),
        ("num_layers", ["num_hidden_layers", "n_layer", "num_layers", "n_layers"]),
        ("num_experts", ["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts"]),
        ("experts_per_token", ["num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"]),
    ],
    ids=["vocab_size", "hidden_size", "num_layers", "num_experts", "experts_per_token"],
)
def test_fact_is_read_under_each_of_its_names(field: str, keys: list[str]) -> None:
    for key in keys:
        assert getattr(parse(**{key: 7}), field) == 7, key
        assert getattr(parse(text_config={key: 7}), field) == 7, key
        assert getattr(parse(**{key: 9}, text_config={key: 7}), field) == 7, key
        assert getattr(parse(**{key: 9}, text_config={"model_type": "llama"}), field) == 9, key
    assert getattr(parse(), field) is None


@pytest.mark.parametrize("value", ["7", 7.0, True, None, [7], {"a": 7}, -7, 0], ids=str)
def test_fact_of_a_wrong_type_is_left_out(value: Any) -> None:
    config = parse(vocab_size=value, hidden_size=value, num_hidden_layers=value, num_experts=value, head_dim=value)
    facts = (config.vocab_size, config.hidden_size, config.num_layers, config.num_experts, config.kv_elements_per_token)
    assert facts == (None,) * 5


@pytest.mark.parametrize("value", ["", 7, None, True, [], {}], ids=str)
def test_name_of_a_wrong_type_is_left_out(value: Any) -> None:
    config = parse(architectures=value, model_type=value)
    assert (config.architecture, config.model_type, config.text_model_type) == (None, None, None)
    assert config.is_present


@pytest.mark.parametrize("value", [[7], [None], [["A"]], "LlamaForCausalLM", {"0": "A"}], ids=str)
def test_architectures_without_a_name_are_left_out(value: Any) -> None:
    assert parse(architectures=value).architecture is None


def test_first_architecture_counts() -> None:
    assert parse(architectures=["A", "B"]).architecture == "A"


@pytest.mark.parametrize(
    "key", ["text_config", "llm_config", "language_config", "thinker_config", "decoder", "generator"], ids=str
)
def test_language_model_of_a_composite_is_found(key: str) -> None:
    config = parse(model_type="whole", vocab_size=9, tie_word_embeddings=True,
                   **{key: {"model_type": "part", "vocab_size": 7, "tie_word_embeddings": False}})  # fmt: skip
    assert (config.model_type, config.text_model_type, config.vocab_size) == ("whole", "part", 7)
    assert (config.tie_flag, config.text_tie_flag, config.text_path) == (True, False, key)


def test_language_model_two_levels_deep_is_found() -> None:
    inner = {"model_type": "qwen2_5_omni_text", "vocab_size": 7, "tie_word_embeddings": False}
    config = parse(model_type="qwen2_5_omni", thinker_config={"model_type": "thinker", "text_config": inner})
    assert (config.text_model_type, config.vocab_size, config.text_tie_flag) == ("qwen2_5_omni_text", 7, False)


def test_count_is_the_innermost_parts() -> None:
    config = parse(a=1, b=2, c=3, thinker_config={"a": 4, "b": 5, "text_config": {"a": 6, "b": -6}})
    assert [config.count(name) for name in "abcd"] == [6, 5, 3, None]
    assert config.count("d", "c") == 3


@pytest.mark.parametrize("part", [[], "llama", 7, None, {}], ids=str)
def test_language_model_of_a_wrong_type_is_ignored(part: Any) -> None:
    config = parse(model_type="llava", vocab_size=9, text_config=part)
    assert (config.text_path, config.text_tie_flag, config.vocab_size) == ("", None, 9)
    assert config.text_model_type == "llava"


@pytest.mark.parametrize("flag", [True, False, None], ids=str)
def test_tie_flag_is_read(flag: bool | None) -> None:
    assert parse(tie_word_embeddings=flag).tie_flag is flag
    assert parse().tie_flag is None


@pytest.mark.parametrize("flag", ["false", "true", 0, 1, [], {}, 0.5], ids=repr)
@pytest.mark.parametrize("nested", [False, True], ids=["top", "text"])
def test_tie_flag_of_a_wrong_type_is_refused(flag: Any, nested: bool) -> None:
    raw = {"tie_word_embeddings": flag}
    with pytest.raises(ftw.CheckpointError) as caught:
        parse(**({"text_config": raw} if nested else raw))
    subject = "text_config.tie_word_embeddings" if nested else "tie_word_embeddings"
    assert (caught.value.path, caught.value.subject) == ("config.json", subject)
    assert "true or false is needed" in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}, 2 * 4 * 128),
        ({"num_attention_heads": 32, "num_key_value_heads": 4, "hidden_size": 2048}, 2 * 4 * 64),
        ({"num_attention_heads": 32, "hidden_size": 2048}, 2 * 32 * 64),
        ({"n_head": 12, "n_embd": 768}, 2 * 12 * 64),
        ({"num_heads": 8, "d_model": 512, "d_kv": 128}, 2 * 8 * 128),
        ({"num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}, 2 * 64),
        ({"num_attention_heads": 8, "num_kv_heads": 2, "hidden_size": 64, "multi_query": True,
          "new_decoder_architecture": True}, 2 * 2 * 8),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128, "hidden_size": 7168}, 576),
        ({"text_config": {"num_attention_heads": 8, "hidden_size": 64}, "num_attention_heads": 2}, 2 * 8 * 8),
        ({"num_attention_heads": 32}, None),
        ({"hidden_size": 64}, None),
        ({}, None),
    ],
    ids="grouped head-from-width all-heads gpt2 t5 multi-query falcon-new mla text no-width no-heads empty".split(),
)  # fmt: skip
def test_kv_elements_of_a_token(raw: dict[str, Any], expected: int | None) -> None:
    found = parse(num_hidden_layers=3, **raw).kv_elements_per_token
    assert found == (None if expected is None else 3 * expected)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"num_hidden_layers": 4}, 4),
        ({"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}, 2),
        ({"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}, 4),
        ({"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}, 2),
        ({"num_hidden_layers": 4, "layer_types": ["mamba"] * 4}, 0),
        ({"num_hidden_layers": 4, "layers_block_type": ["mamba", "attention"] * 2}, 2),
        ({"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}, 2),
        ({"num_hidden_layers": 48, "full_attention_interval": 4}, 12),
        ({"num_hidden_layers": 4, "layer_types": []}, None),
        ({"num_hidden_layers": 4, "layer_types": [1, 2]}, None),
        ({"num_hidden_layers": 4, "layer_types": "full_attention"}, 4),
        ({"num_hidden_layers": 4, "full_attention_interval": 0}, 4),
        ({"text_config": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}}, 1),
        ({}, None),
    ],
    ids="all linear sliding conv none block-types hybrid interval empty numbers text zero nested absent".split(),
)  # fmt: skip
def test_layers_that_keep_keys_and_values(raw: dict[str, Any], expected: int | None) -> None:
    assert parse(**raw).num_attention_layers == expected


def test_folder_without_config_tells_nothing(tmp_path: Path) -> None:
    assert read_model_config(Place(tmp_path)) == ModelConfig()
    assert not read_model_config(Place(tmp_path)).is_present


def test_config_is_read_from_its_folder(tmp_path: Path) -> None:
    raw = {"architectures": ["A"], "vocab_size": 7, "unknown": {"a": [1]}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model_config(Place(tmp_path))
    assert (config.architecture, config.vocab_size, config.raw) == ("A", 7, raw)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', "null"], ids=repr)
def test_broken_config_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ftw.CheckpointError) as caught:
        read_model_config(Place(tmp_path))
    assert caught.value.path == str(tmp_path / "config.json")


def test_infinity_is_read_as_nemotron_h_writes_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nemotron_h", "time_step_limit": [0.0, Infinity]}')
    assert read_model_config(Place(tmp_path)).model_type == "nemotron_h"


@pytest.mark.parametrize("value", ["1" + "0" * 400, "9" * 4000, str(1 << 48)], ids=["e400", "4000_digits", "2_to_48"])
def test_number_that_no_model_has_is_not_taken(tmp_path: Path, value: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "num_hidden_layers": {value}}}')
    assert read_model_config(Place(tmp_path)).num_layers is None


@pytest.mark.parametrize("target", ["nowhere", "config.json"], ids=["dangling", "looping"])
def test_link_to_nothing_is_not_an_absent_config(tmp_path: Path, target: str) -> None:
    (tmp_path / "config.json").symlink_to(target)
    with pytest.raises(ftw.CheckpointError, match="is missing"):
        read_model_config(Place(tmp_path))


@pytest.mark.parametrize(
    ("raw", "layers", "elements"),
    [
        ({"num_hidden_layers": 6, "hybrid_override_pattern": "M-M*M*"}, 2, 2 * 32),
        ({"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2}, 2, 2 * 32),
        ({"num_hidden_layers": 4, "attn_type_list": [0, 0, 1, 0]}, 1, 32),
        ({"num_hidden_layers": 5, "block_types": ["recurrent", "recurrent", "attention"]}, 1, 32),
        ({"num_hidden_layers": 6, "attn_layer_indices": [1, 4]}, 2, 2 * 32),
        ({"num_hidden_layers": 4, "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}}, 1, 32),
        ({"num_hidden_layers": 8, "full_attention_interval": 4}, 2, 2 * 32),
        ({"num_hidden_layers": 4, "num_kv_shared_layers": 3}, 1, 32),
        ({"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}, 1, 32),
        ({"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
          "global_head_dim": 16, "num_global_key_value_heads": 1}, 3, 2 * 32 + 32),
        ({"num_hidden_layers": 2, "layer_types": ["mamba", "mamba"]}, 0, None),
        ({"num_hidden_layers": 1 << 40}, 1 << 40, None),
    ],
    ids="nemotron-h jamba minimax recurrent-gemma bamba kimi qwen3-next gemma3n types gemma4 mamba huge".split(),
)  # fmt: skip
def test_only_layers_that_keep_keys_and_values_count(raw: dict[str, Any], layers: int, elements: int | None) -> None:
    config = parse(num_attention_heads=4, num_key_value_heads=2, head_dim=8, **raw)
    assert (config.num_attention_layers, config.kv_elements_per_token) == (layers, elements)


def test_kv_of_chatglm_counts_its_query_groups() -> None:
    config = parse(
        num_layers=2, num_attention_heads=32, kv_channels=128, multi_query_attention=True, multi_query_group_num=2
    )
    assert config.kv_elements_per_token == 2 * 2 * 2 * 128


@pytest.mark.parametrize(
    ("raw", "elements"),
    [
        ({"model_type": "mamba2", "num_heads": 8, "head_dim": 64, "num_hidden_layers": 4}, None),
        ({"model_type": "dbrx", "d_model": 64, "n_heads": 8, "n_layers": 2, "attn_config": {"kv_n_heads": 2}},
         2 * 2 * 2 * 8),
        ({"block_configs": [{}], "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}, None),
        ({"model_type": "t5", "d_model": 32, "num_heads": 4, "d_kv": 8, "num_layers": 6, "num_decoder_layers": 2},
         2 * 2 * 4 * 8),
        ({"d_model": 32, "decoder_layers": 3, "encoder_layers": 9, "decoder_attention_heads": 4}, 3 * 2 * 32),
        ({"model_type": "bloom", "n_embed": 32, "n_head": 4, "n_layer": 2}, 2 * 2 * 32),
    ],
    ids="mamba2 dbrx nemotron-nas t5 bart bloom".split(),
)  # fmt: skip
def test_kv_of_families_with_names_of_their_own(raw: dict[str, Any], elements: int | None) -> None:
    assert parse(**raw).kv_elements_per_token == elements
