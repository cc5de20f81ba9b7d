"""What FreeToken's models load is all there, and nothing else: each tensor that is missing or too many is refused."""

import re

import pytest
from arrangements import Changed, arranged, change
from freetoken_sources import NAMES, write_source

import ftw
from ftw.layouts.freetoken.arrangement import FreetokenArrangement

OTHER_EXPERT = re.compile(r"\.experts\.[12]\.")  # of four, the first and the last stand for all
FAMILIES = [name for name in NAMES if name.startswith(("llama", "qwen", "gemma", "gpt", "muse"))]
SOME = [
    "gemma4_unified",
    "gpt_oss",
    "llama_fp8",
    "muse_glimmer_nvfp4",
    "qwen3_5_moe_nvfp4_mixed",
    "qwen3_vl",
    "qwen4_exp",
]


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens the source of a family."""
    checkpoints = []

    def open_source(name: str) -> ftw.Checkpoint:
        checkpoints.append(ftw.open_checkpoint(write_source(name, tmp_path)))
        return checkpoints[-1]

    yield open_source
    for checkpoint in checkpoints:
        checkpoint.close()


def refused(checkpoint, tensors) -> str:
    """Return the message of one line with which a checkpoint of these tensors is refused."""
    with pytest.raises(ftw.CheckpointError) as caught:
        FreetokenArrangement(Changed(checkpoint, tensors))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def needed(checkpoint) -> list[str]:
    """Return the names of tensors that something is made of."""
    left_out = {entry.name for entry in FreetokenArrangement(checkpoint).left_out}
    names = [name for name in checkpoint.tensors if name not in left_out and not OTHER_EXPERT.search(name)]
    assert names
    return names


@pytest.mark.parametrize("name", FAMILIES)
def test_source_without_any_one_of_its_tensors_is_refused(opened, name):
    checkpoint = opened(name)
    for missing in needed(checkpoint):
        rest = {tensor: info for tensor, info in checkpoint.tensors.items() if tensor != missing}
        assert refused(checkpoint, rest)


@pytest.mark.parametrize("name", SOME)
def test_source_with_a_tensor_too_many_is_refused(opened, name):
    checkpoint = opened(name)
    for stored in needed(checkpoint):
        module = stored.rpartition(".")[0]
        for more in (f"{module}.bias", f"{stored}x"):
            if more not in checkpoint.tensors:
                info = checkpoint.tensors[stored]._replace(name=more)
                assert refused(checkpoint, {**checkpoint.tensors, more: info})


@pytest.mark.parametrize("name", SOME)
def test_source_that_is_quantised_where_config_json_says_nothing_of_it_is_refused(opened, name):
    checkpoint = opened(name)
    for stored in needed(checkpoint):
        info = checkpoint.tensors[stored]
        dtype = "I8" if info.dtype in ("U8", "F8_E4M3") else "F8_E4M3"
        if ".ngram_embedding." not in stored:  # FreeToken takes parts of either type, if all are alike
            assert refused(checkpoint, {**checkpoint.tensors, stored: info._replace(dtype=dtype)})


@pytest.mark.parametrize("part", ["mlp.experts.", "mlp.", "self_attn.", "linear_attn.", ""])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe", "qwen4_exp", "gpt_oss"])
def test_layer_without_one_of_its_parts_is_refused(opened, name, part):
    checkpoint = opened(name)
    for layer in range(2):
        rest = {tensor: info for tensor, info in checkpoint.tensors.items() if f".layers.{layer}.{part}" not in tensor}
        if len(rest) < len(checkpoint.tensors):
            assert refused(checkpoint, rest)


def test_layer_of_gemma_without_all_that_experts_need_is_refused(opened):
    checkpoint = opened("gemma4_moe")
    parts = ("experts.", "router.", "feedforward_layernorm_1.", "feedforward_layernorm_2.")
    rest = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if ".layers.1." not in name or not any(part in name for part in parts)
    }
    assert "model.layers.1.feed_forward.router.proj.weight: is missing" in refused(checkpoint, rest)


def test_declared_vision_tower_that_is_not_there_is_refused(opened):
    checkpoint = opened("qwen3_vl")
    rest = {name: tensor for name, tensor in checkpoint.tensors.items() if ".visual." not in name}
    assert "visual.patch_embed.proj.weight: is missing" in refused(checkpoint, rest)


def test_qwen3_vl_takes_the_tie_flag_at_the_top(tmp_path):
    def tie(_, config, tensors):
        config.update(tie_word_embeddings=True)
        config["text_config"].update(tie_word_embeddings=False)
        del tensors["lm_head.weight"]

    with arranged(change("qwen3_vl", tie), tmp_path) as arrangement:
        assert "lm_head.weight" not in arrangement.tensors


def test_other_models_take_the_tie_flag_of_their_text_model(tmp_path):
    def tie(_, config, tensors):
        config.update(tie_word_embeddings=True)
        config["text_config"].update(tie_word_embeddings=False)
        del tensors["lm_head.weight"]

    with (
        pytest.raises(ftw.CheckpointError, match=r"lm_head\.weight: is missing"),
        arranged(change("qwen3_5", tie), tmp_path),
    ):
        pass


def _add_biases(_, config, tensors):
    config["attention_bias"] = True
    for name in [name for name in tensors if "_proj.weight" in name and "self_attn" in name]:
        dtype, shape, shard = tensors[name]
        tensors[name.replace(".weight", ".bias")] = [dtype, shape[:1], shard]


def _make_dense(_, config, tensors):
    config.update(mlp_only_layers=[0], intermediate_size=32)
    for name in [name for name in tensors if ".layers.0.mlp." in name]:
        stored = tensors.pop(name)
        if ".experts.0." in name:
            tensors[name.replace("experts.0.", "")] = stored


def _rename_to_mistral3(_, config, tensors):
    config["architectures"] = ["Mistral3ForConditionalGeneration"]


def _unpack_gpt_oss(_, config, tensors):
    del config["quantization_config"]
    for name in [name for name in tensors if ".experts." in name and not name.endswith("_bias")]:
        _, shape, shard = tensors.pop(name)
        if name.endswith("_blocks"):
            tensors[name.removesuffix("_blocks")] = ["BF16", [shape[0], shape[2] * 32, shape[1]], shard]


def _set(**changes):
    """Return an edit of config.json; a value of `...` is taken out."""

    def edit(_, config, _tensors):
        config.update(changes)
        for key in [key for key, value in config.items() if value is ...]:
            del config[key]

    return edit


def _tie_at_the_top(_, config, tensors):
    config["tie_word_embeddings"] = True
    del tensors["lm_head.weight"]


@pytest.mark.parametrize(
    ("name", "edit", "problem"),
    [
        ("llama", _add_biases, r"self_attn\.\w+\.bias: FreeToken's LlamaForCausalLM has no place for it"),
        ("qwen3_moe", _make_dense, r"needs it: mlp_only_layers is \[0\] in config\.json$"),
        ("llama", _rename_to_mistral3, r"Mistral3ForConditionalGeneration, which its server cannot load"),
        ("gpt_oss", _unpack_gpt_oss, r"which is no format of experts that FreeToken has"),
        ("llama", _set(num_hidden_layers=...), r"config\.json: num_hidden_layers: is missing, a count"),
        ("llama", _set(num_hidden_layers="2"), r"config\.json: num_hidden_layers: is '2', a count"),
        ("qwen3_moe", _set(num_hidden_layers=-1), r"config\.json: num_hidden_layers: is -1, a count"),
        (
            "qwen3_moe",
            _set(num_experts_per_tok=64),
            r"num_experts_per_tok: is 64, a number of the \d experts is needed",
        ),
        ("qwen3_moe", _set(num_experts_per_tok="x"), r"num_experts_per_tok: is 'x', a number of the \d experts is"),
        ("qwen3_moe", _set(rope_parameters="x"), r"rope_parameters: is 'x', .* has the types"),
        (
            "minimax_m2",
            _set(use_qk_norm=...),
            r"k_norm\.weight: .* has no place for it: use_qk_norm is missing in config",
        ),
        (
            "qwen3_5",
            _tie_at_the_top,
            r"lm_head\.weight: .* needs it: text_config\.tie_word_embeddings is False in config",
        ),
        (
            "gpt_oss",
            _set(attention_bias=False),
            r"\.bias: .* has no place for it: attention_bias is False in config",
        ),
    ],
    ids=[
        "llama-bias",
        "qwen3_moe-dense",
        "mistral3",
        "gpt_oss-bf16",
        "no-layers",
        "text",
        "negative",
        "too-many-chosen",
        "no-number-chosen",
        "rope",
        "norms",
        "tied",
        "biases",
    ],
)
def test_source_that_freetokens_server_cannot_load_is_refused_by_name(tmp_path, name, edit, problem):
    with pytest.raises(ftw.CheckpointError, match=problem) as caught, arranged(change(name, edit), tmp_path):
        pass
    assert "\n" not in str(caught.value)
