"""What a model of transformers may do to its embedding, wherever the table is."""

import copy
import importlib
import io
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers_models import Saved, assert_same_weights, bits_of, logits, random_ids, save

import ftw
from ftw.integrations.transformers import load, offload_model
from ftw.integrations.transformers.embedding import TransformersEmbedding, scale_of

TABLE = "model.embed_tokens.weight"


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return save(tmp_path / "saved", "Qwen3ForCausalLM", dtype=torch.bfloat16)


@pytest.fixture
def model(saved: Saved) -> PreTrainedModel:
    return load(saved.folder)


def embedding_of(model: PreTrainedModel) -> TransformersEmbedding:
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, TransformersEmbedding)
    return embedding


def test_table_is_no_parameter(saved: Saved, model: PreTrainedModel) -> None:
    assert TABLE not in dict(model.named_parameters())
    assert model.num_parameters() == saved.load().num_parameters() - 128 * 16
    assert model.get_memory_footprint() == saved.load().get_memory_footprint() - 128 * 16 * 2
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cpu")


def test_state_dict_holds_the_table_itself(model: PreTrainedModel) -> None:
    assert model.state_dict()[TABLE].data_ptr() == embedding_of(model).table.data_ptr()


def test_saved_model_equals_the_first(saved: Saved, model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "again")
    before, after = (load_file(folder / "model.safetensors") for folder in (saved.folder, tmp_path / "again"))
    assert list(before) == list(after)
    assert all(torch.equal(bits_of(before[name]), bits_of(after[name])) for name in before)
    again = load(tmp_path / "again")
    assert_same_weights(again, saved.load())


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "LlavaForConditionalGeneration"])
def test_converted_names_are_saved_as_they_were(tmp_path: Path, name: str) -> None:
    save(tmp_path / "first", name)
    load(tmp_path / "first").save_pretrained(tmp_path / "again")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("first", "again"))
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_state_dict_is_loaded_where_the_table_is_the_same(saved: Saved, model: PreTrainedModel) -> None:
    state = {name: tensor.clone() for name, tensor in saved.load().state_dict().items()}
    state["model.norm.weight"] += 1
    assert not model.load_state_dict(state).missing_keys
    assert torch.equal(model.model.norm.weight, state["model.norm.weight"])
    state[TABLE][0, 0] += 1
    before = embedding_of(model).table.clone()
    with pytest.raises(RuntimeError, match="found other bytes than those in host memory, which stay"):
        model.load_state_dict(state)
    assert torch.equal(embedding_of(model).table, before)
    del state[TABLE]
    assert model.load_state_dict(state, strict=False).missing_keys == [TABLE]


def test_moving_and_casting_leave_the_table_alone(model: PreTrainedModel) -> None:
    table = embedding_of(model).table
    address = table.data_ptr()
    model.to("cpu").half().float()
    assert embedding_of(model).table.data_ptr() == address
    assert embedding_of(model).dtype == torch.bfloat16
    assert model.lm_head.weight.dtype == torch.float32


def test_weight_tells_what_libraries_ask_for(saved: Saved, model: PreTrainedModel) -> None:
    weight, expected = embedding_of(model).weight, saved.load().get_input_embeddings().weight
    assert (weight.dtype, weight.shape, weight.device) == (expected.dtype, expected.shape, expected.device)
    assert (weight.size(), weight.size(0), weight.size(-1)) == (expected.size(), 128, 16)
    assert weight.numel() == expected.numel()
    assert not weight.requires_grad
    assert torch.equal(weight.data, expected)
    for index in (5, 127, -1, slice(2, 4), (3, slice(None)), (slice(None), 2)):
        assert torch.equal(bits_of(weight[index]), bits_of(expected[index]))


