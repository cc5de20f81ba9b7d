"""Each tensor has the shape that config.json gives it; what contradicts it is refused, converted or inspected.

That no shape is refused which FreeToken's model has: test_layout_families.
"""

import json

import pytest
from arrangements import arranged, change
from folders import read_index
from freetoken_sources import write_source, write_spec

import ftw
from ftw.layouts.expected.shapes import iter_words
from ftw.layouts.expected.sizes import Size, Sizes
from ftw.layouts.families.family import Needs
from ftw.layouts.families.table import FAMILIES

LAYER = "model.layers.0."


def sizes_of(config: dict[str, object], **sizes: str) -> Sizes:
    """Return sizes that are defined so, of a checkpoint with that config.json."""

    class Checkpoint:
        source = "src"

    Checkpoint.config = ftw.checkpoint.ModelConfig(raw=config)  # type: ignore[attr-defined]
    return Sizes(Checkpoint(), Needs("", "", sizes=sizes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("7", 7), ("width", 8), ("width*heads", 24), ("3*width/heads", 8), ("width+heads+1", 12)),
        *(("width-heads", 5), ("width+heads~16", 16), ("width*2~16", 16), ("part.inner*2", 10), ("square", 64)),
        *(("given", 8), ("other", 24), ("null", 24), ("nothing", None), ("2*nothing", None), ("block", 128)),
    ],
)
def test_expression_comes_to_a_number(text, value):
    config = {"w": 8, "heads": 3, "part": {"inner": 5}, "is_null": None, "zero": 0}
    definitions = {"width": "w", "square": "width*width", "given": "w|heads", "other": "gone|zero|width*heads"}
    sizes = sizes_of(config, **definitions, null="is_null?width*heads", nothing="gone?width")
    found = sizes.find(text)
    assert (None if found is None else found.value) == value


def test_number_names_the_keys_that_it_is_made_of():
    sizes = sizes_of({"text_config": {"w": 8}, "w": 9, "vision_config": {"w": 5}}, width="w", seen="vision_config.w")
    assert sizes.find("2*width+seen") == Size(21, {"w": 8, "vision_config.w": 5})


@pytest.mark.parametrize("value", [-1, True, 1.5, "8", [8], None], ids=repr)
def test_size_that_is_no_count_is_refused(value):
    with pytest.raises(ftw.CheckpointError, match=r"^src: config\.json: w: is .*, a count is needed$"):
        sizes_of({"w": value}, width="w").find("2*width")


def test_division_by_a_size_of_none_is_refused():
    with pytest.raises(ftw.CheckpointError, match=r"^src: config\.json: heads: is 0, a count is needed$"):
        sizes_of({"w": 8, "heads": 0}).find("w/heads")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architectures[0])
def test_row_says_the_shape_of_all_that_it_needs(family):
    needs = family.needs
    texts = [needs.model, needs.layers, needs.vision, needs.blocks, *(text for _, text in needs.of_kind)]
    words = [word for text in texts for choice in text.split("|") for word in iter_words(choice)]
    assert [word.name for word in words if not word.axes] == []
    assert not family.banks or {"experts", "hidden", "expert_inner"} <= {*needs.sizes}


def reshape(name: str, *shape: int):
    """Return an edit that gives a tensor of the source another shape."""

    def edit(_spec, _config, tensors):
        tensors[name][1] = [*shape]

    return edit


def reconfigure(**changes: object):
    """Return an edit of the text model's configuration; a value of `...` is taken out."""

    def edit(_spec, config, _tensors):
        text = config.get("text_config", config)
        text.update(changes)
        for key in [key for key, value in text.items() if value is ...]:
            del text[key]

    return edit


def reshape_experts(end: str, *shape: int):
    def edit(_spec, _config, tensors):
        for name in [name for name in tensors if ".layers.1." in name and ".experts." in name and name.endswith(end)]:
            tensors[name][1] = [*shape]

    return edit


def narrow_experts(_spec, config, tensors):
    for end, shape in (("gate_proj.weight", (16, 64)), ("up_proj.weight", (16, 64)), ("down_proj.weight", (64, 16))):
        reshape_experts(end, *shape)(_spec, config, tensors)


