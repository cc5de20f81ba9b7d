"""MiniMax, Flint, GLM and DeepSeek: what is left out, made, copied or refused, tensor by tensor."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from freetoken_sources import make_bytes, read_spec, write_spec

import ftw
from ftw.errors import CheckpointError
from ftw.layouts.freetoken.arrangement import FreetokenArrangement
from ftw.layouts.recipes import df11_plan

INDEX = "model.safetensors.index.json"
FILE = "model-00001-of-00001.safetensors"


def change(name, edit):
    """Return the source of a family as `edit` leaves it, which takes its config.json and its tensors."""
    spec = copy.deepcopy(read_spec(name))
    edit(spec["files"]["config.json"], spec["tensors"])
    return spec


def unchanged(_config, _tensors):
    pass


def arrange(spec, folder):
    with ftw.open_checkpoint(write_spec(spec, folder)) as checkpoint:
        return FreetokenArrangement(checkpoint)


def error_of(spec, folder):
    """Return the message that a source is refused with, without its folder."""
    with pytest.raises(CheckpointError) as caught:
        arrange(spec, folder)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{folder}: ")


def reasons(arrangement):
    return {entry.name: entry.reason for entry in arrangement.left_out}


def drop(*parts):
    """Return an edit that takes away the tensors whose names hold all of some parts."""

    def edit(_config, tensors):
        for name in [name for name in tensors if all(part in name for part in parts)]:
            del tensors[name]

    return edit


def plain(name):
    """Return a source's tensors without their quantisation: BF16 weights in place of NVFP4 and MXFP8 ones."""

    def edit(config, tensors):
        config.pop("quantization_config")
        for tensor, (dtype, shape, file) in list(tensors.items()):
            if tensor.endswith((".weight_scale", ".weight_scale_2", ".weight_scale_inv", ".input_scale")):
                del tensors[tensor]
            elif dtype in ("U8", "F8_E4M3"):
                tensors[tensor] = ["BF16", [shape[0], shape[1] * (2 if dtype == "U8" else 1)], file]

    return change(name, edit)


@pytest.mark.parametrize(
    ("name", "banks"),
    [("minimax_m2", 4), ("minimax_m3", 4), ("flint", 4), ("glm4_moe", 4), ("glm_moe_dsa", 4), ("glm5_next", 4)],
)
def test_bf16_experts_become_banks(name, banks, tmp_path):
    spec = read_spec(name) if name == "flint" else plain(name)
    made = arrange(spec, tmp_path)
    found = [tensor for tensor in made.tensors.values() if tensor.kind == "experts_bank"]
    assert made.index_entries["quant_format"] == "bf16"
    assert [tensor.dtype for tensor in found] == ["BF16"] * banks


@pytest.mark.parametrize("name", ["glm4_moe", "glm_moe_dsa", "glm5_next", "minimax_m3", "flint", "deepseek_v4_vision"])
def test_a_source_without_an_index_gives_the_same(name, tmp_path):
    spec = read_spec(name)
    (tmp_path / "indexed").mkdir()
    (tmp_path / "bare").mkdir()
    indexed = arrange(spec, tmp_path / "indexed")
    write_spec(spec, tmp_path / "bare")
    (tmp_path / "bare" / INDEX).unlink(missing_ok=True)
    with ftw.open_checkpoint(tmp_path / "bare") as checkpoint:
        bare = FreetokenArrangement(checkpoint)
    assert not (tmp_path / "bare" / INDEX).exists()
    assert dict(bare.tensors) == dict(indexed.tensors)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("glm4_moe", "model.layers.3.eh_proj.weight"), ("glm_moe_dsa", "model.layers.3.enorm.weight")],
)
def test_layers_that_predict_more_tokens_are_left_out(name, tensor, tmp_path):
    experts = "model.layers.3.mlp.experts.0.gate_proj.weight"
    spec = change(name, lambda _config, tensors: tensors.update({experts: ["U8", [32, 32], FILE]}))
    found = reasons(arrange(spec, tmp_path))
    assert found[tensor] == found[experts] == "FreeToken serves the 3 layers before it"


def test_a_prediction_stage_is_left_out(tmp_path):
    assert reasons(arrange(read_spec("deepseek_v4_vision"), tmp_path)) == {
        "mtp.0.norm.weight": "FreeToken does not predict several tokens at a time"
    }