def test_weight_is_no_operand_and_says_where_the_table_is(model: PreTrainedModel) -> None:
    weight, row = embedding_of(model).weight, torch.ones(1, 16, dtype=torch.bfloat16)
    for use in (
        lambda: nn.functional.linear(row, weight),
        lambda: row @ weight,
        lambda: weight @ row,
        lambda: torch.cat([row, weight]),
        lambda: weight.__setitem__(0, 1),
        lambda: weight.requires_grad_(True),
        lambda: setattr(weight, "requires_grad", True),
    ):
        with pytest.raises(TypeError, match=f"{TABLE}: table: is in host memory.* load the model with embed='gpu'"):
            use()
    with pytest.raises(AttributeError, match=f"{TABLE}: table: is in host memory, what stands .* has no 'T'; table is"):
        weight.T  # noqa: B018
    assert not hasattr(weight, "quant_state")
    assert not weight.requires_grad_(False).requires_grad


def test_weight_tells_what_costs_nothing(saved: Saved, model: PreTrainedModel) -> None:
    weight, expected = embedding_of(model).weight, saved.load().get_input_embeddings().weight
    for name in ("ndim", "nbytes", "is_meta", "is_cuda", "grad"):
        assert getattr(weight, name) == getattr(expected, name)
    for name in ("dim", "element_size", "is_floating_point", "numel", "__len__"):
        assert getattr(weight, name)() == getattr(expected, name)()
    assert weight.detach() is weight
    model.to("meta")
    assert embedding_of(model).weight.is_meta


def test_head_is_not_tied_to_a_table_in_host_memory(model: PreTrainedModel) -> None:
    ids = random_ids(1, 5)
    expected = logits(model, ids)
    model.tie_weights()  # there is nothing to tie
    model.config.tie_word_embeddings = True
    with pytest.raises(ftw.FtwError) as caught:
        model.tie_weights()
    assert str(caught.value) == (
        f"{TABLE}: table: is in host memory, so nothing can be tied to it; load the model with embed='gpu' to tie it"
    )
    assert torch.equal(logits(model, ids), expected)