QKV = "num_attention_heads 2, head_dim 64, num_key_value_heads 1, hidden_size 64 of config.json"
EXPERTS = "num_local_experts 4, hidden_size 64, moe_intermediate_size 32 of config.json"
CASES = {
    "rows of q": (
        "llama",
        reshape(f"{LAYER}self_attn.q_proj.weight", 64, 64),
        "q_proj.weight: is [64, 64], [128, 64] is "
        "needed by num_attention_heads 2, head_dim 64, hidden_size 64 of config.json",
    ),
    "rows of v": (
        "llama",
        reshape(f"{LAYER}self_attn.v_proj.weight", 32, 64),
        "v_proj.weight: is [32, 64], [64, 64] is "
        "needed by num_key_value_heads 1, head_dim 64, hidden_size 64 of config.json",
    ),
    "columns of o": (
        "qwen3",
        reshape(f"{LAYER}self_attn.o_proj.weight", 64, 64),
        "o_proj.weight: is [64, 64], [64, 128] "
        "is needed by hidden_size 64, num_attention_heads 2, head_dim 64 of config.json",
    ),
    "bias": ("qwen2", reshape(f"{LAYER}self_attn.k_proj.bias", 32), "k_proj.bias: is [32], [64] is needed by "),
    "norm": (
        "qwen3",
        reshape("model.norm.weight", 32),
        "model.norm.weight: is [32], [64] is needed by hidden_size 64 ",
    ),
    "head": (
        "llama",
        reshape("lm_head.weight", 127, 64),
        "lm_head.weight: is [127, 64], [128, 64] is needed by vocab_size",
    ),
    "router": (
        "qwen3_moe",
        reshape(f"{LAYER}mlp.gate.weight", 3, 64),
        "gate.weight: is [3, 64], [4, 64] is needed by num_local_experts 4, hidden_size 64",
    ),
    "gate and up": (
        "llama",
        reshape(f"{LAYER}mlp.up_proj.weight", 64, 64),
        "up_proj.weight: is [64, 64], [96, 64] is needed by intermediate_size 96, hidden_size 64 of config.json",
    ),
    "narrow experts": (
        "qwen3_moe",
        narrow_experts,
        "layers.1.mlp.experts.0.gate_proj.weight: gate_up#L00001, made of it, "
        f"is BF16 [4, 32, 64], BF16 [4, 64, 64] is needed by {EXPERTS}",
    ),
    "transposed experts": (
        "qwen3_moe",
        reshape_experts("down_proj.weight", 32, 64),
        "experts.0.down_proj.weight: down#L00001, made of it, is BF16 [4, 32, 64], ",
    ),
    "NVFP4 scale": ("qwen3_5_moe_nvfp4", reshape_experts("up_proj.weight_scale", 32, 2), "gate and up must be alike, "),
    "vision": (
        "qwen3_vl",
        reshape("model.visual.pos_embed.weight", 15, 32),
        "pos_embed.weight: is [15, 32], [16, 32] is "
        "needed by vision_config.num_position_embeddings 16, vision_config.hidden_size 32 of config.json",
    ),
    "integers": (
        "llama",
        lambda _spec, _config, tensors: tensors["model.norm.weight"].__setitem__(0, "I32"),
        "model.norm.weight: is I32, FreeToken's LlamaForCausalLM takes BF16, F16 or F32",
    ),
    "head_dim": (
        "llama",
        reconfigure(head_dim=96),
        "head_dim: heads of 96 elements, FreeToken's LlamaForCausalLM rotates heads of 64, 128, 256, 512",
    ),
    "no head_dim": ("llama", reconfigure(head_dim=...), "hidden_size: heads of 32 elements, FreeToken's "),
    "null": ("qwen3", reconfigure(head_dim=None), "config.json: head_dim: is null, a count is needed"),
    "linear RoPE": (
        "llama",
        reconfigure(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}),
        "config.json: rope_scaling.rope_type: is 'linear', FreeToken's LlamaForCausalLM has the types default",
    ),
    "dynamic RoPE": (
        "qwen3_moe",
        reconfigure(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "rope_parameters.rope_type: is 'dynamic', ",
    ),
    "layer_types": (
        "qwen3_5",
        reconfigure(layer_types=["full_attention", "linear_attention"]),
        "model.layers.0.self_attn.qkv_proj.weight: is missing, FreeToken's Qwen3_5ForConditionalGeneration needs it",
    ),
    "too many layer_types": (
        "qwen3",
        reconfigure(layer_types=["full_attention"] * 3),
        "config.json: layer_types: has 3 entries, num_hidden_layers is 2",
    ),
    "odd layer_types": (
        "qwen3_5",
        reconfigure(layer_types=["linear_attention", "sliding_attention"]),
        "layer_types: has 'sliding_attention', FreeToken's Qwen3_5ForConditionalGeneration takes linear_attention",
    ),
    "unequal heads": ("qwen3_5", reconfigure(linear_key_head_dim=64), "linear_key_head_dim: is 64, 32 is needed by "),
    "activation": (
        "llama",
        reconfigure(hidden_act="relu"),
        "hidden_act: is 'relu', FreeToken's LlamaForCausalLM takes ",
    ),
}