def test_scales_of_the_kv_cache_are_left_out(tmp_path):
    found = reasons(arrange(read_spec("minimax_m2"), tmp_path))
    assert found["model.layers.0.self_attn.k_proj.k_scale"].startswith("FreeToken's cache of keys and values is BF16")


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (
            "glm_moe_dsa",
            drop("layers.2.", ".experts."),
            "layer 2: has no routed experts, config.json says that 2 layers have them",
        ),
        (
            "glm_moe_dsa",
            lambda _config, tensors: tensors.update(
                {
                    name.replace("layers.1.", "layers.0."): entry
                    for name, entry in list(tensors.items())
                    if "layers.1.mlp.experts" in name
                }
            ),
            "model.layers.0.mlp.experts.0.down_proj.input_scale: experts are nvfp4, config.json declares them as "
            "unquantised",
        ),
        (
            "glm4_moe",
            drop("layers.1.mlp.gate.e_score"),
            "model.layers.1.mlp.e_score_correction_bias: is missing, FreeToken's Glm4MoeForCausalLM needs it",
        ),
        (
            "glm4_moe",
            drop("lm_head"),
            "lm_head.weight: is missing, FreeToken's Glm4MoeForCausalLM needs it",
        ),
        (
            "glm4_moe",
            lambda _config, tensors: tensors.update(
                {"model.layers.1.self_attn.q_proj.weight": ["U8", [128, 32], FILE]}
            ),
            "model.layers.1.self_attn.q_proj.weight: is U8, which FreeToken's model.layers.1.self_attn.q_proj is not "
            "made for",
        ),
        (
            "glm_moe_dsa",
            lambda _config, tensors: tensors.update({"model.layers.1.mlp.gate.weight": ["F8_E4M3", [4, 64], FILE]}),
            "model.layers.1.mlp.gate.weight: is F8_E4M3, which FreeToken's model.layers.1.mlp.gate is not made for",
        ),
        (
            "glm_moe_dsa",
            drop("layers.2.self_attn.indexer.wk"),
            "model.layers.2.self_attn.indexer.wk.weight: is missing, FreeToken's GlmMoeDsaForCausalLM needs it",
        ),
        (
            "glm5_next",
            drop("layers.0.self_attn.f_a_proj"),
            "model.layers.0.self_attn.f_a_proj.weight: is missing, in_proj is made of q_proj, k_proj, v_proj, b_proj, "
            "f_a_proj, g_a_proj",
        ),
        (
            "glm5_next",
            drop("visual.blocks.0.attn.qkv.weight"),
            "visual.blocks.0.attn.qkv.weight: is missing, FreeToken's Glm5NextForConditionalGeneration needs it",
        ),
        (
            "minimax_m3",
            drop("layers.2.self_attn.index_"),
            "model.layers.2.self_attn.index_qk_proj.weight: is missing, FreeToken's "
            "MiniMaxM3SparseForConditionalGeneration needs it",
        ),
        (
            "minimax_m3",
            drop("layers.0.self_attn.o_proj.weight_scale_inv"),
            "language_model.model.layers.0.self_attn.o_proj.weight: its layer stores no scale, config.json declares "
            "its layer as mxfp8",
        ),
        (
            "flint",
            lambda _config, tensors: tensors.update({"model.extra.weight": ["BF16", [4], FILE]}),
            "model.extra.weight: FreeToken's FlintForCausalLM has no place for it",
        ),
        (
            "deepseek_v4_vision",
            drop("layers.1.attn.wo_a.scale"),
            "layers.1.attn.wo_a.weight: is F8_E4M3 [256, 128], it has no scale; F8_E4M3 with F8_E8M0 [2, 1] is needed",
        ),
        (
            "deepseek_v4_vision",
            drop("layers.0.ffn.gate.tid2eid"),
            "model.layers.0.ffn.gate.tid2eid: is missing, FreeToken's DeepseekV4ForCausalLM needs it",
        ),
        (
            "glm_moe_dsa",
            lambda config, _tensors: config.update(first_k_dense_replace="one"),
            "config.json: first_k_dense_replace: is 'one', a count of at most 10000 is needed",
        ),
        (
            "glm5_next",
            lambda config, _tensors: config["text_config"].update(layer_types=["linear_attention"]),
            "config.json: layer_types: is ['linear_attention'], a list of 3 is needed",
        ),
    ],
    ids=[
        *(
            "no experts",
            "experts of a dense layer",
            "no router bias",
            "no head",
            "quantised attention",
            "scaled router",
        ),
        *("no indexer", "part of a fused module", "vision", "fused indexer", "no MXFP8 scale", "unknown tensor"),
        *("wo_a without scale", "no hash table", "not a count", "short list"),
    ],
)
def test_what_freetoken_could_not_serve_is_refused_by_name(name, edit, message, tmp_path):
    assert error_of(change(name, edit), tmp_path) == message


