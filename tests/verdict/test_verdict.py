"""Verdicts: what lies beside a table, or in place of it, and what a table must be like for its rows to be read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, llama_tensors, safetensors_bytes, tensor_entry, write_checkpoint

import ftw
from ftw.verdict.placement import plan_placement
from ftw.verdict.verdict import TableVerdict, Verdict, judge

MODULE = "model.embed_tokens"
TABLE = f"{MODULE}.weight"


def judge_folder(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Verdict:
    """Write the tensors in place of an untied Llama's table, and judge them."""
    rest = {name: tensor for name, tensor in llama_tensors().items() if name != TABLE}
    write_checkpoint(folder, {**rest, **tensors}, llama_config() if config is None else config)
    with ftw.open_checkpoint(folder) as checkpoint:
        return judge(checkpoint)


def judge_one(folder: Path, tensors: dict[str, torch.Tensor]) -> TableVerdict:
    """Return the verdict on the one table."""
    [table] = judge_folder(folder, tensors).tables
    assert table.role == "token_embedding"
    assert table.eligible is (table.reason == "ok")
    return table


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of ones."""
    return torch.ones(shape).to(dtype)


U8, I8, I32, I64 = torch.uint8, torch.int8, torch.int32, torch.int64
F8, F32, F16, BF16 = torch.float8_e4m3fn, torch.float32, torch.float16, torch.bfloat16

PACKED = {
    "fp8_blocks": {"weight": (F8, 64, 8), "weight_scale_inv": (F32, 1, 1)},
    "fp8_rows": {"weight": (F8, 64, 8), "weight_scale": (F32, 64, 1)},
    "fp8_input_scale": {"weight": (F8, 64, 8), "weight_scale": (F32, 1), "input_scale": (F32, 1)},
    "compressed_tensors": {
        "weight_packed": (I32, 64, 1), "weight_scale": (BF16, 64, 1), "weight_shape": (I64, 2),
        "weight_zero_point": (I32, 8, 1), "weight_g_idx": (I32, 8),
    },
    "compressed_tensors_nvfp4": {
        "weight_packed": (U8, 64, 4), "weight_scale": (F8, 64, 1), "weight_global_scale": (F32, 1),
    },
    "modelopt_nvfp4": {"weight": (U8, 64, 4), "weight_scale": (F8, 64, 1), "weight_scale_2": (F32,)},
    "modelopt_fp8": {"weight": (F8, 64, 8), "weight_scale": (F32,), "input_scale": (F32,)},
    "mlx": {"weight": (torch.uint32, 64, 1), "scales": (BF16, 64, 1), "biases": (BF16, 64, 1)},
    "metal": {"weight": (torch.uint32, 64, 1), "scales": (BF16, 64, 1), "qbiases": (BF16, 64, 1)},
    "gemma_qat": {"embedding_quantized": (I8, 64, 8), "embedding_scale": (F32, 64, 1)},
    "torchao": {
        "_weight_qdata": (I8, 64, 8), "_weight_scale": (BF16, 64, 1), "_weight_zero_point": (I8, 64, 1),
    },
    "bnb_int8": {"weight": (I8, 64, 8), "SCB": (F32, 64), "weight_format": (U8,)},
    "bnb_nf4": {
        "weight": (U8, 256, 1), "weight.absmax": (U8, 8), "weight.quant_map": (F32, 16),
        "weight.nested_absmax": (F32, 1), "weight.quant_state.bitsandbytes__nf4": (U8, 80),
    },
    "quanto": {"weight._data": (I8, 64, 8), "weight._scale": (BF16, 64, 1), "weight._shift": (BF16, 64, 1)},
    "hqq": {"W_q": (U8, 32, 8), "scale": (F16, 1, 64), "zero": (F16, 1, 64), "shape": (I64, 2), "axis": (I64,)},
    "gptq": {"qweight": (I32, 1, 64), "qzeros": (I32, 1, 8), "scales": (F16, 1, 64), "g_idx": (I32, 8)},
    "eetq": {"weight": (I8, 64, 8), "weight_scales": (F16, 64)},
    "aqlm": {"codes": (I8, 64, 1, 1), "codebooks": (F16, 1, 256, 1, 8), "scales": (F16, 64, 1, 1, 1)},
    "comfyui_fp8": {"weight": (F8, 64, 8), "scale_weight": (F32,), "scale_input": (F32,)},
    "scaled_plain": {"weight": (BF16, 64, 8), "weight_scale": (F32, 1)},
}  # fmt: skip
# What says nothing of the packing, and is no part of the module for the verdict.
SILENT = {"weight", "axis", "weight_format"}


@pytest.mark.parametrize("parts", PACKED.values(), ids=PACKED)
def test_packed_table_is_refused_with_what_lies_beside_it(tmp_path: Path, parts: dict[str, Any]) -> None:
    tensors = {f"{MODULE}.{suffix}": filled(dtype, *shape) for suffix, (dtype, *shape) in parts.items()}
    table = judge_one(tmp_path, tensors)
    assert table.reason == "unsupported_encoding"
    for suffix in set(parts) - SILENT:
        assert suffix in table.detail
    assert table.name == (TABLE if "weight" in parts else MODULE)
    assert table.nbytes >= max(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("left", ["luts", "encoded_exponent", "sign_mantissa", None], ids=str)
def test_df11_table_is_known_by_its_suffixes(tmp_path: Path, left: str | None) -> None:
    shapes = {
        "luts": (2, 256), "encoded_exponent": (100,), "sign_mantissa": (512,), "output_positions": (8,), "gaps": (320,),
    }  # fmt: skip
    kept = [suffix for suffix in shapes if left in (None, suffix) or suffix in ("output_positions", "gaps")]
    tensors = {f"{MODULE}.{suffix}": filled(U8, *shapes[suffix]) for suffix in kept}
    tensors[f"{MODULE}.split_positions"] = filled(I64, 0)
    table = judge_one(tmp_path, tensors)
    assert (table.name, table.reason, table.rows, table.columns) == (MODULE, "df11", None, None)
    assert table.nbytes == sum(tensor.nbytes for tensor in tensors.values())


def test_df11_layers_leave_a_plain_table_eligible(tmp_path: Path) -> None:
    layer = {"model.layers.0.encoded_exponent": filled(U8, 9), "model.layers.0.luts": filled(U8, 2, 256)}
    assert judge_folder(tmp_path, {TABLE: filled(BF16, 64, 8), **layer}).tables[0].eligible


def test_table_that_is_both_tied_and_packed_is_called_tied(tmp_path: Path) -> None:
    tensors = {TABLE: filled(F8, 64, 8), f"{MODULE}.weight_scale": filled(F32, 1)}
    write_checkpoint(tmp_path, tensors, llama_config(tie_word_embeddings=True))
    [table] = ftw.inspect(tmp_path).verdict.tables
    assert (table.reason, table.eligible) == ("tied", False)


@pytest.mark.parametrize("dtype", [torch.float64, F32, F16, BF16, F8, torch.float8_e5m2], ids=str)
def test_plain_floating_point_table_is_eligible(tmp_path: Path, dtype: torch.dtype) -> None:
    table = judge_one(tmp_path, {TABLE: filled(dtype, 64, 8)})
    assert (table.rows, table.columns, table.reason) == (64, 8, "ok")
    assert table.row_bytes == 8 * dtype.itemsize
    assert table.nbytes == 64 * 8 * dtype.itemsize


@pytest.mark.parametrize(
    "dtype", [I8, U8, torch.int16, I32, torch.uint32, I64, torch.bool, torch.float8_e8m0fnu, torch.complex64], ids=str
)
def test_table_of_another_type_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    table = judge_one(tmp_path, {TABLE: filled(dtype, 64, 8)})
    assert table.reason == "unsupported_encoding"
    assert f"its elements are {table.dtype} without scales" in table.detail


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"], ids=str)
def test_table_of_a_narrow_type_is_refused(tmp_path: Path, dtype: str) -> None:
    nbytes = 64 * 8 * (4 if dtype == "F4" else 6) // 8
    file = safetensors_bytes({TABLE: tensor_entry(dtype, [64, 8], 0, nbytes)}, bytes(nbytes))
    (tmp_path / "model.safetensors").write_bytes(file)
    [table] = ftw.inspect(tmp_path).verdict.tables
    assert not table.eligible


@pytest.mark.parametrize("shape", [(512,), (1, 64, 8), (64, 8, 1), ()], ids=str)
def test_table_that_is_no_matrix_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    table = judge_one(tmp_path, {TABLE: torch.ones(shape, dtype=BF16)})
    assert (table.rows, table.columns, table.row_bytes) == (None, None, None)
    assert table.reason == "unsupported_encoding"
    assert str(list(shape)) in table.detail


@pytest.mark.parametrize("shape", [(0, 8), (64, 0), (0, 0)], ids=str)
def test_table_without_elements_is_refused(tmp_path: Path, shape: tuple[int, int]) -> None:
    table = judge_one(tmp_path, {TABLE: torch.ones(shape, dtype=BF16)})
    assert (table.rows, table.columns, table.nbytes) == (*shape, 0)
    assert table.reason == "unsupported_encoding"


def test_table_with_fewer_rows_than_the_vocabulary_is_warned_of(tmp_path: Path) -> None:
    verdict = judge_folder(tmp_path, {TABLE: filled(BF16, 40, 8)})
    [warning] = verdict.warnings
    assert TABLE in warning
    assert "40 rows" in warning
    assert "vocab_size 64" in warning


@pytest.mark.parametrize("rows", [64, 80], ids=str)
def test_table_with_padded_rows_is_not_warned_of(tmp_path: Path, rows: int) -> None:
    assert judge_folder(tmp_path, {TABLE: filled(BF16, rows, 8)}).warnings == ()


def test_checkpoint_without_table_has_no_verdict(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"model.norm.weight": filled(BF16, 8)}, llama_config())
    report = ftw.inspect(tmp_path)
    [table] = report.to_dict()["tables"]
    assert (table["name"], table["rows"], table["nbytes"], table["eligible"]) == ("", None, 0, False)
    assert (table["reason"], table["detail"]) == ("no_table", "no tensor has the name of a token embedding")
    assert report.to_dict()["tied"] == {"value": None, "evidence": []}
    assert not report.is_host_eligible
    assert report.to_dict()["host"] == {"eligible": False, "reason": "no_table", "nbytes": 0}
    with pytest.raises(ftw.NotEligibleError, match="no tensor has the name of a token embedding"):
        ftw.convert(tmp_path, tmp_path.with_name("out"), embed="host")


def test_tables_of_an_encoder_decoder_are_judged_each(tmp_path: Path) -> None:
    tensors = {
        "model.encoder.embed_tokens.weight": filled(BF16, 64, 8),
        "model.decoder.embed_tokens.weight": filled(F8, 64, 8),
        "model.decoder.embed_tokens.weight_scale": filled(F32, 1),
        "lm_head.weight": filled(BF16, 64, 8) * 2,
    }
    write_checkpoint(tmp_path, tensors, llama_config())
    verdict = ftw.inspect(tmp_path).verdict
    assert [table.reason for table in verdict.tables] == ["ok", "unsupported_encoding"]
    assert [table.name for table in verdict.eligible_tables] == ["model.encoder.embed_tokens.weight"]
    where = plan_placement(verdict, "auto", "model")
    assert (where.placement, where.host_tables) == ("host", verdict.eligible_tables)


@pytest.mark.parametrize(
    ("tied", "embed", "placement"),
    [
        (False, "host", "host"), (False, "auto", "host"), (False, "gpu", "gpu"), (True, "auto", "gpu"),
        (True, "gpu", "gpu"),
    ],
    ids=["host", "auto", "gpu", "tied-auto", "tied-gpu"],
)  # fmt: skip
def test_placement_follows_the_request_and_the_verdict(tmp_path: Path, tied: bool, embed: str, placement: str) -> None:
    write_checkpoint(tmp_path, llama_tensors(head=not tied), llama_config(tie_word_embeddings=tied))
    verdict = ftw.inspect(tmp_path).verdict
    where = plan_placement(verdict, embed, "model")
    assert where.placement == placement
    assert where.host_tables == (verdict.tables if placement == "host" else ())
    assert where.reason


def test_placement_refuses_an_unknown_request() -> None:
    with pytest.raises(ValueError, match="embed is 'cpu', allowed are host, gpu, auto"):
        plan_placement(Verdict((), None, (), ()), "cpu", "model")


def test_refusal_stays_on_one_line_whatever_the_names_hold(tmp_path: Path) -> None:
    name = "evil\n.embed_tokens.weight"
    write_checkpoint(tmp_path, {name: filled(BF16, 64, 8)}, llama_config(tie_word_embeddings=True))
    with pytest.raises(ftw.NotEligibleError) as caught:
        plan_placement(ftw.inspect(tmp_path).verdict, "host", "mo\ndel")
    assert str(caught.value).isprintable()
