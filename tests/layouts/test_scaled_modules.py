"""Quantised linear layers become what config.json declares, as FreeToken names it; what disagrees is refused."""

import numpy as np
import pytest
import torch
from arrangements import arranged, change, read
from freetoken_sources import make_bytes

import ftw

LAYER = "model.language_model.layers.0."
IGNORED = ["lm_head", "model.visual*", "*in_proj_a", "*in_proj_b", "*mlp.gate", "*shared_expert_gate", "*experts*"]
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": IGNORED}
ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "config_groups": {"all": {"targets": ["Linear"], "weights": ROWS}},
    "ignore": ["lm_head", *(f"re:.*{end}$" for end in ("visual.*", "in_proj_[ab]", "mlp.gate", "_gate", "experts.*"))],
}
LINEARS = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")


def quantise(spec, declared, scale, *, inputs=False, only=LINEARS):
    """Make the linear layers of Qwen3.5's text model FP8, with scales `[]` or `[rows, 1]`."""
    config, tensors = spec["files"]["config.json"], spec["tensors"]
    config["quantization_config"] = declared
    for name in [name for name in tensors if name.endswith(only) and "visual" not in name]:
        _, shape, shard = tensors[name]
        tensors[name] = ["F8_E4M3", shape, shard]
        tensors[f"{name}_scale"] = ["F32", [] if scale == "tensor" else [shape[0], 1], shard]
        if inputs:
            tensors[name.replace(".weight", ".input_scale")] = ["F32", [], shard]


def fp8_source(declared, scale, **options):
    return change("qwen3_5", lambda spec, _config, _tensors: quantise(spec, declared, scale, **options))


def floats(name, shape):
    return np.frombuffer(make_bytes(name, "F32", shape), "<f4")


def read_floats(arrangement, name):
    return np.frombuffer(read(arrangement, name), "<f4")


def refuse(spec, folder) -> str:
    with pytest.raises(ftw.CheckpointError) as caught, arranged(spec, folder):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_scale_becomes_one_for_each_row_of_each_part(tmp_path):
    with arranged(fp8_source(FP8, "tensor", inputs=True), tmp_path) as arrangement:
        scales = read_floats(arrangement, "model.layers.1.self_attn.qkv_proj.weight_scale")
        heights = {"q_proj": 256, "k_proj": 64, "v_proj": 64}
        parts = [f"model.language_model.layers.1.self_attn.{part}.weight_scale" for part in heights]
        wanted = [np.repeat(floats(part, []), rows) for part, rows in zip(parts, heights.values(), strict=True)]
        np.testing.assert_array_equal(scales, np.concatenate(wanted))


def test_fused_parts_share_the_largest_scale_of_their_input(tmp_path):
    with arranged(fp8_source(FP8, "tensor", inputs=True), tmp_path) as arrangement:
        found = read_floats(arrangement, "model.layers.0.mlp.gate_up_proj.input_scale")
        parts = [floats(f"{LAYER}mlp.{part}.input_scale", []) for part in ("gate_proj", "up_proj")]
        assert arrangement.tensors["model.layers.0.mlp.gate_up_proj.input_scale"].shape == ()
        assert found == max(parts)


def test_scales_of_rows_lose_their_second_axis(tmp_path):
    with arranged(fp8_source(CHANNEL, "row"), tmp_path) as arrangement:
        name = "model.layers.0.mlp.down_proj.weight_scale"
        assert (arrangement.tensors[name].dtype, arrangement.tensors[name].shape) == ("F32", (64,))
        np.testing.assert_array_equal(
            read_floats(arrangement, name), floats(f"{LAYER}mlp.down_proj.weight_scale", [64])
        )


def test_llm_compressors_global_scale_is_stored_inverted(tmp_path):
    with arranged(change("qwen3_5_nvfp4_ct", lambda *_: None), tmp_path) as arrangement:
        found = read_floats(arrangement, "model.layers.0.mlp.down_proj.weight_global")
        stored = torch.from_numpy(floats(f"{LAYER}mlp.down_proj.weight_global_scale", [1]).copy())
        np.testing.assert_array_equal(found, (1.0 / stored).expand(64).numpy())


def test_scale_of_the_input_that_is_not_declared_is_left_out(tmp_path):
    spec = fp8_source({**FP8, "with_input_scale": False}, "tensor", inputs=True)
    with arranged(spec, tmp_path) as arrangement:
        assert not any(name.endswith("input_scale") for name in arrangement.tensors)
        left_out = [entry for entry in arrangement.left_out if entry.name.endswith("input_scale")]
        assert len(left_out) == sum(name.endswith("input_scale") for name in spec["tensors"]) > 0
        assert {entry.reason for entry in left_out} == {
            "the quantization_config declares no scale of the input, so FreeToken has no place for it"
        }


def test_scale_of_the_input_that_is_declared_and_missing_is_refused(tmp_path):
    assert "its layer stores no input" in refuse(fp8_source(FP8, "tensor"), tmp_path)