def test_deepseek_v4_needs_the_file_that_tells_of_its_layers(tmp_path):
    spec = read_spec("deepseek_v4_vision")
    del spec["files"]["inference/config.json"]
    assert error_of(spec, tmp_path) == (
        "inference/config.json: is missing, FreeToken reads from it what the layers of a DeepSeek-V4 are"
    )


def test_indexer_tensors_of_layers_that_share_one_are_left_out(tmp_path):
    name = "model.layers.1.self_attn.indexer.wk.weight"
    spec = change("glm_moe_dsa", lambda _config, tensors: tensors.update({name: ["BF16", [64, 64], FILE]}))
    assert reasons(arrange(spec, tmp_path))[name] == "FreeToken's model has no place for it"


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"index_topk_pattern": "FSS"}, [0]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [0, 2]),
        ({}, [0, 1, 2]),
    ],
    ids=["pattern", "frequency", "nothing said"],
)
def test_which_layers_have_an_indexer_is_read_as_transformers_does(keys, layers, tmp_path):
    def edit(config, tensors):
        del config["indexer_types"]
        config.update(keys)
        for name, entry in list(tensors.items()):
            if "layers.0.self_attn.indexer." in name:
                tensors[name.replace("layers.0.", "layers.1.")] = entry

    made = arrange(change("glm_moe_dsa", edit), tmp_path)
    found = [layer for layer in range(3) if f"model.layers.{layer}.self_attn.indexer.wk.weight" in made.tensors]
    assert found == layers


def test_routers_of_flint_without_a_bias_get_zeros_behind_all_others(tmp_path):
    spec = read_spec("flint")
    with ftw.open_checkpoint(write_spec(spec, tmp_path)) as checkpoint:
        made = FreetokenArrangement(checkpoint)
        name = "model.layers.2.mlp.gate.expert_bias"
        weights = [tensor.name for tensor in made.tensors.values() if tensor.kind == "weight"]
        buffer = bytearray(b"\x01" * made.tensors[name].nbytes)
        made.read_into(name, buffer)
    assert name not in spec["tensors"]
    assert weights[-1] == name
    assert buffer == bytes(16)


def test_a_tied_model_needs_no_head(tmp_path):
    def edit(config, tensors):
        config["tie_word_embeddings"] = True
        del tensors["lm_head.weight"]

    assert "lm_head.weight" not in arrange(change("glm_moe_dsa", edit), tmp_path).tensors


def test_parts_of_different_types_are_cast_before_they_are_joined(tmp_path):
    name = "model.language_model.layers.0.self_attn.b_proj.weight"
    spec = change("glm5_next", lambda _config, tensors: tensors.update({name: ["F32", [2, 64], FILE]}))
    with ftw.open_checkpoint(write_spec(spec, tmp_path)) as checkpoint:
        made = FreetokenArrangement(checkpoint)
        joined = made.tensors["model.layers.0.self_attn.in_proj.weight"]
        buffer = bytearray(joined.nbytes)
        made.read_into(joined.name, buffer)
    floats = np.frombuffer(make_bytes(name, "F32", [2, 64]), "<f4")
    row = np.frombuffer(buffer, "<u2").reshape(514, 64)[384:386].reshape(-1).astype(np.uint32) << 16
    assert joined.dtype == "BF16"
    np.testing.assert_allclose(row.view(np.float32), floats, rtol=2**-8)


