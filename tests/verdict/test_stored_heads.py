"""Stored heads: packed, wrapped, small, under other paths; what may be one is named, and never passes for a tie."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint

import ftw

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
U8, I8, I16, I32, F16, F32, BF16 = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.float32, torch.bfloat16,
)  # fmt: skip
OWN = {"architectures": ["OwnForCausalLM"], "model_type": "own"}
SAID = {**OWN, "tie_word_embeddings": False}

# What tools store of a head that they have packed, 64 x 8, by what follows its path.
PACKED = {
    "exl2": {"q_weight": (I32, 8, 8), "q_invperm": (I32, 8), "q_scale": (I32, 1, 8), "q_scale_max": (F16, 1),
             "q_groups": (I16, 2)},
    "exl3": {"trellis": (I16, 1, 4, 32), "suh": (F16, 8), "svh": (F16, 64)},
    "exl3-mcg": {"trellis": (I16, 1, 4, 32), "suh": (F16, 8), "svh": (F16, 64), "mcg": (I32,)},
    "exl3-signs": {"trellis": (I16, 1, 4, 32), "su": (I16, 1), "sv": (I16, 4)},
    "gptqmodel": {"qweight": (I32, 1, 64), "qzeros": (I32, 1, 8), "scales": (F16, 1, 64), "g_idx": (I32, 8)},
    "awq": {"qweight": (I32, 8, 8), "qzeros": (I32, 1, 8), "scales": (F16, 1, 64)},
    "marlin": {"B": (I32, 2, 64), "s": (F16, 1, 64)},
    "llm-compressor": {"weight_packed": (I32, 64, 1), "weight_scale": (BF16, 64, 1), "weight_shape": (I32, 2)},
    "torchao": {"_weight_qdata": (I8, 64, 8), "_weight_scale": (BF16, 64, 1), "_weight_zero_point": (I8, 64, 1)},
    "torchao-colon": {"weight:_data": (I8, 64, 8), "weight:scale": (BF16, 64, 1)},
    "quanto": {"weight._data": (I8, 64, 8), "weight._scale": (BF16, 64, 1)},
    "mlx-lm": {"weight": (torch.uint32, 64, 1), "scales": (BF16, 64, 1), "biases": (BF16, 64, 1)},
    "unsloth-bnb": {"weight": (U8, 256, 1), "weight.absmax": (U8, 8), "weight.quant_map": (F32, 16),
                    "weight.quant_state.bitsandbytes__nf4": (U8, 80)},
    "weight-norm": {"weight_g": (BF16, 64, 1), "weight_v": (BF16, 64, 8)},
    "parametrised": {"parametrizations.weight.original0": (BF16, 64, 1),
                     "parametrizations.weight.original1": (BF16, 64, 8)},
    "a-form-to-come": {"codewords": (U8, 64, 4), "rotation": (F16, 8)},
}  # fmt: skip


def judge(
    folder: Path, stored: dict[str, torch.Tensor], config: dict[str, Any] | None
) -> tuple[str, bool | None, str, tuple[str, ...]]:
    """Judge a tied Llama's tensors with others beside them: reason, tie, detail and evidence of the one table."""
    tensors = {**llama_tensors(head=False), **stored}
    verdict = ftw.inspect(write_checkpoint(folder, tensors, config)).verdict
    [table] = verdict.tables
    assert table.eligible is (table.reason == "ok")
    return table.reason, verdict.tied, table.detail, verdict.tie_evidence