def test_old_file_of_modelopt_declares_as_well(tmp_path):
    spec = fp8_source(FP8, "tensor", inputs=True)
    del spec["files"]["config.json"]["quantization_config"]
    spec["files"]["hf_quant_config.json"] = {"quantization": {"quant_algo": "FP8", "exclude_modules": IGNORED}}
    with arranged(spec, tmp_path) as arrangement:
        assert arrangement.tensors["model.layers.0.mlp.down_proj.weight"].dtype == "F8_E4M3"


def test_layers_that_are_quantised_and_not_declared_so_are_refused(tmp_path):
    spec = fp8_source(FP8, "tensor", inputs=True)
    del spec["files"]["config.json"]["quantization_config"]
    assert "config.json declares its layer as not quantised" in refuse(spec, tmp_path)


def test_layers_that_are_declared_quantised_and_are_not_are_refused(tmp_path):
    spec = change("qwen3_5", lambda _spec, config, _tensors: config.update(quantization_config=FP8))
    assert "config.json declares its layer as fp8 with a scale of the input" in refuse(spec, tmp_path)


def test_size_that_is_no_multiple_of_a_block_is_refused(tmp_path):
    def shrink(_spec, _config, tensors):
        name = f"{LAYER}mlp.shared_expert.down_proj.weight"
        tensors[name][1] = [127, 128]

    assert "FreeToken needs multiples of 128 and 128" in refuse(change("qwen3_5_moe_fp8", shrink), tmp_path)


def test_linear_attention_is_joined_in_two_where_it_is_quantised(tmp_path):
    with arranged(fp8_source(FP8, "tensor", inputs=True), tmp_path / "fp8") as arrangement:
        below = {name.split("linear_attn.")[1] for name in arrangement.tensors if ".0.linear_attn.in_" in name}
        assert below == {f"in_proj_qkvz.{role}" for role in ("weight", "weight_scale", "input_scale")} | {
            "in_proj_ba.weight"
        }
    with arranged(change("qwen3_5", lambda *_: None), tmp_path / "bf16") as arrangement:
        assert [name for name in arrangement.tensors if ".0.linear_attn.in_" in name] == [
            "model.layers.0.linear_attn.in_proj.weight"
        ]


def _with_router(kind):
    def edit(_spec, config, tensors):
        name = f"{LAYER}mlp.gate.weight"
        shard = tensors[name][2]
        skipped = config["quantization_config"]["modules_to_not_convert"]
        skipped.remove(f"{LAYER}mlp.gate")
        tensors[name] = ["F8_E4M3", [4, 128], shard]
        tensors[f"{name}_scale_inv"] = ["BF16", [1, 1], shard]
        if kind == "table":
            config["quantization_config"]["modules_to_convert"] = [f"{LAYER}mlp.gate"]
            tensors.pop(f"{name}_scale_inv")
            tensors[f"{name}_scale"] = ["F32", [], shard]

    return edit


def test_router_in_fp8_becomes_bf16(tmp_path):
    with arranged(change("qwen3_5_moe_fp8", _with_router("table")), tmp_path) as arrangement:
        name, stored = "model.layers.0.mlp.gate.weight", f"{LAYER}mlp.gate.weight"
        weight = torch.frombuffer(bytearray(make_bytes(stored, "F8_E4M3", [4, 128])), dtype=torch.float8_e4m3fn)
        scale = torch.from_numpy(floats(f"{stored}_scale", []).copy())
        wanted = (weight.to(torch.float32) * scale).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        assert arrangement.tensors[name].dtype == "BF16"
        assert read(arrangement, name) == wanted


def test_router_in_blocks_of_fp8_must_have_whole_blocks(tmp_path):
    problem = refuse(change("qwen3_5_moe_fp8", _with_router("block")), tmp_path)
    assert "has 4 rows of 128 elements, FreeToken needs multiples of 128 and 128" in problem


def test_router_in_nvfp4_is_refused(tmp_path):
    def edit(_spec, config, tensors):
        config["quantization_config"]["ignore"].remove("model.language_model.layers.*.mlp.gate")
        for layer in range(2):
            module = f"model.language_model.layers.{layer}.mlp.gate"
            shard = tensors[f"{module}.weight"][2]
            tensors[f"{module}.weight"] = ["U8", [4, 32], shard]
            tensors[f"{module}.weight_scale"] = ["F8_E4M3", [4, 4], shard]
            tensors[f"{module}.weight_scale_2"] = ["F32", [], shard]
            tensors[f"{module}.input_scale"] = ["F32", [], shard]

    problem = refuse(change("qwen3_5_moe_nvfp4", edit), tmp_path)
    assert "FreeToken holds it as BF16, which can be made of FP8 alone without a GPU" in problem


def test_scales_of_a_kv_cache_are_left_out(tmp_path):
    def add(_spec, _config, tensors):
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = ["F32", [], "model.safetensors"]

    with arranged(change("llama", add), tmp_path) as arrangement:
        assert [entry.name for entry in arrangement.left_out] == ["model.layers.0.self_attn.k_proj.k_scale"]


def test_experts_of_another_format_than_declared_are_refused(tmp_path):
    def forget(_spec, config, _tensors):
        config["quantization_config"]["ignore"].append("*experts*")

    problem = refuse(change("qwen3_5_moe_nvfp4", forget), tmp_path)
    assert "experts are nvfp4, config.json declares them as unquantised" in problem