def test_exponents_are_counted_once_for_each_state_of_a_file(tmp_path, monkeypatch):
    counted = []
    count = df11_plan.plan_df11
    monkeypatch.setattr(df11_plan, "plan_df11", lambda *rest: counted.append(1) or count(*rest))
    spec = read_spec("glm4_moe")
    first = arrange(spec, tmp_path)
    matrices = 3 * 4 + 1
    assert len(counted) == matrices
    with ftw.open_checkpoint(tmp_path) as checkpoint:  # the same files, opened again
        assert dict(FreetokenArrangement(checkpoint).tensors) == dict(first.tensors)
    assert len(counted) == matrices
    (tmp_path / FILE).unlink()
    arrange(spec, tmp_path)  # the same content in another file
    assert len(counted) == 2 * matrices


def deepseek_v41():
    """Return a source of one window layer, one that pools four tokens and one that keeps each, with images."""
    hc = {f"hc_{part}_{role}": ["F32", shape] for part in ("attn", "ffn") for role, shape in
          (("fn", [8, 64]), ("base", [8]), ("scale", [3]))}  # fmt: skip
    tensors = {"embed.weight": ["BF16", [16, 32]], "norm.weight": ["BF16", [32]], "head.weight": ["BF16", [16, 32]]}
    for layer in range(3):
        scaled = ["attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b"]
        scaled += [f"ffn.shared_experts.w{number}" for number in (1, 2, 3)] + ["engram.wkv"] * (layer == 1)
        scaled += ["attn.indexer.wq_b"] * (layer > 0)
        found = {f"{name}.weight": ["F8_E4M3", [32, 32]] for name in scaled}
        found |= {f"{name}.scale": ["F8_E8M0", [1, 1]] for name in scaled}
        plain_ones = ["attn.q_norm.weight", "attn.kv_norm.weight", "attn_norm.weight", "ffn_norm.weight"]
        plain_ones += ["attn.compressor.norm.weight", "attn.indexer.k_norm.weight"] * (layer > 0)
        found |= {name: ["BF16", [32]] for name in plain_ones}
        found |= {"attn.attn_sink": ["F32", [2]], "ffn.gate.weight": ["BF16", [2, 32]]}
        found |= {"ffn.gate.bias": ["F32", [2]], "ffn.gate.bias_vl": ["F32", [2]], **hc}
        if layer:
            found |= {f"attn.indexer.{name}.weight": ["BF16", [2, 32]] for name in ("wk", "weights_proj")}
        if layer == 2:
            found["attn.compressor.wkv.weight"] = ["BF16", [32, 32]]
        if layer == 1:
            found |= {f"attn.compressor.{name}.weight": ["BF16", [32, 32]] for name in ("wkv", "wgate")}
            found |= {"engram.q_weight": ["F32", [2, 32]], "engram.k_weight": ["F32", [2, 32]]}
            found |= {"engram.embed.weight": ["F8_E4M3", [8, 32]], "engram.embed.scale": ["F8_E8M0", [8, 1]]}
        for expert in range(2):
            for part in ("w1", "w2", "w3"):
                found[f"ffn.experts.{expert}.{part}.weight"] = ["I8", [32, 16]]
                found[f"ffn.experts.{expert}.{part}.scale"] = ["F8_E8M0", [32, 1]]
        tensors |= {f"layers.{layer}.{name}": entry for name, entry in found.items()}
    tensors |= {f"image_{name}": ["BF16", [32]] for name in ("start", "end", "newline")}
    tensors |= {"vision.norm.weight": ["F32", [16]], "mtp.0.norm.weight": ["BF16", [32]]}
    modules = {"vision.patch_embed.proj": [16, 48], "aligner.w1": [32, 144], "aligner.w2": [32, 32]}
    tensors |= {f"{name}.weight": ["BF16", shape] for name, shape in modules.items()}
    tensors |= {f"{name}.bias": ["BF16", shape[:1]] for name, shape in modules.items()}
    text = {"hidden_size": 32, "num_hidden_layers": 3, "n_routed_experts": 2, "compress_ratios": [0, 4, 1, 0]}
    text |= {"kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2], "engram_layer_ids": [1]}
    quantized = {"quant_method": "fp8", "weight_block_size": [32, 32], "expert_dtype": "fp4"}
    config = {"architectures": ["DeepseekV41ForCausalLM"], "quantization_config": quantized}
    config |= {"text_config": text, "vision_config": {}}
    shards = {name: f"{'tables' if 'engram.embed' in name or name == 'norm.weight' else 'model'}.safetensors"
              for name in tensors}  # fmt: skip
    return {
        "files": {"config.json": config},
        "tensors": {name: [*entry, shards[name]] for name, entry in tensors.items()},
    }


def test_deepseek_v41_names_what_pools_tokens_and_stacks_the_biases_of_images(tmp_path):
    spec = deepseek_v41()
    with ftw.open_checkpoint(write_spec(spec, tmp_path)) as checkpoint:
        made = FreetokenArrangement(checkpoint)
        stacked = made.tensors["visual.routing_bias"]
        buffer = bytearray(stacked.nbytes)
        made.read_into(stacked.name, buffer)
    biases = [make_bytes(f"layers.{layer}.ffn.gate.bias_vl", "F32", [2]) for layer in range(3)]
    assert (stacked.dtype, stacked.shape, bytes(buffer)) == ("F32", (3, 2), b"".join(biases))
    assert {name for name in made.tensors if ".compressor.wkv" in name} == {
        "model.layers.1.attn.compressor.wkv",
        "model.layers.2.attn.compressor.wkv.weight",
    }
    assert made.tensors["model.layers.0.attn.wo_a"].dtype == "F8_E4M3"
    assert made.tensors["model.layers.0.attn.wo_a_scale"].dtype == "F8_E8M0"
    assert {"head.weight", "model.embed.weight", "visual.image_end"} <= made.tensors.keys()
    assert reasons(made).keys() == {"mtp.0.norm.weight"}


def test_shards_that_hold_tables_of_n_grams_lie_beside_as_they_are(tmp_path):
    with ftw.open_checkpoint(write_spec(deepseek_v41(), tmp_path)) as checkpoint:
        made = FreetokenArrangement(checkpoint)
        (copied,) = made.side_files
        whole = bytearray(copied.nbytes)
        copied.read_into(whole)
        part = bytearray(7)
        copied.read_into(part, offset=11)
    assert copied.name == "tables.safetensors"
    assert set(copied.tensors) == {"layers.1.engram.embed.scale", "layers.1.engram.embed.weight", "norm.weight"}
    assert whole == Path(tmp_path / "tables.safetensors").read_bytes()
    assert part == whole[11:18]
    assert made.index_entries["side_files"] == ["tables.safetensors"]
    assert "model.norm.weight" in made.tensors  # lies in that shard too


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (
            "layers.1.engram.embed.scale",
            "layers.1.engram.embed.scale: is missing, FreeToken's server reads it from a side file",
        ),
        (
            "layers.2.ffn.gate.bias_vl",
            "layers.2.ffn.gate.bias_vl: is missing, FreeToken chooses the experts of image tokens by it",
        ),
        (
            "layers.1.attn.compressor.wgate.weight",
            "model.layers.1.attn.compressor.wgate: is missing, FreeToken's DeepseekV41ForCausalLM needs it",
        ),
    ],
)
def test_deepseek_v41_is_refused_by_the_name_of_what_it_lacks(missing, message, tmp_path):
    spec = deepseek_v41()
    del spec["tensors"][missing]
    assert error_of(spec, tmp_path) == message


def test_two_shards_of_one_name_cannot_both_lie_beside(tmp_path):
    spec = deepseek_v41()
    for name, folder in (("weight", "a"), ("scale", "b")):
        spec["tensors"][f"layers.1.engram.embed.{name}"][2] = f"{folder}/tables.safetensors"
        (tmp_path / folder).mkdir()
    message = error_of(spec, tmp_path)
    assert message.endswith("both hold tables, and must lie beside the FTW under one name")


def test_the_index_of_a_source_names_files_in_folders(tmp_path):
    spec = deepseek_v41()
    (tmp_path / "a").mkdir()
    for role in ("weight", "scale"):
        spec["tensors"][f"layers.1.engram.embed.{role}"][2] = "a/tables.safetensors"
    made = arrange(spec, tmp_path)
    assert json.loads((tmp_path / INDEX).read_text())["weight_map"]["layers.1.engram.embed.scale"].startswith("a/")
    assert [file.name for file in made.side_files] == ["tables.safetensors"]
