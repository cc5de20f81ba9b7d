"""Offloading all lookup tables of a model, of transformers and of any other, on a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_configs import tiny_config
from torch import nn
from transformers_models import bits_of, build, logits, random_ids
from vocab_parallel import VocabParallelEmbedding

import ftw
from ftw.host.limits import HostLimits
from ftw.integrations.transformers.embedding import TransformersEmbedding
from ftw.offloading.model_tables import OffloadedModel, find_model_tables

IDS = torch.arange(12).reshape(2, 6)


class Plain(nn.Module):
    """A model of nobody's: a table of tokens, one of positions, a small one, and one whose name tells nothing."""

    def __init__(self, *, tie: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(64, 8)
        self.position_embeddings = nn.Embedding(32, 8)
        self.features = nn.ModuleList([nn.Embedding(1 << 15, 8), nn.Embedding(16, 8)])
        self.head = nn.Linear(8, 64, bias=False)
        if tie:
            self.head.weight = self.embed_tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.embed_tokens(ids) + self.position_embeddings(ids) + self.features[0](ids) + self.features[1](ids)
        return self.head(rows)


@torch.no_grad()
def run(model: nn.Module) -> torch.Tensor:
    return bits_of(model(IDS))


def refusal(model: nn.Module, **options: object) -> str:
    with pytest.raises(ftw.NotEligibleError) as caught:
        ftw.offload(model, **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_tables_of_a_plain_model_give_way_to_host_embeddings() -> None:
    model = Plain().eval()
    expected = run(model)
    result = ftw.offload(model)
    assert isinstance(result, OffloadedModel)
    assert list(result.tables) == ["embed_tokens", "features.0"]
    assert model.embed_tokens is result.tables["embed_tokens"]
    assert model.features[0] is result.tables["features.0"]
    assert type(model.embed_tokens) is ftw.HostEmbedding
    assert torch.equal(run(model), expected)
    assert result.tables["embed_tokens"].memory is not None
    assert result.tables["embed_tokens"].memory.pinned_bytes == {"embed_tokens.weight": 64 * 8 * 4}
    assert result.freed_bytes == 0  # on a CPU
    result.close()
    with pytest.raises(ftw.ClosedError):
        run(model)


def test_tables_that_stay_are_told() -> None:
    left = ftw.offload(Plain()).left
    assert list(left) == ["position_embeddings", "features.1"]
    assert left["position_embeddings"] == (
        "position_embeddings: table: is a position embedding, which is read at every step"
    )
    assert left["features.1"] == "features.1: table: has 512 B, less than the 1.00 MiB that move"


def test_roles_are_told_by_names() -> None:
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens, model.model.embed_tokens_per_layer = nn.Embedding(4, 2), nn.Embedding(4, 2)
    model.vision = nn.Module()
    model.vision.position_embedding, model.vision.token_type_embeddings = nn.Embedding(4, 2), nn.Embedding(4, 2)
    model.other = nn.Embedding(4, 2)
    assert {table.path: table.role for table in find_model_tables(model)} == {
        "model.embed_tokens": "token_embedding",
        "model.embed_tokens_per_layer": "per_layer_embedding",
        "vision.position_embedding": "position_embedding",
        "vision.token_type_embeddings": "token_type_embedding",
        "other": "",
    }


def test_replaced_modules_keep_their_mode() -> None:
    model = Plain().train()
    ftw.offload(model)
    assert model.embed_tokens.training
    model = Plain().eval()
    ftw.offload(model)
    assert not model.embed_tokens.training


def test_hot_rows_are_those_of_the_token_embedding() -> None:
    result = ftw.offload(Plain(), hot_bytes=128)
    assert result.tables["embed_tokens"].hot is not None
    assert result.tables["features.0"].hot is None


def test_tied_model_is_refused_before_anything_moves() -> None:
    model = Plain(tie=True)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    line = refusal(model)
    assert line.startswith("embed_tokens.weight: memory: is also held by head.weight of Plain")
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert isinstance(model.features[0], nn.Embedding)


def test_tied_table_is_left_where_that_is_allowed() -> None:
    model = Plain(tie=True).eval()
    expected = run(model)
    result = ftw.offload(model, strict=False)
    assert list(result.tables) == ["features.0"]
    assert "is also held by head.weight of Plain" in result.left["embed_tokens"]
    assert model.head.weight is model.embed_tokens.weight
    assert torch.equal(run(model), expected)


def test_last_table_that_is_refused_leaves_the_first_ones() -> None:
    model = Plain()
    alias = model.features[0].weight.data
    assert "features.0.weight: memory: is also held by another tensor" in refusal(model)
    assert isinstance(model.embed_tokens, nn.Embedding)
    del alias
    assert list(ftw.offload(model).tables) == ["embed_tokens", "features.0"]


def test_all_tables_together_have_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftw.pinned.budget.read_host_limits", lambda: HostLimits(None, None, None, is_wsl=False))
    model = Plain()
    with pytest.raises(ftw.PinError, match=r"features.0.weight \(1.00 MiB\), embed_tokens.weight \(4.00 KiB\)"):
        ftw.offload(model, max_pinned_bytes=1 << 20)
    assert isinstance(model.embed_tokens, nn.Embedding)


def test_table_that_the_driver_refuses_leaves_a_model_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftw.pinned import PinnedBuffer

    def pin(buffer: PinnedBuffer, device: torch.device) -> None:
        if buffer.nbytes == 1 << 20:
            raise ftw.PinError("refused")

    monkeypatch.setattr(PinnedBuffer, "pin", pin)
    model = Plain().eval()
    expected = run(model)
    with pytest.raises(ftw.PinError, match="refused"):
        ftw.offload(model)
    assert isinstance(model.embed_tokens, ftw.HostEmbedding)
    assert isinstance(model.features[0], nn.Embedding)
    assert torch.equal(run(model), expected)


def test_embedding_that_does_more_is_refused_by_its_name_or_left() -> None:
    class Doubling(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(ids)

    model = Plain()
    model.features[0] = Doubling(1 << 15, 8)
    assert "Doubling does more in its forward" in ftw.offload(model).left["features.0"]
    model = Plain()
    model.embed_tokens = Doubling(64, 8)
    assert refusal(model).startswith("embed_tokens.weight: module: Doubling does more in its forward")


def test_vocab_parallel_embedding_moves_where_it_is_whole() -> None:
    table = torch.randn(128, 8)
    model = nn.Module()
    model.embed_tokens = VocabParallelEmbedding(128, 8, dtype=torch.float32).load(table)
    assert list(ftw.offload(model).tables) == ["embed_tokens"]
    assert torch.equal(model.embed_tokens(IDS), table[IDS])
    model.embed_tokens = VocabParallelEmbedding(128, 8, dtype=torch.float32, tp_size=2, tp_rank=1).load(table)
    assert "embed_tokens.weight: module: holds the ids 64 to 127 of 128, and its forward sums over" in refusal(model)


def test_model_without_tables_to_move() -> None:
    model = Plain()
    ftw.offload(model)
    stay = "embed_tokens: table: has been offloaded already"
    assert refusal(model) == f"Plain: tables: none to move: 4 embeddings stay, such as {stay}"
    again = ftw.offload(model, strict=False)
    assert not again.tables
    assert list(again.left) == ["embed_tokens", "features.0", "position_embeddings", "features.1"]
    assert again.left["embed_tokens"] == stay
    assert "found a Linear, an nn.Embedding" in refusal(nn.Linear(2, 2))
    assert refusal(nn.Sequential(nn.Linear(2, 2))) == (
        "Sequential: tables: none to move: it holds no nn.Embedding or VocabParallelEmbedding"
    )


@pytest.mark.parametrize(
    "name",
    """
    pos_embed rel_pos_emb pos_emb pe x_position_embeddings query_position_embeddings position_embedding_table
    relative_attention_bias segment_embeddings time_embedding codebook row_embeddings positional_embedding.embedding
    quantize.embedding
    """.split(),
)
def test_large_table_that_is_no_embedding_of_tokens_by_its_name_stays(name: str) -> None:
    model = nn.Module()
    model.vision = nn.Module()
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(model.vision, parent, nn.Module())
    setattr(model.vision.get_submodule(parent), leaf, nn.Embedding(1 << 18, 2))
    assert f"vision.{name}: table: is by its name one of" in ftw.offload(model, strict=False).left[f"vision.{name}"]


@pytest.mark.parametrize("hot_bytes", ["x", -1, 1.5], ids=str)
def test_hot_bytes_are_looked_at_before_anything_moves(hot_bytes: object) -> None:
    for model in (Plain(), build("Qwen3ForCausalLM")):
        before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        kinds = [type(module) for module in model.modules()]
        with pytest.raises(ftw.LookupArgumentError):
            ftw.offload(model, hot_bytes=hot_bytes)
        assert [type(module) for module in model.modules()] == kinds
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_table_whose_hot_rows_have_no_room_stays_where_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(name), random_ids(1, 5)
    expected = logits(model, ids)
    embedding, weight = model.get_input_embeddings(), model.get_input_embeddings().weight
    address = weight.data_ptr()

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("ftw.lookup.embedding.make_hot_rows", fail)
        with pytest.raises(torch.OutOfMemoryError):
            ftw.offload(model, hot_bytes=1024)
    assert model.get_input_embeddings() is embedding
    assert (embedding.weight is weight, weight.data_ptr()) == (True, address)
    assert torch.equal(logits(model, ids), expected)
    del weight
    assert "model.embed_tokens" in ftw.offload(model, hot_bytes=1024).tables


def keep_in_list(model: nn.Module) -> None:
    model.kept = [model.embed_tokens]


def keep_in_dict(model: nn.Module) -> None:
    model.kept = {"a": model.embed_tokens}


def keep_beside(model: nn.Module) -> None:
    object.__setattr__(model.head, "kept", model.embed_tokens)


def keep_a_method(model: nn.Module) -> None:
    model.kept = model.embed_tokens.forward


@pytest.mark.parametrize(
    ("keep", "place"),
    [
        (keep_in_list, "kept[0]"),
        (keep_in_dict, "kept['a']"),
        (keep_beside, "head.kept"),
        (keep_a_method, "kept"),
    ],
    ids=["list", "dict", "attribute", "method"],
)
def test_module_that_is_kept_elsewhere_in_the_model_too_is_refused(
    keep: Callable[[nn.Module], None], place: str
) -> None:
    """What reads it there would go on with the old module."""
    model = Plain()
    keep(model)
    assert refusal(model).startswith(f"embed_tokens.weight: memory: is also held by {place} of Plain")
    assert isinstance(model.embed_tokens, nn.Embedding)
    assert list(ftw.offload(model, strict=False).tables) == ["features.0"]


def test_forward_that_reads_the_weight_is_told_where_the_table_is() -> None:
    """Nothing tells so beforehand."""

    class Reading(Plain):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.embed_tokens(ids), self.embed_tokens.weight)

    model = Reading()
    ftw.offload(model)
    words = "embed_tokens.weight: weight: a table in host memory has none, table is the tensor; keep it on the GPU for"
    with pytest.raises(AttributeError, match=words):
        model(IDS)
    assert not hasattr(model.embed_tokens, "weight")


def test_closing_goes_on_where_one_table_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = ftw.offload(Plain())
    first, second = result.tables.values()
    monkeypatch.setattr(second, "close", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        result.close()
    with pytest.raises(ftw.ClosedError):
        first(IDS)


def test_class_that_is_called_in_a_way_of_its_own_is_refused() -> None:
    class Calling(nn.Embedding):
        def __call__(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().__call__(ids)

    model = Plain()
    model.embed_tokens = Calling(64, 8)
    assert refusal(model).startswith("embed_tokens.weight: module: Calling does more in its forward")


def test_what_describes_one_table_is_no_option_of_a_model() -> None:
    for option in ({"dtype": torch.bfloat16}, {"scale": 2.0}, {"name": "a"}, {"ggml_type": "Q4_0"}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} describes one table, a Plain is a model"):
            ftw.offload(Plain(), **option)


# Models of transformers.


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("LlamaForCausalLM", ["model.embed_tokens"]),
        ("Qwen3MoeForCausalLM", ["model.embed_tokens"]),
        ("Gemma3ForCausalLM", ["model.embed_tokens"]),
        ("Gemma3nForCausalLM", ["model.embed_tokens", "model.embed_tokens_per_layer"]),
        ("Gemma4ForCausalLM", ["model.embed_tokens", "model.embed_tokens_per_layer"]),
        ("GPT2LMHeadModel", ["transformer.wte"]),
        ("LlavaForConditionalGeneration", ["model.language_model.embed_tokens"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tables_of_transformers_models_move(name: str, tables: list[str], dtype: torch.dtype) -> None:
    model, ids = build(name).to(dtype), random_ids(2, 9)
    expected, state = logits(model, ids), {key: tensor.clone() for key, tensor in model.state_dict().items()}
    result = ftw.offload(model)
    assert list(result.tables) == tables
    assert all(type(table) is TransformersEmbedding for table in result.tables.values())
    assert model.get_input_embeddings() is result.tables[tables[0]]
    assert torch.equal(logits(model, ids), expected)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    with pytest.raises(ftw.FtwError, match="load the model with embed='gpu' to resize it"):
        model.resize_token_embeddings(300)


def test_offloaded_model_is_saved_whole(tmp_path: Path) -> None:
    model, ids = build("Qwen3ForCausalLM"), random_ids(1, 5)
    expected = logits(model, ids)
    ftw.offload(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path), ids), expected)


def test_tied_transformers_model_is_refused_by_its_head() -> None:
    model = build("Qwen3ForCausalLM", tie=True)
    assert refusal(model).startswith("model.embed_tokens.weight: memory: is also held by lm_head.weight of Qwen3")
    assert "resize_token_embeddings" not in vars(model)
    assert model.resize_token_embeddings(140).weight.shape == (140, 16)


def test_per_layer_table_of_a_tied_model_moves_where_that_is_allowed() -> None:
    model, ids = build("Gemma4ForCausalLM", tie=True), random_ids(1, 5)
    expected = logits(model, ids)
    result = ftw.offload(model, strict=False)
    assert list(result.tables) == ["model.embed_tokens_per_layer"]
    assert "is also held by lm_head.weight" in result.left["model.embed_tokens"]
    assert torch.equal(logits(model, ids), expected)


def test_table_that_the_driver_refuses_leaves_the_first_one_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftw.pinned import PinnedBuffer

    pinned: list[PinnedBuffer] = []

    def pin(buffer: PinnedBuffer, device: torch.device) -> None:
        if pinned:
            raise ftw.PinError("refused")
        pinned.append(buffer)

    monkeypatch.setattr(PinnedBuffer, "pin", pin)
    model = build("Gemma3nForCausalLM")
    with pytest.raises(ftw.PinError, match="refused"):
        ftw.offload(model)
    assert type(model.get_input_embeddings()) is TransformersEmbedding
    with pytest.raises(ftw.FtwError, match="load the model with embed='gpu' to resize it"):
        model.resize_token_embeddings(300)


def test_transformers_model_has_nothing_to_move_twice() -> None:
    model = build("Qwen3ForCausalLM")
    ftw.offload(model)
    line = "Qwen3ForCausalLM: tables: none to move: its one embedding stays: model.embed_tokens: table: has been off"
    assert refusal(model).startswith(line)
    assert list(ftw.offload(model, strict=False).left) == ["model.embed_tokens"]


def test_position_tables_of_a_tower_stay() -> None:
    config = tiny_config("Qwen3VLForConditionalGeneration", tie=False)
    config.vision_config.num_position_embeddings = 1 << 14
    result = ftw.offload(transformers.Qwen3VLForConditionalGeneration(config))
    assert list(result.tables) == ["model.language_model.embed_tokens"]
    assert list(result.left) == ["model.visual.pos_embed"]


def test_position_table_of_gpt2_stays() -> None:
    model = build("GPT2LMHeadModel")
    assert list(ftw.offload(model).left) == ["transformer.wpe"]
    assert isinstance(model.transformer.wpe, nn.Embedding)


def test_transformers_model_within_another_module() -> None:
    outer = nn.Module()
    outer.inner, ids = build("Qwen3ForCausalLM"), random_ids(1, 5)
    expected = logits(outer.inner, ids)
    assert list(ftw.offload(outer, hot_bytes=1024).tables) == ["inner.model.embed_tokens"]
    embedding = outer.inner.get_input_embeddings()
    assert type(embedding) is TransformersEmbedding
    assert embedding.hot is not None
    assert torch.equal(logits(outer.inner, ids), expected)


class TwoReaders(nn.Module):
    """A model in which two modules hold one table, or one module stands in two places."""

    def __init__(
        self, other: str, *, same_module: bool = False, padding_idx: int | None = None, **changes: Any
    ) -> None:
        super().__init__()
        self.shared, self.encoder = nn.Embedding(64, 8), nn.Module()
        module = self.shared if same_module else nn.Embedding(64, 8, padding_idx=padding_idx)
        module.weight = self.shared.weight
        for name, value in changes.items():
            setattr(module, name, value)
        setattr(self.encoder, other, module)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.shared(ids) + next(self.encoder.children())(ids)


@pytest.mark.parametrize("same_module", [True, False], ids=["module", "parameter"])
def test_table_that_two_places_look_up_moves_for_both(same_module: bool) -> None:
    model = TwoReaders("embed_tokens", same_module=same_module, padding_idx=None if same_module else 0).eval()
    expected = run(model)
    result = ftw.offload(model)
    assert list(result.tables) == ["shared"]
    assert model.shared is model.encoder.embed_tokens is result.tables["shared"]
    assert result.tables["shared"].memory.pinned_bytes == {"shared.weight": 64 * 8 * 4}
    assert torch.equal(run(model), expected)


@pytest.mark.parametrize(
    ("options", "holder"),
    [
        ({"other": "lm_head", "same_module": True}, "shared of TwoReaders and encoder.lm_head of TwoReaders"),
        ({"other": "lm_head"}, "encoder.lm_head.weight of TwoReaders"),
        ({"other": "output", "same_module": True}, "shared of TwoReaders and encoder.output of TwoReaders"),
        ({"other": "embed_tokens", "max_norm": 1.0}, "encoder.embed_tokens.weight of TwoReaders"),
        ({"other": "embed_tokens", "embed_scale": 2.0}, "encoder.embed_tokens.weight of TwoReaders"),
    ],
    ids="head-module head output max-norm scale".split(),
)
def test_table_that_another_place_reads_in_another_way_stays(options: dict[str, Any], holder: str) -> None:
    assert f"is also held by {holder}" in refusal(TwoReaders(**options))


def test_table_that_a_second_model_looks_up_stays() -> None:
    model, other = TwoReaders("embed_tokens"), nn.ModuleDict()
    other["embed_tokens"] = model.shared
    assert "is also held by" in refusal(model)
    del other
    assert list(ftw.offload(model).tables) == ["shared"]


def test_one_module_of_two_that_hold_a_table_is_refused() -> None:
    """The other one would look up in memory that its device cannot read."""
    model = TwoReaders("embed_tokens")
    assert "is also held by encoder.embed_tokens.weight of TwoReaders" in refusal(model.shared)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["T5EncoderModel", "BartModel"], ids=str)
def test_table_that_both_sides_of_a_model_look_up_moves(name: str) -> None:
    model = getattr(transformers, name)(tiny_config(name)).eval()
    ids = {"input_ids": IDS + 2} if name == "T5EncoderModel" else {"input_ids": IDS + 2, "decoder_input_ids": IDS + 2}
    with torch.no_grad():
        expected = model(**ids)[0]
        assert list(ftw.offload(model).tables) == ["shared"]
        assert torch.equal(model(**ids)[0], expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "tie"), [("T5ForConditionalGeneration", True), ("BartForConditionalGeneration", True)], ids=str
)
def test_table_that_a_head_shares_with_both_sides_stays(name: str, tie: bool) -> None:
    assert "is also held by lm_head.weight" in refusal(getattr(transformers, name)(tiny_config(name, tie)))


@pytest.mark.filterwarnings("ignore")
def test_table_that_the_model_computes_with_stays() -> None:
    model = transformers.DiffusionGemmaModel(tiny_config("DiffusionGemmaModel"))
    assert refusal(model).endswith("DiffusionGemmaModel computes with all of decoder.embed_tokens")
