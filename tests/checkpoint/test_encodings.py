"""Encodings: every scheme of quantised checkpoints, on the table, on the layers alone, on the LM head, on everything.

Names, types and shapes of the tensors are those that each library writes. They were read off its own output: torchao
0.18.0, optimum-quanto 0.2.7, HQQ 0.2.8, compressed-tensors 0.20.1; or off its source: transformers 5.24.0 (FP8,
FBGEMM, EETQ, metal, Gemma QAT, HIGGS), ModelOpt 0.47.0.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from builders import llama_config, write_checkpoint

import ftw
from ftw.verdict.report import Report

ROWS, COLUMNS = 384, 256  # multiples of every block, and no two sides alike
TABLE, HEAD, LAYER = "model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj"

U8, I8, I16, I32, I64, U32 = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint32
F8, E8M0, F32, F16, BF16 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32, torch.float16, torch.bfloat16

Parts = dict[str, tuple[Any, ...]]


class Scheme(NamedTuple):
    """What a verdict calls a scheme, what config.json says of it, and its tensors for a module of r rows, c columns."""

    named: str
    quantization: dict[str, Any]
    parts: Callable[[int, int], Parts]


def one_scale(quantization: dict[str, Any], scale: str, *, kind: str = "FP8", **others: tuple[Any, ...]) -> Scheme:
    dtype = {"FP8": F8, "INT8": I8}[kind]
    parts = {scale: (F32,), **others}
    return Scheme(
        f"{kind} with one scale for the tensor", quantization, lambda r, c: {"weight": (dtype, r, c), **parts}
    )


def blocks(named: str, quantization: dict[str, Any], scale: str, parts: Callable[[int, int], Parts]) -> Scheme:
    return Scheme(
        f"FP8 with a scale for each {named}", quantization, lambda r, c: {"weight": (F8, r, c), **parts(r, c)}
    )


FP8, FBGEMM, AWQ, GPTQ = ({"quant_method": method} for method in ("fp8", "fbgemm_fp8", "awq", "gptq"))
TORCHAO, BNB, EETQ, HQQ = ({"quant_method": method} for method in ("torchao", "bitsandbytes", "eetq", "hqq"))
MODELOPT, QUANTO, METAL, GEMMA = ({"quant_method": method} for method in ("modelopt", "quanto", "metal", "gemma"))


def compressed(format_name: str) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": format_name, "quantization_status": "compressed"}


def bnb_4bit(kind: str) -> Scheme:
    return Scheme("bitsandbytes 4-bit", {**BNB, "load_in_4bit": True}, lambda r, c: {
        "weight": (U8, r * c // 2, 1), "weight.absmax": (F32, r * c // 64), "weight.quant_map": (F32, 16),
        f"weight.quant_state.bitsandbytes__{kind}": (U8, 80),
    })  # fmt: skip


SCHEMES = {
    # FP8: one scale, one for each row, one for each block.
    "fp8_tensor": one_scale(FP8, "weight_scale"),  # transformers' FP8 embedding, of Qwen4Exp's n-gram tables
    "fp8_static": one_scale(FP8, "weight_scale_inv", activation_scale=(F32,)),
    "fp8_modelopt": one_scale({**MODELOPT, "quant_algo": "FP8"}, "weight_scale", input_scale=(F32,)),
    "fp8_ct_tensor": one_scale(compressed("naive-quantized"), "weight_scale"),
    "fp8_comfyui": Scheme(
        "FP8 with one scale for the tensor", {}, lambda r, c: {
            "weight": (F8, r, c), "scale_weight": (F32,), "scale_input": (F32,),
        },
    ),
    "fp8_deepseek": blocks("block of 128 x 128", {**FP8, "weight_block_size": [128, 128]}, "weight_scale_inv",
                           lambda r, c: {"weight_scale_inv": (F32, r // 128, c // 128)}),
    "fp8_deepseek_e8m0": blocks("block of 128 x 128", {**FP8, "scale_fmt": "ue8m0"}, "weight_scale_inv",
                                lambda r, c: {"weight_scale_inv": (E8M0, r // 128, c // 128)}),
    "fp8_deepseek_native": blocks("block of 128 x 128", FP8, "scale",
                                  lambda r, c: {"scale": (E8M0, r // 128, c // 128)}),
    "fp8_fbgemm": blocks("row", FBGEMM, "weight_scale", lambda r, c: {"weight_scale": (F32, r, 1)}),
    "fp8_ct_channel": blocks("row", compressed("float-quantized"), "weight_scale",
                             lambda r, c: {"weight_scale": (BF16, r, 1)}),
    "fp8_row_vector": blocks("row", FP8, "weight_scale", lambda r, c: {"weight_scale": (F32, r)}),
    "mxfp8_ct": blocks("block of 1 x 32", compressed("mxfp8-quantized"), "weight_scale",
                       lambda r, c: {"weight_scale": (U8, r, c // 32)}),
    # compressed-tensors
    "ct_int8": Scheme("INT8 with a scale for each row", compressed("int-quantized"), lambda r, c: {
        "weight": (I8, r, c), "weight_scale": (BF16, r, 1),
    }),
    "ct_pack": Scheme("compressed-tensors pack-quantized", compressed("pack-quantized"), lambda r, c: {
        "weight_packed": (I32, r, c // 8), "weight_scale": (BF16, r, c // 32), "weight_shape": (I64, 2),
    }),
    "ct_pack_asymmetric": Scheme("compressed-tensors pack-quantized", compressed("pack-quantized"), lambda r, c: {
        "weight_packed": (I32, r, c // 8), "weight_scale": (BF16, r, c // 32), "weight_shape": (I64, 2),
        "weight_zero_point": (I32, r // 8, c // 32), "weight_g_idx": (I32, c),
    }),
    "ct_nvfp4": Scheme("compressed-tensors NVFP4", compressed("nvfp4-pack-quantized"), lambda r, c: {
        "weight_packed": (U8, r, c // 2), "weight_scale": (F8, r, c // 16), "weight_global_scale": (F32, 1),
    }),
    "ct_mxfp4": Scheme("compressed-tensors", compressed("mxfp4-pack-quantized"), lambda r, c: {
        "weight_packed": (U8, r, c // 2), "weight_scale": (U8, r, c // 32),
    }),
    # ModelOpt
    "modelopt_nvfp4": Scheme("ModelOpt NVFP4", {**MODELOPT, "quant_algo": "NVFP4"}, lambda r, c: {
        "weight": (U8, r, c // 2), "weight_scale": (F8, r, c // 16), "weight_scale_2": (F32,), "input_scale": (F32,),
    }),
    "modelopt_nvfp4_weights_alone": Scheme("ModelOpt NVFP4", MODELOPT, lambda r, c: {
        "weight": (U8, r, c // 2), "weight_scale": (F8, r, c // 16), "weight_scale_2": (F32,),
    }),
    # MLX and transformers' metal
    "mlx_4bit": Scheme("MLX affine", {"group_size": 64, "bits": 4}, lambda r, c: {
        "weight": (U32, r, c // 8), "scales": (F16, r, c // 64), "biases": (F16, r, c // 64),
    }),
    "mlx_6bit": Scheme("MLX affine", {"group_size": 64, "bits": 6}, lambda r, c: {
        "weight": (U32, r, c * 6 // 32), "scales": (BF16, r, c // 64), "biases": (BF16, r, c // 64),
    }),
    "metal": Scheme("metal affine", METAL, lambda r, c: {
        "weight": (U32, r, c // 8), "scales": (F32, r, c // 64), "qbiases": (F32, r, c // 64),
    }),
    # Gemma QAT
    "gemma_qat_8bit": Scheme("Gemma QAT", GEMMA, lambda r, c: {
        "embedding_quantized": (I8, r, c), "embedding_scale": (F32, r, 1),
    }),
    "gemma_qat_4bit": Scheme("Gemma QAT", GEMMA, lambda r, c: {
        "embedding_quantized": (U8, r, c // 2), "embedding_scale": (F32, r, 1),
    }),
    # torchao
    "torchao_int8": Scheme("torchao", TORCHAO, lambda r, c: {
        "_weight_qdata": (I8, r, c), "_weight_scale": (F32, r, 1), "_weight_zero_point": (I8, r, 1),
    }),
    "torchao_fp8": Scheme("torchao", TORCHAO, lambda r, c: {"_weight_qdata": (F8, r, c), "_weight_scale": (F32, r, 1)}),
    # bitsandbytes
    "bnb_8bit": Scheme("bitsandbytes 8-bit", {**BNB, "load_in_8bit": True}, lambda r, c: {
        "weight": (I8, r, c), "SCB": (F32, r), "weight_format": (U8,),
    }),
    "bnb_nf4": bnb_4bit("nf4"),
    "bnb_fp4": bnb_4bit("fp4"),
    "bnb_nf4_double": Scheme("bitsandbytes 4-bit", {**BNB, "bnb_4bit_use_double_quant": True}, lambda r, c: {
        "weight": (U8, r * c // 2, 1), "weight.absmax": (U8, r * c // 64), "weight.quant_map": (F32, 16),
        "weight.nested_absmax": (F32, r * c // 64 // 256), "weight.nested_quant_map": (F32, 256),
        "weight.quant_state.bitsandbytes__nf4": (U8, 80),
    }),
    # GPTQ and AWQ: the rows of `qweight` are inputs, not tokens.
    "gptq": Scheme("GPTQ", {**GPTQ, "bits": 4}, lambda r, c: {
        "qweight": (I32, c // 8, r), "qzeros": (I32, c // 128, r // 8), "scales": (F16, c // 128, r), "g_idx": (I32, c),
    }),
    "awq": Scheme("AWQ or GPTQ", {**AWQ, "bits": 4}, lambda r, c: {
        "qweight": (I32, c, r // 8), "qzeros": (I32, c // 128, r // 8), "scales": (F16, c // 128, r),
    }),
    "auto_round": Scheme("AWQ or GPTQ", {"quant_method": "auto-round"}, lambda r, c: {
        "qweight": (I32, c // 8, r), "qzeros": (I32, c // 128, r // 8), "scales": (F16, c // 128, r),
    }),
    # quanto, HQQ, EETQ
    "quanto_int8": Scheme("quanto", QUANTO, lambda r, c: {
        "weight._data": (I8, r, c), "weight._scale": (F32, r, 1), "input_scale": (F32,), "output_scale": (F32,),
    }),
    "quanto_int4": Scheme("quanto", QUANTO, lambda r, c: {
        "weight._data._data": (U8, r // 2, c), "weight._scale": (F32, r, 1), "weight._shift": (F32, r, 1),
        "input_scale": (F32,), "output_scale": (F32,),
    }),
    "hqq_4bit": Scheme("HQQ", HQQ, lambda r, c: {
        "W_q": (U8, r // 2, c), "nbits": (I32,), "group_size": (I32,), "shape": (I64, 2), "scale": (F16, r, 1),
        "zero": (F16, r, 1), "axis": (I32,), "packing": (U8, 7), "unpack_view_dtype": (U8, 11), "view_as_float": (U8,),
        "quant_scale": (U8,), "quant_zero": (U8,), "compute_dtype": (U8, 13), "offload_meta": (U8,),
        "encoded_state_dict": (U8,), "stores_quant_config": (U8,), "channel_wise": (U8,), "optimize": (U8,),
        "round_zero": (U8,),
    }),
    "eetq": Scheme("EETQ", EETQ, lambda r, c: {"weight": (I8, c, r), "weight_scales": (F16, r)}),
    # Codebooks
    "aqlm": Scheme("AQLM", {"quant_method": "aqlm"}, lambda r, c: {
        "codes": (I16, r, c // 8, 1), "codebooks": (F16, 1, 256, 1, 8), "scales": (F16, r, 1, 1, 1),
    }),
}  # fmt: skip
# What these store for a linear layer differs from what they store for an embedding.
LINEAR = {
    "gemma_qat_8bit": lambda r, c: {
        "weight": (I8, r, c), "weight_scale": (F32, r, 1), "input_activation_scale": (F32,),
        "output_activation_scale": (F32,),
    },
    "gemma_qat_4bit": lambda r, c: {
        "weight": (U8, r, c // 2), "weight_scale": (F32, r, 1), "input_activation_scale": (F32,),
        "output_activation_scale": (F32,),
    },
}  # fmt: skip
# Schemes whose libraries quantise linear layers alone.
LAYERS_ALONE: dict[str, Callable[[int, int], Parts]] = {
    "vptq": lambda r, c: {
        "centroids.weight": (F16, 1, 65536 * 8 // 64), "indices": (I32, 1, c // 8, r // 2), "perm": (I16, c),
    },
    "higgs": lambda r, c: {
        "weight": (I16, r // 4, c), "scales": (F16, r, c // 256), "tables": (F16, 16), "tables2": (F16, 16, 16, 2),
    },
    "spqr": lambda r, c: {
        "dense_weights": (I64, r * c // 16), "row_offsets": (I32, r + 1), "col_vals": (I32, 5), "in_perm": (I64, c),
    },
    "bitnet": lambda r, c: {"weight": (U8, r // 4, c), "weight_scale": (BF16, 1)},
    "quark": lambda r, c: {"weight": (F8, r, c), "weight_scale": (F32,), "input_scale": (F32,)},
    "fp_quant": lambda r, c: {"qweight": (U8, r, c // 2), "scales": (U8, r, c // 32)},
    "fp_quant_pseudo": lambda r, c: {"dqweight": (BF16, r, c), "forward_hadamard_matrix": (BF16, 32, 32)},
    "mxfp4_gpt_oss": lambda r, c: {
        "experts.gate_up_proj_blocks": (U8, 4, r, c // 32, 16), "experts.gate_up_proj_scales": (U8, 4, r, c // 32),
        "experts.gate_up_proj_bias": (BF16, 4, r),
    },
}  # fmt: skip
LINEAR_HEADS = [scheme for scheme in LAYERS_ALONE if scheme != "mxfp4_gpt_oss"]  # that one, experts alone


def filled(parts: Parts, path: str, value: int = 1) -> dict[str, torch.Tensor]:
    """Return the tensors of a module, all of one value."""
    return {
        f"{path}.{suffix}": torch.full(shape, value, dtype=F32).to(dtype) for suffix, (dtype, *shape) in parts.items()
    }


def plain(path: str, value: int = 1) -> dict[str, torch.Tensor]:
    return filled({"weight": (BF16, ROWS, COLUMNS)}, path, value)


def inspect(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None) -> Report:
    config = llama_config(
        vocab_size=ROWS, hidden_size=COLUMNS, **({"quantization_config": quantization} if quantization else {})
    )
    return ftw.inspect(write_checkpoint(folder, tensors, config))


def assert_plain_and_untied(report: Report, head: str) -> None:
    [table] = report.verdict.tables
    assert (table.name, table.rows, table.columns, table.dtype) == (f"{TABLE}.weight", ROWS, COLUMNS, "BF16")
    assert (table.eligible, table.reason) == (True, "ok")
    assert table.detail == f"untied: config says tie_word_embeddings=false and {head} is stored"
    assert report.verdict.tied is False


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_scheme_on_the_table_is_refused_and_named(tmp_path: Path, scheme: str) -> None:
    named, quantization, parts = SCHEMES[scheme]
    tensors = filled(parts(ROWS, COLUMNS), TABLE)
    report = inspect(tmp_path, {**tensors, **plain(HEAD, 2), **plain(LAYER)}, quantization)
    [table] = report.verdict.tables
    assert (table.role, table.reason, table.eligible) == ("token_embedding", "unsupported_encoding", False)
    assert table.nbytes >= max(tensor.nbytes for tensor in tensors.values())
    assert not report.is_host_eligible
    assert report.gain.vram_bytes == 0
    assert table.detail.startswith(f"{named}: ")
    assert table.detail.endswith(" lie beside it, so its rows are not plain")


@pytest.mark.parametrize("scheme", [*SCHEMES, *LAYERS_ALONE], ids=str)
def test_scheme_on_the_layers_leaves_a_plain_table_eligible(tmp_path: Path, scheme: str) -> None:
    parts = LAYERS_ALONE.get(scheme) or LINEAR.get(scheme) or SCHEMES[scheme].parts
    quantization = SCHEMES[scheme].quantization if scheme in SCHEMES else {"quant_method": scheme}
    tensors = {**plain(TABLE), **plain(HEAD, 2), **filled(parts(ROWS, COLUMNS), LAYER)}
    assert_plain_and_untied(inspect(tmp_path, tensors, quantization), "lm_head.weight")


@pytest.mark.parametrize("scheme", [*SCHEMES, *LINEAR_HEADS], ids=str)
def test_scheme_on_the_head_leaves_it_a_head(tmp_path: Path, scheme: str) -> None:
    """A head without a `weight` is stored nevertheless: it must not be taken for one that is tied."""
    parts = LAYERS_ALONE.get(scheme) or LINEAR.get(scheme) or SCHEMES[scheme].parts
    quantization = SCHEMES[scheme].quantization if scheme in SCHEMES else {"quant_method": scheme}
    report = inspect(tmp_path, {**plain(TABLE), **filled(parts(ROWS, COLUMNS), HEAD, 2)}, quantization)
    [head] = [name for name in report.verdict.tie_evidence if name.startswith("tensor:")]
    assert_plain_and_untied(report, head.removeprefix("tensor:"))
    assert head.startswith(f"tensor:{HEAD}.")


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_scheme_on_everything_is_refused_as_untied(tmp_path: Path, scheme: str) -> None:
    """Table and head have equal bytes here, and the configuration says that they are two weights."""
    _, quantization, parts = SCHEMES[scheme]
    tensors = {name: tensor for path in (TABLE, HEAD) for name, tensor in filled(parts(ROWS, COLUMNS), path).items()}
    verdict = inspect(tmp_path, tensors, quantization).verdict
    assert (verdict.tied, verdict.token_embedding.reason) == (False, "unsupported_encoding")


@pytest.mark.parametrize("suffix", ["scale", "weight_scale", "input_scale", "g_idx"], ids=str)
def test_scale_alone_is_no_head(tmp_path: Path, suffix: str) -> None:
    """Hypothetical leftovers of an export that dropped a tied head."""
    report = inspect(tmp_path, {**plain(TABLE), f"{HEAD}.{suffix}": torch.ones(1)})
    assert (report.verdict.tied, report.verdict.token_embedding.reason) == (True, "tied")


@pytest.mark.parametrize("dtype", [F8, torch.float8_e5m2], ids=str)
def test_bare_fp8_table_is_plain(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {**filled({"weight": (dtype, ROWS, COLUMNS)}, TABLE), **plain(HEAD, 2)}
    [table] = inspect(tmp_path, tensors, FP8).verdict.tables
    assert (table.eligible, table.reason, table.row_bytes) == (True, "ok", COLUMNS)


def test_config_that_lists_the_table_does_not_count(tmp_path: Path) -> None:
    """ModelOpt's exclude_modules and compressed-tensors' targets name modules that are stored otherwise."""
    quantization = {**compressed("pack-quantized"), "config_groups": {"g": {"targets": ["Embedding", "Linear"]}}}
    assert_plain_and_untied(inspect(tmp_path, {**plain(TABLE), **plain(HEAD, 2)}, quantization), "lm_head.weight")


# DF11

DF11_CONFIG = {
    "version": "0.5.0", "threads_per_block": [512], "bytes_per_thread": 8,
    "pattern_dict": {"model\\.embed_tokens": [], "lm_head": [], "model\\.layers\\.\\d+": ["self_attn.q_proj"]},
}  # fmt: skip


def df11(path: str, *, old: bool = False) -> dict[str, torch.Tensor]:
    """Return what DF11 stores in place of one weight of ROWS x COLUMNS; releases before 0.3 had no split_positions."""
    elements, nbytes = ROWS * COLUMNS, 40_000
    num_blocks = -(-nbytes // 4096)
    parts = {
        "luts": (U8, 3, 256), "encoded_exponent": (U8, nbytes), "sign_mantissa": (U8, elements),
        "output_positions": (U8, 4 * (num_blocks + 1)), "gaps": (U8, 5 * 512 * num_blocks // 8),
        **({} if old else {"split_positions": (I64, 0)}),
    }  # fmt: skip
    return filled(parts, path)


def write_df11(folder: Path, modules: list[str], rest: dict[str, torch.Tensor], *, layout: str) -> Path:
    config = llama_config(
        vocab_size=ROWS, hidden_size=COLUMNS, **({} if layout == "one-file-bare" else {"dfloat11_config": DF11_CONFIG})
    )
    if layout == "file-per-module":
        for path in modules:
            write_checkpoint(folder, df11(path), config, f"{path.replace('.', '_')}.safetensors")
        return write_checkpoint(folder, rest, config)
    packed = {name: tensor for path in modules for name, tensor in df11(path).items()}
    return write_checkpoint(folder, {**packed, **rest}, config)


LAYOUTS = ["file-per-module", "one-file", "one-file-bare"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_df11_table_is_refused(tmp_path: Path, layout: str) -> None:
    modules = [TABLE, HEAD, "model.layers.0"]
    report = ftw.inspect(write_df11(tmp_path, modules, {"model.norm.weight": torch.ones(COLUMNS)}, layout=layout))
    assert report.num_tensors == 3 * 6 + 1
    [table] = report.verdict.tables
    assert (table.name, table.reason, table.eligible, table.rows) == (TABLE, "df11", False, None)
    option = "--decode-df11 (decode_df11=True) makes a plain bf16 table of it"
    assert table.detail == f"DF11 stores Huffman-coded exponents, so single rows cannot be read; {option}"
    assert table.nbytes == sum(tensor.nbytes for tensor in df11(TABLE).values())
    assert report.verdict.tied is False
    with pytest.raises(ftw.NotEligibleError, match="DF11 stores Huffman-coded exponents"):
        ftw.convert(tmp_path, tmp_path / "out", embed="host")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_df11_on_layers_and_head_leaves_a_plain_table_eligible(tmp_path: Path, layout: str) -> None:
    report = ftw.inspect(write_df11(tmp_path, [HEAD, "model.layers.0"], plain(TABLE), layout=layout))
    assert report.num_tensors == 2 * 6 + 1
    [head] = [name for name in report.verdict.tie_evidence if name.startswith("tensor:lm_head.")]
    assert_plain_and_untied(report, head.removeprefix("tensor:"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_df11_on_layers_alone_does_not_hide_a_tie(tmp_path: Path, layout: str) -> None:
    report = ftw.inspect(write_df11(tmp_path, ["model.layers.0"], plain(TABLE), layout=layout))
    assert (report.verdict.tied, report.verdict.token_embedding.reason) == (True, "tied")


def test_df11_of_an_old_release_is_known(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**df11(TABLE, old=True), **plain(HEAD)}, llama_config())
    assert ftw.inspect(tmp_path).verdict.token_embedding.reason == "df11"


def test_df11_table_that_is_tied_is_called_tied(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, df11(TABLE), llama_config(tie_word_embeddings=True))
    assert ftw.inspect(tmp_path).verdict.token_embedding.reason == "tied"
