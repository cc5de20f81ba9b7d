"""ModelConfig out of GGUF metadata that the gguf package wrote: which key is which fact, and what wrong keys do."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType
from gguf_builder import ARCHITECTURE, gguf_bytes, kv, write_gguf

import ftw
from ftw.checkpoint.config import ModelConfig
from ftw.checkpoint.gguf_config import parse_gguf_config
from ftw.files import WeightFile
from ftw.readers.gguf.reader import read_gguf_metadata

U32, U64, I32, F32, STRING = (
    GGUFValueType.UINT32, GGUFValueType.UINT64, GGUFValueType.INT32, GGUFValueType.FLOAT32, GGUFValueType.STRING,
)  # fmt: skip
ARRAY, BOOL = GGUFValueType.ARRAY, GGUFValueType.BOOL
TOKENS = ("tokenizer.ggml.tokens", ["a", "b", "c"])
DENSE = {
    "block_count": 4, "embedding_length": 64, "attention.head_count": 8, "attention.head_count_kv": 2,
    "vocab_size": 100,
}  # fmt: skip


def config_of(
    folder: Path, facts: dict[str, Any], others: dict[str, Any] | None = None, architecture: str = "llama"
) -> ModelConfig:
    """Write metadata; integers become UINT32, lists arrays, and a pair of a type and a value what it says."""
    keys = {f"{architecture}.{key}": value for key, value in facts.items()} | (others or {})
    kvs = {key: value if isinstance(value, tuple) else (_kind(value), value) for key, value in keys.items()}
    path = write_gguf(folder / "m.gguf", {}, kvs, architecture=architecture)
    return parse_gguf_config(read_gguf_metadata(WeightFile(path)), path)


def _kind(value: Any) -> GGUFValueType:
    kinds = {bool: BOOL, int: U32, float: F32, str: STRING, list: ARRAY}
    return kinds[type(value)]


def test_dense_model_tells_its_facts(tmp_path: Path) -> None:
    config = config_of(tmp_path, DENSE, dict([TOKENS]))
    assert (config.architecture, config.model_type, config.text_model_type) == ("llama", "llama", "llama")
    assert (config.vocab_size, config.num_tokens, config.hidden_size) == (100, 3, 64)
    assert (config.num_layers, config.num_attention_layers, config.kv_elements_per_token) == (4, 4, 4 * 2 * (8 + 8))
    assert (config.num_experts, config.experts_per_token) == (None, None)
    assert (config.is_present, config.is_gguf, config.has_output_weight) == (True, True, None)
    assert (config.tie_flag, config.text_tie_flag, config.text_path) == (None, None, "")
    assert config.raw["general.architecture"] == "llama"


def test_facts_are_those_of_the_files_own_architecture(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"block_count": 3}, {"llama.block_count": 9, "general.block_count": 7}, "qwen3")
    assert (config.architecture, config.num_layers) == ("qwen3", 3)


def test_moe_model_tells_its_experts(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**DENSE, "expert_count": 128, "expert_used_count": 8}, architecture="qwen3moe")
    assert (config.num_experts, config.experts_per_token) == (128, 8)


def test_experts_of_a_dense_model_that_says_zero_are_none(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**DENSE, "expert_count": 0, "expert_used_count": 0})
    assert (config.num_experts, config.experts_per_token) == (None, None)


def test_key_and_value_lengths_count_before_the_width(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**DENSE, "attention.key_length": 32, "attention.value_length": 16})
    assert config.kv_elements_per_token == 4 * 2 * (32 + 16)


def test_heads_stand_in_for_missing_kv_heads(tmp_path: Path) -> None:
    config = config_of(tmp_path, {key: value for key, value in DENSE.items() if key != "attention.head_count_kv"})
    assert config.kv_elements_per_token == 4 * 8 * (8 + 8)


def test_hybrid_counts_the_layers_that_have_kv_heads(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**DENSE, "attention.head_count_kv": [0, 2, 0, 4]}, architecture="jamba")
    assert (config.num_layers, config.num_attention_layers) == (4, 2)
    assert config.kv_elements_per_token == (2 + 4) * (8 + 8)


def test_facts_for_each_layer_are_summed_up_or_the_largest(tmp_path: Path) -> None:
    facts = {**DENSE, "attention.head_count": [4, 8, 8, 4], "attention.head_count_kv": [1, 2, 2, 1]}
    config = config_of(tmp_path, {**facts, "expert_count": [0, 16, 16, 8]}, architecture="deci")
    assert config.kv_elements_per_token == (1 + 2 + 2 + 1) * 2 * (64 // 8)
    assert config.num_experts == 16


def test_model_without_kv_heads_keeps_no_cache(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**DENSE, "attention.head_count_kv": 0}, architecture="mamba")
    assert (config.num_attention_layers, config.kv_elements_per_token) == (None, None)


MLA = {**DENSE, "attention.kv_lora_rank": 512, "rope.dimension_count": 64, "attention.key_length": 192}


def test_mla_keeps_one_compressed_vector(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**MLA, "attention.head_count_kv": 1}, architecture="deepseek2")
    assert (config.num_attention_layers, config.kv_elements_per_token) == (4, 4 * (512 + 64))


def test_mla_hybrid_keeps_none_in_the_layers_without_kv_heads(tmp_path: Path) -> None:
    """Kimi-Linear: llama.cpp takes a layer of no KV heads for a recurrent one."""
    config = config_of(tmp_path, {**MLA, "attention.head_count_kv": [0, 0, 0, 8]}, architecture="kimi-linear")
    assert (config.num_attention_layers, config.kv_elements_per_token) == (1, 512 + 64)


def test_full_attention_interval_counts_each_nth_layer(tmp_path: Path) -> None:
    facts = {**DENSE, "block_count": 10, "full_attention_interval": 4}
    config = config_of(tmp_path, facts, architecture="qwen3next")
    assert (config.num_layers, config.num_attention_layers) == (10, 2)
    assert config.kv_elements_per_token == 2 * 2 * (8 + 8)


def test_layers_that_share_a_cache_are_not_counted(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**DENSE, "attention.shared_kv_layers": 3}, architecture="gemma3n")
    assert (config.num_layers, config.num_attention_layers, config.kv_elements_per_token) == (4, 1, 2 * (8 + 8))


@pytest.mark.parametrize("shared", [4, 5, 1 << 31], ids=str)
def test_more_shared_layers_than_there_are_leave_no_cache(tmp_path: Path, shared: int) -> None:
    assert config_of(tmp_path, {**DENSE, "attention.shared_kv_layers": shared}).kv_elements_per_token is None


def test_layers_of_next_token_prediction_are_not_the_models(tmp_path: Path) -> None:
    facts = {**DENSE, "nextn_predict_layers": 1, "attention.head_count_kv": [2, 2, 2, 9]}
    config = config_of(tmp_path, facts, architecture="glm4moe")
    assert (config.num_layers, config.kv_elements_per_token) == (3, 3 * 2 * (8 + 8))


@pytest.mark.parametrize("layers", [4, 5, 1 << 31], ids=str)
def test_no_layers_are_left_where_all_predict_next_tokens(tmp_path: Path, layers: int) -> None:
    config = config_of(tmp_path, {**DENSE, "nextn_predict_layers": layers})
    assert (config.num_layers, config.kv_elements_per_token) == (None, None)


def test_token_list_counts_where_there_is_no_vocab_size(tmp_path: Path) -> None:
    facts = {key: value for key, value in DENSE.items() if key != "vocab_size"}
    config = config_of(tmp_path, facts, dict([TOKENS]))
    assert (config.vocab_size, config.num_tokens) == (3, 3)


def test_metadata_without_facts_tell_none(tmp_path: Path) -> None:
    config = config_of(tmp_path, {})
    facts = (
        config.vocab_size, config.hidden_size, config.num_layers, config.num_attention_layers, config.num_tokens,
        config.kv_elements_per_token, config.num_experts, config.experts_per_token, config.has_output_weight,
    )  # fmt: skip
    assert facts == (None,) * 9
    assert config.is_present


@pytest.mark.parametrize(
    "missing", ["block_count", "embedding_length", "attention.head_count", "attention.head_count_kv", "vocab_size"]
)
def test_missing_fact_is_none_and_the_others_stay(tmp_path: Path, missing: str) -> None:
    config = config_of(tmp_path, {key: value for key, value in DENSE.items() if key != missing})
    kept = {"block_count": config.num_layers, "embedding_length": config.hidden_size, "vocab_size": config.vocab_size}
    assert kept == {key: None if key == missing else DENSE[key] for key in kept}
    assert (config.kv_elements_per_token is None) == (missing not in ("vocab_size", "attention.head_count_kv"))


@pytest.mark.parametrize(
    "wrong",
    [
        "4", 4.0, (I32, -4), True, (ARRAY, ["4"]), (ARRAY, [4.0]), (ARRAY, [True, True, True, True]), [-1, 1, 1, 1],
        (U64, 1 << 48), (U64, (1 << 64) - 1), [],
    ],
    ids=[
        "text", "float", "negative", "bool", "texts", "floats", "bools", "negatives", "huge", "largest", "empty",
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["block_count", "embedding_length", "vocab_size", "expert_count"])
def test_fact_of_a_wrong_type_or_size_is_none(tmp_path: Path, key: str, wrong: Any) -> None:
    if wrong == []:
        config = parse_gguf_config(_empty_array(tmp_path, f"llama.{key}"), tmp_path / "m.gguf")
    else:
        config = config_of(tmp_path, {**DENSE, key: wrong})
    attribute = {
        "block_count": "num_layers", "embedding_length": "hidden_size", "vocab_size": "vocab_size",
        "expert_count": "num_experts",
    }[key]  # fmt: skip
    assert getattr(config, attribute) is None


def _empty_array(folder: Path, key: str) -> dict[str, Any]:
    (folder / "m.gguf").write_bytes(gguf_bytes(kvs=[ARCHITECTURE, kv(key, "array", ("u32", []))]))
    return read_gguf_metadata(WeightFile(folder / "m.gguf"))


@pytest.mark.parametrize("kind", [GGUFValueType.UINT8, GGUFValueType.UINT16, I32, U64, GGUFValueType.INT64], ids=str)
def test_fact_may_be_of_any_integer_type(tmp_path: Path, kind: GGUFValueType) -> None:
    assert config_of(tmp_path, {**DENSE, "block_count": (kind, 7)}).num_layers == 7


@pytest.mark.parametrize("key", ["attention.head_count", "attention.head_count_kv"])
def test_array_that_is_too_short_tells_no_cache(tmp_path: Path, key: str) -> None:
    assert config_of(tmp_path, {**DENSE, key: [2, 2, 2]}).kv_elements_per_token is None


def test_array_longer_than_the_layers_is_cut(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**DENSE, "attention.head_count_kv": [2, 2, 2, 2, 7, 7]})
    assert config.kv_elements_per_token == 4 * 2 * (8 + 8)


def test_arrays_of_no_layers_are_not_read(tmp_path: Path) -> None:
    config = config_of(tmp_path, {**DENSE, "attention.head_count": [8] * ((1 << 16) + 1)})
    assert config.kv_elements_per_token is None


@pytest.mark.parametrize("blocks", [5_000_000, (U64, 5_000_000)], ids=["u32", "u64"])
def test_huge_count_of_layers_takes_no_memory(tmp_path: Path, blocks: Any) -> None:
    config_of(tmp_path, DENSE)
    tracemalloc.start()
    config_of(tmp_path, {**DENSE, "block_count": blocks})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("is_present", [True, False], ids=["yes", "no"])
def test_freetokens_key_tells_whether_there_was_a_head(tmp_path: Path, is_present: bool) -> None:
    config = config_of(tmp_path, DENSE, {"freetoken.output_weight_present": is_present})
    assert config.has_output_weight is is_present


@pytest.mark.parametrize(
    ("wrong", "shown"), [(1, "is 1,"), ("true", "is 'true',"), (1.0, "is 1.0,"), ([True], "is ")],
    ids=["integer", "text", "float", "array"],
)  # fmt: skip
def test_freetokens_key_of_another_type_is_refused(tmp_path: Path, wrong: Any, shown: str) -> None:
    with pytest.raises(ftw.CheckpointError) as caught:
        config_of(tmp_path, DENSE, {"freetoken.output_weight_present": wrong})
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'm.gguf'}: freetoken.output_weight_present: {shown}")
    assert message.endswith("true or false is needed")


def test_opened_checkpoint_has_the_config(tmp_path: Path) -> None:
    kvs = {"llama.block_count": (U32, 2), "llama.embedding_length": (U32, 8)}
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": np.ones((3, 8), np.float32)}, kvs)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 77}')
    with ftw.open_checkpoint(path) as checkpoint:
        assert (checkpoint.config.num_layers, checkpoint.config.hidden_size) == (2, 8)
        assert checkpoint.config.raw is checkpoint.metadata
