"""Which module is quantised, and how, by each way that config.json has to say so."""

import pytest
from arrangements import change
from freetoken_sources import write_spec

import ftw
from ftw.layouts.freetoken.declared_schemes import Scheme, read_declared_schemes

NVFP4_GROUP = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
COMPRESSED = "compressed-tensors"


def group(weights, inputs=None, targets=("Linear",)):
    return {"targets": list(targets), "weights": weights, "input_activations": inputs}


def eight_bits(strategy, **more):
    return {"num_bits": 8, "type": "float", "strategy": strategy, **more}


def compressed(*groups, ignore=()):
    return {"quant_method": COMPRESSED, "config_groups": dict(enumerate(groups)), "ignore": list(ignore)}


def modelopt(algorithm, **more):
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


def schemes_of(declared, folder):
    """Return what a config.json with that quantization_config declares."""
    spec = change("llama", lambda _spec, config, _tensors: config.update(quantization_config=declared))
    folder.mkdir(exist_ok=True)
    with ftw.open_checkpoint(write_spec(spec, folder)) as checkpoint:
        return read_declared_schemes(checkpoint)


@pytest.mark.parametrize(
    ("declared", "module", "scheme"),
    [
        (None, "a.q_proj", None),
        (modelopt("NVFP4"), "a.q_proj", Scheme("nvfp4", has_input_scale=True)),
        (modelopt("nvfp4", with_input_scale=False), "a.q_proj", Scheme("nvfp4")),
        (modelopt("NVFP4", config_groups={"0": group({})}), "a.q_proj", Scheme("nvfp4")),
        (modelopt("NVFP4", config_groups={"0": group({}, {})}), "a.q_proj", Scheme("nvfp4", has_input_scale=True)),
        (modelopt("W4A16_NVFP4"), "a.q_proj", Scheme("nvfp4")),
        (modelopt("FP8"), "a.q_proj", Scheme("fp8", has_input_scale=True)),
        (modelopt("FP8_PB_WO"), "a.q_proj", Scheme("fp8_block")),
        (modelopt("MXFP8"), "a.q_proj", Scheme("mxfp8")),
        ({"quant_algo": "FP8"}, "a.q_proj", Scheme("fp8", has_input_scale=True)),
        (modelopt("FP8", ignore=["a"]), "a.b.q_proj", None),
        (modelopt("FP8", exclude_modules=["a.*.q_proj"]), "a.b.q_proj", None),
        (modelopt("FP8", ignore=["b"]), "a.b.q_proj", Scheme("fp8", has_input_scale=True)),
        (modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "NVFP4"}}), "b", None),
        (
            modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "nvfp4"}}),
            "a.q_proj",
            Scheme("nvfp4", has_input_scale=True),
        ),
        (compressed(group(NVFP4_GROUP)), "a", Scheme("nvfp4")),
        (compressed(group(NVFP4_GROUP, {"dynamic": "local"})), "a", Scheme("nvfp4", has_input_scale=True)),
        (compressed(group(eight_bits("tensor"), {"dynamic": False})), "a", Scheme("fp8", has_input_scale=True)),
        (compressed(group(eight_bits("tensor"), {"dynamic": True})), "a", Scheme("fp8")),
        (compressed(group(eight_bits("channel"))), "a", Scheme("fp8")),
        (compressed(group(eight_bits("block", block_structure=[128, 128]))), "a", Scheme("fp8_block")),
        (compressed(group(NVFP4_GROUP), ignore=["a"]), "a.q_proj", Scheme("nvfp4")),
        (compressed(group(NVFP4_GROUP), ignore=["a.q_proj"]), "a.q_proj", None),
        (compressed(group(NVFP4_GROUP), ignore=["re:.*q_proj$"]), "a.q_proj", None),
        (compressed(group(NVFP4_GROUP, targets=["re:b.*"])), "a.q_proj", None),
        (compressed(group(NVFP4_GROUP), ignore=["LayerNorm", "Linear"]), "a", Scheme("nvfp4")),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "a.q_proj", Scheme("fp8_block")),
        ({"quant_method": "fp8", "weight_block_size": [32, 32]}, "a", Scheme("fp8_block", block=32)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "lm_head", None),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["b.q"]},
            "a.b.q",
            None,
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
            "a.experts.0.w1",
            Scheme("mxfp4"),
        ),
        ({"quant_method": "mxfp4"}, "model.layers.0.mlp.experts", Scheme("mxfp4")),
        ({"quant_method": "mxfp4"}, "model.layers.0.self_attn.q_proj", None),
    ],
    ids=(
        "none modelopt-nvfp4 modelopt-no-input modelopt-weights-alone modelopt-with-inputs modelopt-w4a16 "
        "modelopt-fp8 modelopt-blocks modelopt-mxfp8 modelopt-unnamed modelopt-ignored-above modelopt-"
        "ignored-pattern modelopt-part-is-no-name modelopt-mixed-other modelopt-mixed compressed-nvfp4 "
        "compressed-nvfp4-local compressed-static compressed-dynamic compressed-channel compressed-blocks "
        "compressed-above-is-no-name compressed-ignored compressed-ignored-regex compressed-no-target "
        "compressed-ignored-class fp8 fp8-32 fp8-head fp8-skipped fp8-fp4-experts mxfp4-experts "
        "mxfp4-attention"
    ).split(),
)
def test_module_has_the_scheme_that_is_declared(tmp_path, declared, module, scheme):
    assert schemes_of(declared, tmp_path).of(module) == scheme


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        ([], r"is \[\], an object is needed"),
        ({"quant_method": "gptq"}, r"quant_method is 'gptq', FreeToken reads modelopt, "),
        ({}, r"quant_method is missing"),
        (modelopt("INT8"), r"quant_algo is 'INT8', FreeToken reads NVFP4"),
        (modelopt("FP8", ignore="lm_head"), r"ignore is 'lm_head', a list of names is needed"),
        (modelopt("MIXED_PRECISION"), r"quantized_layers must name the layers"),
        (modelopt("MIXED_PRECISION", quantized_layers={"a": 1}), r"an object of objects is needed"),
        (compressed(group(eight_bits("token"))), r"weights are .*FreeToken reads NVFP4, and FP8"),
        (compressed(group({**NVFP4_GROUP, "group_size": 32})), r"weights are .*FreeToken reads NVFP4, and FP8"),
        (compressed(group([])), r"weights are \[\]|must be objects|weights are \{\}"),
        (compressed(group(NVFP4_GROUP, targets=["Conv2d"])), r"names layers of the class Conv2d"),
        (compressed(group(NVFP4_GROUP), ignore=["re:("]), r"holds '\(', which is no regular expression"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
        ({"quant_method": "fp8"}, r"weight_block_size is None, FreeToken reads \[32, 32\] or \[128, 128\]"),
    ],
    ids=(
        "list gptq empty modelopt-int8 modelopt-text modelopt-mixed-empty modelopt-mixed-number compressed-"
        "token compressed-group-of-32 compressed-list compressed-class compressed-regex fp8-64 fp8-none"
    ).split(),
)
def test_what_freetoken_does_not_read_is_refused(tmp_path, declared, problem):
    with pytest.raises(ftw.CheckpointError, match=problem) as caught:
        schemes_of(declared, tmp_path)
    assert "\n" not in str(caught.value)