@pytest.mark.parametrize(("name", "edit", "problem"), CASES.values(), ids=CASES)
def test_source_that_contradicts_its_config_is_refused_by_name(tmp_path, name, edit, problem):
    with pytest.raises(ftw.CheckpointError) as caught, arranged(change(name, edit), tmp_path):
        pass
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_is_written_of_a_source_that_contradicts_its_config(tmp_path):
    source = write_spec(change("llama", reconfigure(vocab_size=130)), tmp_path / "src")
    with pytest.raises(ftw.CheckpointError, match=r"embed_tokens\.weight: is \[128, 64\], \[130, 64\] is needed"):
        ftw.convert(source, tmp_path / "out", layout="freetoken")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize(
    ("name", "shape", "obstacle"),
    [
        ("model.layers.1.self_attn.qkv_proj.weight", [128, 128], f"[256, 64] is needed by {QKV}"),
        ("model.layers.1.self_attn.q_norm.weight", [64, 1], "[64] is needed by head_dim 64 of config.json"),
        ("down#L00001", [4, 32, 64], f"BF16 [4, 64, 32] is needed by {EXPERTS}"),
    ],
    ids=["fused", "norm", "bank"],
)
def test_inspect_names_a_tensor_that_contradicts_config(tmp_path, name, shape, obstacle):
    ftw.convert(write_source("qwen3_moe", tmp_path / "src"), tmp_path / "out", layout="freetoken")
    index = read_index(tmp_path / "out")
    next(entry for entry in index["tensors"] if entry["name"] == name)["shape"] = shape
    (tmp_path / "out" / "freetoken_weight.json").write_text(json.dumps(index))
    found = ftw.inspect(tmp_path / "out").freetoken_obstacle
    assert found is not None
    assert found.startswith(f"{name}: is ")
    assert found.endswith(obstacle)


def test_tied_model_may_store_a_head_of_any_shape(tmp_path):
    """FreeToken's loader throws it away unseen."""

    def store_head(_spec, _config, tensors):
        tensors["lm_head.weight"] = ["BF16", [7, 64], "model.safetensors"]

    with arranged(change("llama_tied", store_head), tmp_path) as arrangement:
        assert arrangement.tensors["lm_head.weight"].shape == (7, 64)


def test_tensor_of_unknown_size_is_not_held_against_anything(tmp_path):
    """FreeToken has transformers fill in what config.json does not say."""

    def edit(spec, config, tensors):
        reconfigure(num_key_value_heads=...)(spec, config, tensors)
        reshape(f"{LAYER}self_attn.k_proj.weight", 192, 64)(spec, config, tensors)

    with arranged(change("qwen3", edit), tmp_path) as arrangement:
        assert arrangement.tensors[f"{LAYER}self_attn.qkv_proj.weight"].shape == (384, 64)
