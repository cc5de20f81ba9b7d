"""Forms of a model that FreeToken's converter does not read, or leaves parts of, though its server could serve them."""

import numpy as np
import pytest
from arrangements import arranged, change, read
from freetoken_sources import make_bytes

import ftw

PREFIX = "model.language_model."


def keep(*_):
    """Change nothing."""


def as_text(architecture):
    """Return an edit that leaves the text model, under the names that it has by itself."""

    def edit(spec, config, tensors):
        text = {**config["text_config"], "architectures": [architecture]}
        if "quantization_config" in config:
            ignored = config["quantization_config"]["ignore"]
            text["quantization_config"] = {
                **config["quantization_config"],
                "ignore": [name.replace(PREFIX, "model.") for name in ignored],
            }
        spec["files"]["config.json"] = text
        for name in list(tensors):
            stored = tensors.pop(name)
            if name.startswith((PREFIX, "lm_head.")):
                tensors[name.replace(PREFIX, "model.")] = stored

    return edit


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("gemma4", "Gemma4ForCausalLM"),
        ("gemma4_moe", "Gemma4ForCausalLM"),
        ("gemma4_moe_nvfp4", "Gemma4ForCausalLM"),
        ("gemma4_unified", "Gemma4UnifiedForCausalLM"),
        ("qwen3_5", "Qwen3_5ForCausalLM"),
        ("qwen3_5_moe_nvfp4", "Qwen3_5MoeForCausalLM"),
        ("qwen3_5_nvfp4_ct", "Qwen3_5ForCausalLM"),
    ],
)
def test_text_model_by_itself_has_the_tensors_of_that_within(tmp_path, name, architecture):
    with arranged(change(name, keep), tmp_path / "whole") as arrangement:
        wanted = {key: (one.dtype, one.shape, one.kind) for key, one in arrangement.tensors.items()}
    with arranged(change(name, as_text(architecture)), tmp_path / "text") as arrangement:
        found = {key: (one.dtype, one.shape, one.kind) for key, one in arrangement.tensors.items()}
    vision = ("visual.", "vision_tower.", "vision_embedder.", "embed_vision.")
    assert found == {key: one for key, one in wanted.items() if not key.startswith(vision)}


def test_text_model_leaves_a_vision_tower_out(tmp_path):
    def edit(_spec, config, _tensors):
        config["architectures"] = ["Qwen3_5ForCausalLM"]

    with arranged(change("qwen3_5", edit), tmp_path) as arrangement:
        assert any(".visual." in entry.name for entry in arrangement.left_out)
        assert not any(name.startswith("visual.") for name in arrangement.tensors)


def matrices(name, shape):
    return np.frombuffer(make_bytes(name, "BF16", shape), "<u2").reshape(shape)


def test_stacked_experts_are_told_by_their_shapes(tmp_path):
    names = [f"{PREFIX}layers.0.mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")]

    def turn(_spec, _config, tensors):
        for name in [name for name in tensors if ".experts." in name]:
            first, rows, columns = tensors[name][1]
            tensors[name][1] = [first, columns, rows]

    with arranged(change("qwen3_vl_moe", keep), tmp_path / "input-output") as arrangement:
        banks = [np.frombuffer(read(arrangement, bank), "<u2") for bank in ("gate_up#L00000", "down#L00000")]
        np.testing.assert_array_equal(banks[0].reshape(4, 64, 64), matrices(names[0], [4, 64, 64]).transpose(0, 2, 1))
        np.testing.assert_array_equal(banks[1].reshape(4, 64, 32), matrices(names[1], [4, 32, 64]).transpose(0, 2, 1))
    with arranged(change("qwen3_vl_moe", turn), tmp_path / "output-input") as arrangement:
        assert read(arrangement, "gate_up#L00000") == make_bytes(names[0], "BF16", [4, 64, 64])
        assert read(arrangement, "down#L00000") == make_bytes(names[1], "BF16", [4, 64, 32])


def test_experts_of_their_own_become_banks_of_bf16(tmp_path):
    def split(_spec, _config, tensors):
        for name in [name for name in tensors if ".mlp.experts." in name]:
            stored = tensors.pop(name)
            parts = (
                {"down_proj": [64, 32]} if name.endswith("down_proj") else {"gate_proj": [32, 64], "up_proj": [32, 64]}
            )
            above = name.rpartition(".")[0]
            tensors.update(
                {
                    f"{above}.{e}.{part}.weight": ["BF16", shape, stored[2]]
                    for e in range(4)
                    for part, shape in parts.items()
                }
            )

    with arranged(change("qwen3_5_moe", split), tmp_path) as arrangement:
        parts = [
            f"{PREFIX}layers.1.mlp.experts.{e}.{part}.weight" for e in range(4) for part in ("gate_proj", "up_proj")
        ]
        assert read(arrangement, "gate_up#L00001") == b"".join(make_bytes(part, "BF16", [32, 64]) for part in parts)
        assert arrangement.tensors["down#L00001"].shape == (4, 64, 32)


def _share_keys(_spec, config, tensors):
    config["text_config"]["attention_k_eq_v"] = True
    del tensors[f"{PREFIX}layers.1.self_attn.v_proj.weight"]


def test_key_projection_stands_for_the_values_too(tmp_path):
    with arranged(change("gemma4", _share_keys), tmp_path) as arrangement:
        whole = read(arrangement, "model.layers.1.self_attn.qkv_proj.weight")
        key = make_bytes(f"{PREFIX}layers.1.self_attn.k_proj.weight", "BF16", [128, 64])
        query = make_bytes(f"{PREFIX}layers.1.self_attn.q_proj.weight", "BF16", [256, 64])
        assert whole == query + key + key


def test_key_projection_stands_for_nothing_in_a_layer_of_another_kind(tmp_path):
    def edit(spec, config, tensors):
        _share_keys(spec, config, tensors)
        config["text_config"]["layer_types"] = ["sliding_attention", "sliding_attention"]

    with (
        pytest.raises(ftw.CheckpointError, match=r"v_proj\.weight: is missing"),
        arranged(change("gemma4", edit), tmp_path),
    ):
        pass


def test_gemmas_head_and_audio_are_left_out(tmp_path):
    def add(_spec, _config, tensors):
        tensors["lm_head.weight"] = tensors[f"{PREFIX}embed_tokens.weight"]
        tensors["model.audio_tower.layer.weight"] = tensors[f"{PREFIX}norm.weight"]

    with arranged(change("gemma4", add), tmp_path) as arrangement:
        assert {entry.name: entry.reason for entry in arrangement.left_out} == {
            "lm_head.weight": "the model's head is its embedding",
            "model.audio_tower.layer.weight": "FreeToken does not load the part for audio",
        }


def test_vision_tower_with_clipped_layers_is_refused(tmp_path):
    def clip(_spec, config, _tensors):
        config["vision_config"]["use_clipped_linears"] = True

    with (
        pytest.raises(ftw.CheckpointError, match=r"use_clipped_linears: is True, FreeToken's Gemma4\w+ takes False$"),
        arranged(change("gemma4", clip), tmp_path),
    ):
        pass