def test_model_cannot_be_pickled_and_names_the_way_out(model: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled; save the state dict of its model instead$"):
        torch.save(model, io.BytesIO())


def test_state_dict_of_another_dtype_is_compared_as_it_would_be_written(saved: Saved, model: PreTrainedModel) -> None:
    state = {name: tensor.float() for name, tensor in saved.load().state_dict().items()}
    assert not model.load_state_dict(state).missing_keys
    state[TABLE] *= 2
    with pytest.raises(RuntimeError, match="found other bytes than those in host memory"):
        model.load_state_dict(state)


def test_weight_follows_the_model(model: PreTrainedModel) -> None:
    embedding = embedding_of(model)
    assert embedding.weight.device.type == "cpu"
    model.to("meta")
    assert embedding.weight.device.type == "meta"
    assert embedding.table.device.type == "cpu"


def test_weight_of_a_scaled_embedding_is_not_scaled(tmp_path: Path) -> None:
    saved = save(tmp_path, "Gemma3ForCausalLM")
    found, expected = (model.get_input_embeddings() for model in (load(tmp_path), saved.load()))
    assert found.scale == pytest.approx(4.0)
    assert torch.equal(found.weight[7], expected.weight[7])
    assert found.padding_idx == expected.padding_idx


@pytest.mark.parametrize(
    ("inner", "sizes", "rows"),
    [
        (False, {"new_num_tokens": 140}, 140),
        (True, {"new_num_tokens": 7}, 7),
        (False, {"pad_to_multiple_of": 100}, 200),
    ],
    ids=["more", "fewer_of_the_base_model", "padded"],
)
def test_resizing_is_refused(model: PreTrainedModel, inner: bool, sizes: dict[str, int], rows: int) -> None:
    with pytest.raises(ftw.FtwError) as caught:
        (model.model if inner else model).resize_token_embeddings(**sizes)
    line = str(caught.value)
    assert line.startswith(f"{TABLE}: table: {rows} rows were asked for, but in host memory it keeps its 128; load")
    assert "embed='gpu'" in line
    assert len(line.splitlines()) == 1
    assert model.config.vocab_size == 128


def test_resizing_to_the_same_size_is_none(model: PreTrainedModel) -> None:
    embedding = embedding_of(model)
    assert model.resize_token_embeddings() is embedding
    assert model.resize_token_embeddings(128) is embedding
    assert model.resize_token_embeddings(120, 64) is embedding


def test_another_embedding_set_since_can_be_resized(model: PreTrainedModel) -> None:
    model.set_input_embeddings(nn.Embedding(128, 16))
    assert model.resize_token_embeddings(140).weight.shape == (140, 16)


def test_copies_share_the_table(model: PreTrainedModel) -> None:
    ids = random_ids(1, 5)
    copied = copy.deepcopy(model)
    assert embedding_of(copied) is not embedding_of(model)
    assert embedding_of(copied).table is embedding_of(model).table
    assert torch.equal(logits(copied, ids), logits(model, ids))
    with pytest.raises(ftw.FtwError, match="140 rows"):
        copied.resize_token_embeddings(140)
    embedding_of(copied).close()
    with pytest.raises(ftw.ClosedError):
        logits(model, ids)


def test_closed_table_is_neither_saved_nor_shown(model: PreTrainedModel) -> None:
    embedding_of(model).close()
    with pytest.raises(ftw.ClosedError):
        model.state_dict()
    with pytest.raises(ftw.ClosedError):
        embedding_of(model).weight  # noqa: B018


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [32.0, 2048**0.5, 1.0], ids=str)
def test_scale_that_is_a_number_is_taken_where_rows_are_equal(dtype: torch.dtype, factor: float) -> None:
    """Bart's kind multiplies by a Python float, which torch does not round to the rows' dtype first."""
    module = BartScaledWordEmbedding(50, 12, 1, embed_scale=factor).to(dtype)
    ids = torch.arange(50)
    rows = module(ids).detach()
    if factor == 2048**0.5 and dtype != torch.float32:
        with pytest.raises(ftw.NotEligibleError, match=f"table: module: multiplies rows by .*, which {dtype}"):
            scale_of(module, dtype, "table")
    else:
        host = ftw.HostEmbedding(module.weight.detach(), scale=scale_of(module, dtype, "table"))
        assert torch.equal(bits_of(host(ids)), bits_of(rows))


def test_every_scaled_class_of_transformers_is_known_for_what_it_does() -> None:
    """One that does more than multiply (T5Gemma2's has a vector of its own for one token) has to be told from those."""
    folder, ids, unknown = Path(transformers.models.__file__).parent, torch.arange(8), []
    for file in sorted(folder.glob("*/modeling_*.py")):
        for name in re.findall(r"^class (\w+ScaledWordEmbedding)\(", file.read_text(encoding="utf-8"), re.MULTILINE):
            kind = getattr(importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}"), name)
            module = kind(8, 4, 0, embed_scale=3.3)
            scale = scale_of(module, torch.float32, "table")
            if scale is None:
                unknown.append(name)
                continue
            assert torch.equal(ftw.HostEmbedding(module.weight.detach(), scale=scale)(ids), module(ids)), name
    assert unknown == ["T5Gemma2TextScaledWordEmbedding"]


def test_scaled_module_with_a_hook_does_more_than_that() -> None:
    module = BartScaledWordEmbedding(50, 12, 1, embed_scale=32.0)
    module.register_forward_hook(lambda *_: None)
    assert scale_of(module, torch.float32, "table") is None


def test_hot_bytes_of_a_whole_model_may_be_a_size(saved: Saved) -> None:
    moved = offload_model(saved.load(), hot_bytes="1KiB")
    hot = moved.tables["model.embed_tokens"].hot
    assert hot is not None
    assert 0 < hot.rows.nbytes <= 1024