def parts_of(path: str, parts: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{path}.{suffix}": torch.ones(shape).to(dtype) for suffix, (dtype, *shape) in parts.items()}


def matrix(rows: int = 64, columns: int = 8, seed: int = 9) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.mark.parametrize("parts", PACKED.values(), ids=PACKED)
def test_packed_head_and_a_flag_that_says_untied(tmp_path: Path, parts: dict[str, Any]) -> None:
    reason, tied, detail, _ = judge(tmp_path, parts_of("lm_head", parts), llama_config())
    assert (reason, tied) == ("ok", False)
    assert detail.startswith("untied: config says tie_word_embeddings=false and lm_head.")


@pytest.mark.parametrize("parts", PACKED.values(), ids=PACKED)
def test_packed_head_and_a_flag_that_claims_a_tie(tmp_path: Path, parts: dict[str, Any]) -> None:
    config = llama_config(tie_word_embeddings=True)
    assert judge(tmp_path, parts_of("lm_head", parts), config)[:2] == ("tie_conflict", None)


@pytest.mark.parametrize(
    "parts",
    [
        {"bias": (BF16, 64)},
        {"weight_scale": (BF16, 64, 1)},
        {"suh": (F16, 8), "svh": (F16, 64)},
        {"temperature": (F32, 1)},
        {"dense.weight": (BF16, 8, 8), "layer_norm.weight": (BF16, 8)},
        {"lora_A.default.weight": (BF16, 2, 8)},
    ],
    ids="bias scale signs scalar roberta lora".split(),
)
def test_what_lies_beside_a_head_is_none(tmp_path: Path, parts: dict[str, Any]) -> None:
    reason, tied, detail, evidence = judge(tmp_path, parts_of("lm_head", parts), llama_config())
    assert (reason, tied, evidence[-1]) == ("tied", True, "no LM head stored")
    assert "none is stored" in detail


WRAPPED = {
    "peft-base": ("model.embed_tokens.base_layer.weight", "lm_head.base_layer.weight"),
    "peft-dump": ("base_model.model.model.embed_tokens.base_layer.weight",
                  "base_model.model.lm_head.base_layer.weight"),
    "compiled-head": ("model._orig_mod.embed_tokens.weight", "lm_head._orig_mod.weight"),
    "fsdp": ("_fsdp_wrapped_module.tok_embeddings.weight", "_fsdp_wrapped_module.output.weight"),
    "fsdp-inside": ("model.embed_tokens._fsdp_wrapped_module.weight", "lm_head._fsdp_wrapped_module.weight"),
    "checkpointed": ("model.embed_tokens._checkpoint_wrapped_module.weight",
                     "lm_head._checkpoint_wrapped_module.weight"),
    "many": ("module._orig_mod.model.module.embed_tokens.weight", "module._orig_mod.lm_head._orig_mod.weight"),
    "modules-to-save": ("model.embed_tokens.modules_to_save.default.weight", "lm_head.modules_to_save.default.weight"),
    "deepspeed": ("_forward_module.model.embed_tokens.weight", "_forward_module.lm_head.weight"),
}  # fmt: skip


@pytest.mark.parametrize(("table", "head"), WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("flag", [False, True], ids=["untied", "tied"])
def test_wrapped_modules_are_a_table_and_a_head(tmp_path: Path, table: str, head: str, flag: bool) -> None:
    for stored, expected in (
        ({head: matrix()}, "tie_conflict" if flag else "ok"),
        ({head: matrix(seed=0)}, "tied" if flag else "ok"),
        ({}, "tied"),
    ):
        folder = tmp_path / f"{len(stored)}{expected}"
        config = llama_config(tie_word_embeddings=flag)
        found = ftw.inspect(write_checkpoint(folder, {table: matrix(seed=0), **stored}, config)).verdict
        assert [(one.name, one.reason) for one in found.tables] == [(table, expected)]


def test_table_that_peft_adds_to_is_no_plain_table(tmp_path: Path) -> None:
    for beside in ("lora_embedding_A.default", "token_adapter.trainable_tokens_delta.default"):
        path = "model.embed_tokens.token_adapter" if "token" in beside else "model.embed_tokens"
        tensors = {
            f"{path}.base_layer.weight": matrix(), f"model.embed_tokens.{beside}": matrix(2), HEAD: matrix(seed=1),
        }  # fmt: skip
        [table] = ftw.inspect(write_checkpoint(tmp_path / beside, tensors, llama_config())).verdict.tables
        assert (table.name, table.reason) == (f"{path}.base_layer.weight", "unsupported_encoding")
        assert beside.rpartition("token_adapter.")[2] in table.detail


def test_table_that_peft_trains_comes_before_what_it_was(tmp_path: Path) -> None:
    path = "base_model.model.model.embed_tokens"
    tensors = {
        f"{path}.original_module.weight": matrix(), f"{path}.modules_to_save.default.weight": matrix(seed=1),
        "base_model.model.lm_head.modules_to_save.default.weight": matrix(seed=2),
        "base_model.model.lm_head.original_module.weight": matrix(seed=3),
    }  # fmt: skip
    tables = ftw.inspect(write_checkpoint(tmp_path, tensors, llama_config())).verdict.tables
    assert [table.name for table in tables] == [
        f"{path}.modules_to_save.default.weight", f"{path}.original_module.weight",
    ]  # fmt: skip
    tensors["base_model.model.lm_head.original_module.weight"] = matrix()
    tables = ftw.inspect(write_checkpoint(tmp_path, tensors, llama_config(tie_word_embeddings=True))).verdict.tables
    assert [table.reason for table in tables] == ["tie_conflict", "tied"]


def test_head_with_a_lora_that_is_a_copy_of_the_table_is_a_tie(tmp_path: Path) -> None:
    stored = {"lm_head.base_layer.weight": llama_tensors()[TABLE].clone(), "lm_head.lora_A.default.weight": matrix(2)}
    assert judge(tmp_path / "flag", stored, llama_config(tie_word_embeddings=True))[:2] == ("tied", True)
    assert judge(tmp_path / "none", stored, None)[:2] == ("tied", True)


# other places


@pytest.mark.parametrize(
    "name",
    [
        "language_model.output.weight",  # InternVL2 on InternLM2
        "llm.lm_head.weight",
        "language_model.transformer.output_layer.weight",  # CogVLM, GLM-4V as remote code
        "decoder.output_projection.weight",  # TrOCR in a VisionEncoderDecoder
        "decoder.proj_out.weight",
        "decoder.lm_loss.weight",
        "model.transformer.ff_out.weight",  # Molmo, LLaDA
        "text_model.lm_head.weight",
    ],
    ids=str,
)
@pytest.mark.parametrize("config", [llama_config(), OWN], ids=["false", "no-flag"])
def test_head_in_a_part_that_is_a_language_model(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    assert judge(tmp_path, {name: matrix()}, config)[:2] == ("ok", False)
    assert judge(tmp_path, {name: matrix(3)}, config)[0] == ("ok" if name.endswith("lm_head.weight") and config != OWN
                                                               else "tied")  # fmt: skip
    copy = {name: llama_tensors()[TABLE].clone()}
    assert judge(tmp_path, copy, {**config, "tie_word_embeddings": True})[:2] == ("tied", True)


UNPLACED = [
    "mlm.score_head.weight",
    "to_logits.weight",
    "net.output.weight",
    "wrapped.decoder.weight",
    "x.head_0.weight",
]


@pytest.mark.parametrize("name", UNPLACED, ids=str)
def test_head_in_an_unknown_place_is_named_where_nothing_says_untied(tmp_path: Path, name: str) -> None:
    for place, config in (("own", OWN), ("none", None), ("llama", llama_config(tie_word_embeddings=...))):
        reason, tied, detail, evidence = judge(tmp_path / place, {name: matrix()}, config)
        assert (reason, tied, evidence[-1]) == ("tied", None, f"tensor:{name} may be the head")
        assert detail.startswith(f"{name} is stored and may be the head")


@pytest.mark.parametrize("name", UNPLACED, ids=str)
def test_head_in_an_unknown_place_and_a_flag_that_says_untied(tmp_path: Path, name: str) -> None:
    # In a part of the model that the table is not in, it may be that part's own.
    is_beside = name.count(".") == 1
    expected = ("ok", False) if is_beside else ("tied", None)
    assert judge(tmp_path / "own", {name: matrix()}, SAID)[:2] == expected
    # Not like the table: one for other codes, or a copy.
    for number, stored in enumerate((matrix(33), matrix(80), llama_tensors()[TABLE].clone())):
        assert judge(tmp_path / str(number), {name: stored}, SAID)[:2] == ("tied", None)


@pytest.mark.parametrize("name", UNPLACED, ids=str)
def test_flag_that_claims_a_tie_stays_one_beside_a_head_in_an_unknown_place(tmp_path: Path, name: str) -> None:
    reason, tied, detail, _ = judge(tmp_path, {name: matrix()}, {**OWN, "tie_word_embeddings": True})
    assert (reason, tied) == ("tied", True)
    assert name in detail


@pytest.mark.parametrize(
    ("name", "shape"),
    [("net.output.weight", (8, 8)), ("score_head.weight", (64, 16)), ("x.head.weight", (64,)), ("x.head.bias", (64, 8)),
     ("visual.head.weight", (64, 8)), ("net.layers.0.output.weight", (64, 8)), ("x.head.weight", (64, 8, 1))],
    ids="square wide flat bias tower layer deep".split(),
)  # fmt: skip
def test_what_cannot_be_a_head_is_not_named(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    reason, tied, detail, _ = judge(tmp_path, {name: torch.ones(shape, dtype=BF16)}, SAID)
    assert (reason, tied) == ("tied", None)
    assert detail == "no LM head is stored, and whether OwnForCausalLM has one is not known"


# other sizes


@pytest.mark.parametrize("rows", [2, 3, 31], ids=str)
def test_small_lm_head_is_one_where_the_tie_is_told(tmp_path: Path, rows: int) -> None:
    """CSM has 2,051 rows beside a text table of 128,256, Kyutai's speech-to-text 4,001 beside 69,570."""
    stored = {HEAD: matrix(rows)}
    assert judge(tmp_path / "false", stored, llama_config())[:2] == ("ok", False)
    assert judge(tmp_path / "default", stored, llama_config(tie_word_embeddings=...))[:2] == ("ok", False)
    assert judge(tmp_path / "true", stored, llama_config(tie_word_embeddings=True))[:2] == ("tie_conflict", None)


def test_small_lm_head_is_named_where_the_tie_is_not_told(tmp_path: Path) -> None:
    for place, config in (("own", OWN), ("none", None)):
        reason, tied, detail, _ = judge(tmp_path / place, {HEAD: matrix(3)}, config)
        assert (reason, tied) == ("tied", None)
        assert detail.startswith(f"{HEAD} is stored and may be the head")


# other types


@pytest.mark.parametrize(
    ("table", "head", "told", "is_copy"),
    [
        (BF16, F32, None, True), (BF16, F32, "bfloat16", True), (BF16, F32, "float32", False),
        (F16, F32, None, True), (F32, BF16, "bfloat16", True), (F32, BF16, None, False), (BF16, F16, "bfloat16", False),
        (BF16, I8, None, False),
    ],
    ids="bf16-f32 bf16 f32 f16-f32 f32-bf16 f32-bf16-none bf16-f16 integers".split(),
)  # fmt: skip
def test_head_that_a_loader_casts_to_the_table_is_a_tie(
    tmp_path: Path, table: torch.dtype, head: torch.dtype, told: str | None, is_copy: bool
) -> None:
    values = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))  # with more digits than BF16 has
    values[0, :4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -0.0, 2.0**-140])  # two ties of rounding, a subnormal
    for name, other in (("equal", 0.0), ("last", 1.0)):
        heads = values.clone()
        heads[-1, -1] += other
        tensors = {TABLE: values.to(table), HEAD: heads.to(head)}
        config = llama_config(tie_word_embeddings=True, **({} if told is None else {"dtype": told}))
        [found] = ftw.inspect(write_checkpoint(tmp_path / name, tensors, config)).verdict.tables
        assert found.reason == ("tied" if is_copy and not other else "tie_conflict")
        [bare] = ftw.inspect(write_checkpoint(tmp_path / f"{name}-bare", tensors)).verdict.tables
        assert bare.reason == ("tied" if tensors[HEAD].to(table).equal(tensors[TABLE]) and head != I8 else "ok")
        untied = write_checkpoint(tmp_path / f"{name}-untied", tensors, llama_config())
        assert ftw.inspect(untied).is_host_eligible


# two vocabularies


def marian(folder: Path, **options: Any) -> dict[str, tuple[str, bool]]:
    """Save a Marian model of two vocabularies; return the verdict on each table."""
    from transformers import MarianConfig, MarianMTModel

    sizes = {f"{side}_{what}": 1 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = MarianConfig(
        vocab_size=40, decoder_vocab_size=56, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, pad_token_id=1,
        max_position_embeddings=16, decoder_start_token_id=1, eos_token_id=0, **sizes, **options,
    )  # fmt: skip
    MarianMTModel(config).save_pretrained(folder)
    return {
        table.name.split(".")[1]: (table.reason, table.eligible) for table in ftw.inspect(folder).verdict.tables[:2]
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_encoders_table_of_two_vocabularies_is_free(tmp_path: Path, tie: bool) -> None:
    found = marian(tmp_path, share_encoder_decoder_embeddings=False, tie_word_embeddings=tie)
    assert found == {"encoder": ("ok", True), "decoder": ("tied", False) if tie else ("ok", True)}


# tables in two tensors


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("model.transformer.wte", ("embedding", "new_embedding")),  # Molmo
        ("model.embed_tokens", ("weight", "additional_embedding.weight")),  # Idefics
    ],
    ids=["molmo", "idefics"],
)
def test_table_in_two_tensors_is_named_and_stays(tmp_path: Path, path: str, parts: tuple[str, str]) -> None:
    tensors = {f"{path}.{part}": matrix(rows) for part, rows in zip(parts, (64, 4), strict=True)}
    tensors["model.transformer.ff_out.weight"] = matrix(seed=1)
    [table] = ftw.inspect(write_checkpoint(tmp_path, tensors, llama_config())).verdict.tables
    assert (table.reason, table.eligible) == ("unsupported_encoding", False)
    assert table.detail.startswith("rows in two tensors: ")
    assert parts[1] in table.detail
