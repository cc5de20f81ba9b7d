"""Models of transformers whose tables are in host memory equal those that from_pretrained loads, in every bit."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import llama_config, llama_tensors, write_checkpoint, write_ftw
from gguf import GGMLQuantizationType
from gguf_builder import random_blocks, write_gguf
from places import DOCS
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSpeechSeq2Seq,
    CompileConfig,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)
from transformers_models import Saved, align, assert_same_weights, bits_of, build, logits, random_ids, save

import ftw
from ftw.integrations.transformers import close, load
from ftw.integrations.transformers.embedding import TransformersEmbedding

IMAGE_TOKENS = 4
TABLES = {
    "LlamaForCausalLM": ["model.embed_tokens"],
    "Qwen3ForCausalLM": ["model.embed_tokens"],
    "Qwen3MoeForCausalLM": ["model.embed_tokens"],
    "Gemma3ForCausalLM": ["model.embed_tokens"],
    "Gemma3nForCausalLM": ["model.embed_tokens", "model.embed_tokens_per_layer"],
    "Gemma4ForCausalLM": ["model.embed_tokens", "model.embed_tokens_per_layer"],
    "GPT2LMHeadModel": ["transformer.wte"],
    "LlavaForConditionalGeneration": ["model.language_model.embed_tokens"],
    "Gemma3ForConditionalGeneration": ["model.language_model.embed_tokens"],
    "Qwen2_5_VLForConditionalGeneration": ["model.language_model.embed_tokens"],
    "Gemma4ForConditionalGeneration": [
        "model.language_model.embed_tokens",
        "model.language_model.embed_tokens_per_layer",
    ],
}


@pytest.fixture
def qwen3(tmp_path: Path) -> Saved:
    return save(tmp_path / "qwen3", "Qwen3ForCausalLM")


def host_modules(model: torch.nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, ftw.HostEmbedding)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TABLES)
def test_logits_and_weights_equal_those_of_from_pretrained(
    tmp_path: Path, name: str, dtype: torch.dtype | None
) -> None:
    saved, ids = save(tmp_path, name), random_ids(2, 9)
    expected, found = saved.load(dtype=dtype or "auto"), load(tmp_path, dtype=dtype)
    assert type(found) is saved.kind
    assert host_modules(found) == TABLES[name]
    assert isinstance(found.get_input_embeddings(), ftw.HostEmbedding)
    assert not found.training
    assert found.dtype == found.get_input_embeddings().dtype == (dtype or torch.float32)
    assert_same_weights(found, expected)
    assert torch.equal(logits(found, ids), logits(expected, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "Gemma4ForCausalLM", "LlavaForConditionalGeneration"])
def test_stored_half_precision_is_kept(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    saved, ids = save(tmp_path, name, dtype=dtype), random_ids(2, 9)
    expected, found = saved.load(dtype="auto"), load(tmp_path)
    assert found.dtype == dtype
    assert_same_weights(found, expected)
    assert torch.equal(logits(found, ids), logits(expected, ids))


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scaled_rows_equal_those_of_the_module_replaced(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    saved, ids = save(tmp_path, name, dtype=dtype), torch.arange(128)
    expected, found = saved.load(dtype="auto"), load(tmp_path)
    for path in TABLES[name]:
        rows = found.get_submodule(path)(ids)
        assert torch.equal(bits_of(rows), bits_of(expected.get_submodule(path)(ids)))
        assert not torch.equal(rows, found.get_submodule(path).table[ids])


def image_inputs(name: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return one image, and ids with its tokens among them."""
    generator = torch.Generator().manual_seed(3)
    ids = random_ids(1, 12)
    ids[0, 2 : 2 + IMAGE_TOKENS] = getattr(model.config, "image_token_id", None) or model.config.image_token_index
    if name.startswith("Qwen"):
        patches = torch.randn(4 * IMAGE_TOKENS, 3 * 2 * 14 * 14, generator=generator)
        kinds = (ids == model.config.image_token_id).int()
        grid = torch.tensor([[1, 4, 4]])
        return {"input_ids": ids, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": kinds}
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}


@pytest.mark.parametrize(
    "name", ["LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"]
)
def test_images_are_scattered_among_the_rows(tmp_path: Path, name: str) -> None:
    saved = save(tmp_path, name)
    expected, found = saved.load(), load(tmp_path)
    inputs = image_inputs(name, expected)
    ids = inputs.pop("input_ids")
    assert torch.equal(logits(found, ids, **inputs), logits(expected, ids, **inputs))
    other = {**inputs, "pixel_values": inputs["pixel_values"] + 1}
    assert not torch.equal(logits(found, ids, **inputs), logits(found, ids, **other))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma4ForCausalLM"])
def test_greedy_tokens_are_the_same(tmp_path: Path, name: str, cache: str) -> None:
    saved, ids = save(tmp_path, name), random_ids(2, 7)
    ids[0, :3] = 0
    options = {
        "attention_mask": (ids != 0).long(), "max_new_tokens": 12, "do_sample": False, "cache_implementation": cache,
        "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    expected = saved.load().generate(ids, **options)
    assert expected.shape == (2, 19)
    assert torch.equal(align(load(tmp_path)).generate(ids, **options), expected)


def test_compiled_model_is_one_graph_and_gives_the_same(qwen3: Saved) -> None:
    model, ids = load(qwen3.folder), random_ids(2, 7)
    expected = logits(model, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(logits(compiled, ids), expected)


def test_generating_compiles_the_model_in_one_graph(qwen3: Saved) -> None:
    model, ids = align(load(qwen3.folder)), random_ids(1, 7)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True  # not for GPUs alone
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = model.generate(ids, cache_implementation="static", compile_config=config, **options)
    assert torch.equal(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_embeddings_given_as_input_give_the_same(qwen3: Saved) -> None:
    model, ids = align(load(qwen3.folder)), random_ids(2, 7)
    with torch.no_grad():
        found = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    assert torch.equal(bits_of(found), logits(model, ids))


# Sources.


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "Gemma3nForCausalLM", "LlavaForConditionalGeneration"])
def test_shards_and_ftw_give_the_same(tmp_path: Path, name: str) -> None:
    saved, ids = save(tmp_path / "shards", name, max_shard_size="20KB"), random_ids(2, 9)
    assert len(list(saved.folder.glob("*.safetensors"))) > 1
    ftw.convert(saved.folder, tmp_path / "ftw", embed="host")
    expected = saved.load()
    for source in (saved.folder, tmp_path / "ftw"):
        found = load(source)
        assert found.name_or_path == str(source)
        assert host_modules(found) == TABLES[name]
        assert_same_weights(found, expected)
        assert torch.equal(logits(found, ids), logits(expected, ids))


def test_class_may_be_named(qwen3: Saved) -> None:
    model = align(load(qwen3.folder, model_class=Qwen3Model))
    assert type(model) is Qwen3Model
    assert host_modules(model) == ["embed_tokens"]
    ids = random_ids(1, 5)
    with torch.no_grad():
        found, expected = (each(ids).last_hidden_state for each in (model, qwen3.load().model))
    assert torch.equal(found, expected)


def test_auto_class_chooses_by_the_config(qwen3: Saved) -> None:
    assert type(load(qwen3.folder, model_class=AutoModelForCausalLM)) is Qwen3ForCausalLM
    assert type(load(qwen3.folder, model_class=AutoModel)) is Qwen3Model
    line = line_of(qwen3.folder, ftw.FtwError, model_class=AutoModelForSpeechSeq2Seq)
    assert "model_class: AutoModelForSpeechSeq2Seq has no class for a Qwen3Config" in line


@pytest.mark.parametrize("tie", [True, False], ids=["true", "false"])
def test_class_that_is_loaded_decides_whether_there_is_a_head(tmp_path: Path, tie: bool) -> None:
    saved, ids = save(tmp_path, "Qwen3ForCausalLM", tie=True), random_ids(1, 5)
    change_config(saved, tie_word_embeddings=tie)
    with pytest.raises(ftw.NotEligibleError, match=r"uses this same table .*Qwen3ForCausalLM has one"):
        load(tmp_path)
    model = load(tmp_path, model_class=AutoModel)
    assert type(model) is Qwen3Model
    assert host_modules(model) == ["embed_tokens"]
    assert model.ftw_memory.reason == "untied: Qwen3Model has no LM head"
    with torch.no_grad():
        expected = align(Qwen3Model.from_pretrained(tmp_path).eval())(ids).last_hidden_state
        assert torch.equal(align(model)(ids).last_hidden_state, expected)


def test_language_model_of_a_base_models_folder_is_refused_where_it_ties(tmp_path: Path) -> None:
    build("Qwen3ForCausalLM", tie=True).model.save_pretrained(tmp_path)
    assert ftw.inspect(tmp_path).is_host_eligible
    assert host_modules(load(tmp_path)) == ["embed_tokens"]
    with pytest.raises(ftw.NotEligibleError, match=r"uses this same table .*Qwen3ForCausalLM has one"):
        load(tmp_path, model_class=AutoModelForCausalLM)


@pytest.mark.parametrize("model_class", ["Qwen3ForCausalLM", torch.nn.Linear, 3], ids=str)
def test_class_that_is_no_model_is_refused(qwen3: Saved, model_class: Any) -> None:
    with pytest.raises(TypeError, match=r"model_class is .*, a subclass of PreTrainedModel or an AutoModel… is needed"):
        load(qwen3.folder, model_class=model_class)


def test_generation_config_of_the_folder_is_taken(qwen3: Saved) -> None:
    assert load(qwen3.folder).generation_config.top_k != 7
    (qwen3.folder / "generation_config.json").write_text(json.dumps({"top_k": 7, "do_sample": True}))
    assert load(qwen3.folder).generation_config.top_k == 7
    own = qwen3.load().generation_config
    own.top_k = 9
    assert load(qwen3.folder, generation_config=own).generation_config.top_k == 9


def test_broken_generation_config_is_no_hindrance(qwen3: Saved, caplog: pytest.LogCaptureFixture) -> None:
    path = qwen3.folder / "generation_config.json"
    path.write_text("{")
    expected = qwen3.load().generation_config
    assert load(qwen3.folder).generation_config.to_dict() == expected.to_dict()
    assert f"{path}: generation config: is not taken: json: is not JSON" in caplog.text


def test_options_go_to_transformers(qwen3: Saved) -> None:
    assert load(qwen3.folder, attn_implementation="eager").config._attn_implementation == "eager"
    assert load(qwen3.folder, use_safetensors=True, trust_remote_code=False) is not None


@pytest.mark.parametrize(
    "option",
    """
    device_map variant from_flax from_tf max_memory offload_folder cache_dir token tp_size tp_plan force_download
    proxies local_files_only load_in_8bit weights_only _commit_hash
    """.split(),
)
def test_options_that_say_where_weights_come_from_or_go_are_refused(qwen3: Saved, option: str) -> None:
    for value in (None, "anything"):
        with pytest.raises(ValueError, match=f"{option} is for from_pretrained alone"):
            load(qwen3.folder, **{option: value})


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"revision": "v2"}, r'the source names it, as "org/name@revision"'),
        ({"subfolder": "x"}, r'the source names it, as "org/name/folder"'),
        ({"use_safetensors": False}, "use_safetensors is for from_pretrained alone"),
        ({"trust_remote_code": True}, "code that a checkpoint brings is never run"),
        ({"ignore_mismatched_size": True}, "is no option of from_pretrained, Qwen3Config or Qwen3ForCausalLM"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_option_names_the_way_out(qwen3: Saved, option: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(qwen3.folder, **option)


@pytest.mark.parametrize("model_class", [None, Qwen3ForSequenceClassification], ids=["named", "given"])
def test_options_of_the_config_are_those_of_from_pretrained(qwen3: Saved, model_class: Any) -> None:
    values = {"use_cache": False, "output_hidden_states": True, "num_labels": 3}
    if model_class is None:
        expected, found = qwen3.load(**values).config, load(qwen3.folder, **values).config
        assert found.to_dict() == expected.to_dict()
        assert (found.use_cache, found.output_hidden_states, found.num_labels) == (False, True, 3)
    else:  # a head of three labels, which the checkpoint lacks
        line = line_of(qwen3.folder, ftw.CheckpointError, model_class=model_class, num_labels=3)
        assert "score.weight: Qwen3ForSequenceClassification needs it, the checkpoint lacks it" in line
        assert line.endswith("none is made up here, name a class that has all its weights there")


def test_option_of_the_class_itself_goes_there(qwen3: Saved) -> None:
    class Named(Qwen3ForCausalLM):
        def __init__(self, config: Any, nickname: str = "") -> None:
            super().__init__(config)
            self.nickname = nickname

    assert load(qwen3.folder, model_class=Named, nickname="tiny").nickname == "tiny"


def test_source_is_opened_once_and_for_all(qwen3: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch of the hub may move between the table and the weights."""
    from ftw.integrations.transformers import loading as transformers_loading

    resolve = transformers_loading.open_checkpoint

    def open_here(source: Any, *, follow_links: bool) -> ftw.Checkpoint:
        assert (source, follow_links) == ("org/name", False)
        return resolve(qwen3.folder)

    monkeypatch.setattr(transformers_loading, "open_checkpoint", open_here)
    model = load("org/name")
    assert model.name_or_path == "org/name"
    assert_same_weights(model, qwen3.load())


def test_default_device_of_the_caller_does_not_matter(qwen3: Saved) -> None:
    with torch.device("meta"):
        model = load(qwen3.folder, device="cpu")
    assert_same_weights(model, qwen3.load())


@pytest.mark.parametrize(
    "how", [{"share": "node"}, {"hot_bytes": 2048}, {"huge_pages": False, "num_threads": 1}], ids=str
)
def test_host_memory_is_as_asked_for(qwen3: Saved, how: dict[str, Any]) -> None:
    model, ids = load(qwen3.folder, **how), random_ids(1, 9)
    embedding = model.get_input_embeddings()
    assert torch.equal(logits(model, ids), logits(qwen3.load(), ids))
    if "hot_bytes" in how:
        embedding.update_hot_rows()
        assert set(embedding.hot_ids().tolist()) <= set(ids.flatten().tolist())
        assert embedding.hot_ids().numel()
    close(model)


def test_limit_is_checked_before_anything_is_read(qwen3: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    for reader in ("ftw.checkpoint.checkpoint.Checkpoint.read_many", "ftw.loading.device_copy.DeviceCopy.load"):
        monkeypatch.setattr(reader, lambda *_, **__: pytest.fail("something was read"))
    with pytest.raises(ftw.PinError, match="more than max_pinned_bytes"):
        load(qwen3.folder, max_pinned_bytes=100)


@pytest.mark.parametrize("extra", ["other.embed_tokens.weight", "model.mtp_layers.0.embed_tokens.weight"])
def test_table_that_the_model_has_no_use_for_is_left_out(
    qwen3: Saved, extra: str, caplog: pytest.LogCaptureFixture
) -> None:
    rename(qwen3, lambda tensors: tensors.update({extra: torch.ones(128, 16)}))
    model = load(qwen3.folder)
    assert host_modules(model) == ["model.embed_tokens"]
    assert list(model.ftw_memory.pinned_bytes) == ["model.embed_tokens.weight"]
    assert f"{extra}: is left out, as no weight of Qwen3ForCausalLM is made of it" in caplog.text
    assert_same_weights(model, qwen3.load())


# What may not leave the GPU.


@pytest.mark.parametrize(
    ("name", "table"),
    [("Qwen3ForCausalLM", "model.embed_tokens.weight"), ("GPT2LMHeadModel", "transformer.wte.weight")],
)
def test_tied_model_is_refused_by_the_name_of_its_table(tmp_path: Path, name: str, table: str) -> None:
    save(tmp_path, name, tie=True)
    with pytest.raises(ftw.NotEligibleError) as caught:
        load(tmp_path)
    line = str(caught.value)
    assert line.startswith(
        f"{tmp_path}: {table}: refused: the LM head uses this same table (tie_word_embeddings is true"
    )
    assert name in line
    assert line.endswith("; use embed='gpu' or 'auto'")
    assert len(line.splitlines()) == 1


def test_auto_leaves_a_tied_table_on_the_gpu_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved, ids = save(tmp_path, "Qwen3ForCausalLM", tie=True), random_ids(1, 5)
    with caplog.at_level(logging.WARNING, "ftw"):
        model = load(tmp_path, embed="auto")
    assert "the token embedding stays on the GPU: tied to the LM head" in caplog.text
    assert host_modules(model) == []
    assert (model.ftw_memory.placement, model.ftw_memory.pinned_bytes) == ("gpu", {})
    assert "tied to the LM head" in model.ftw_memory.reason
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(logits(model, ids), logits(saved.load(), ids))


def test_auto_moves_the_per_layer_table_of_a_tied_model(tmp_path: Path) -> None:
    saved, ids = save(tmp_path, "Gemma4ForCausalLM", tie=True), random_ids(1, 5)
    model = load(tmp_path, embed="auto")
    assert host_modules(model) == ["model.embed_tokens_per_layer"]
    assert model.ftw_memory.placement == "gpu"
    assert torch.equal(logits(model, ids), logits(saved.load(), ids))


def test_gpu_loads_a_plain_model(qwen3: Saved) -> None:
    model = load(qwen3.folder, embed="gpu")
    assert host_modules(model) == []
    assert_same_weights(model, qwen3.load())
    with pytest.raises(ValueError, match="hot_bytes: embed='gpu'"):
        load(qwen3.folder, embed="gpu", hot_bytes=4096)


def test_class_that_reads_all_of_a_table_is_refused(
    qwen3: Saved, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The verdict rests on names; a class of the caller's may tie nevertheless."""

    class Tying(Qwen3ForCausalLM):
        def tie_weights(self, *args: Any, **options: Any) -> None:
            self.lm_head.weight = self.model.embed_tokens.weight

    with pytest.raises(
        ftw.NotEligibleError, match=r"model.embed_tokens.weight: is lm_head.weight of Tying, where a Linear does"
    ):
        load(qwen3.folder, model_class=Tying)
    model = load(qwen3.folder, model_class=Tying, embed="auto")
    assert "the tables stay on the GPU" in caplog.text
    assert "is lm_head.weight of Tying" in model.ftw_memory.reason
    assert host_modules(model) == []


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "MT5ForConditionalGeneration"])
def test_class_that_ties_by_the_bytes_of_weights_is_refused_by_its_head(tmp_path: Path, name: str) -> None:
    """T5's configuration says tied whatever config.json does, and its class looks whether a stored head is the same."""
    saved = save(tmp_path, name)
    rename(saved, lambda tensors: tensors.update({"lm_head.weight": torch.randn(128, 16)}))
    change_config(saved, tie_word_embeddings=False)
    line = line_of(tmp_path, ftw.NotEligibleError)
    assert f"{tmp_path}: shared.weight: {name} ties it to lm_head where their bytes are the same" in line
    model, ids = load(tmp_path, embed="auto"), random_ids(1, 5)
    assert (model.ftw_memory.placement, host_modules(model)) == ("gpu", [])
    assert "ties it to lm_head" in model.ftw_memory.reason
    assert torch.equal(logits(model, ids, decoder_input_ids=ids), logits(saved.load(), ids, decoder_input_ids=ids))


def test_module_that_does_more_than_a_lookup_is_refused(qwen3: Saved) -> None:
    class Doubling(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(ids)

    class Doubled(Qwen3ForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.embed_tokens = Doubling(config.vocab_size, config.hidden_size)

    with pytest.raises(ftw.NotEligibleError, match=r"embed_tokens.weight: Doubling does more than look rows up"):
        load(qwen3.folder, model_class=Doubled)


def test_scaled_embedding_with_a_vector_for_one_token_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "T5Gemma2ForConditionalGeneration")
    line = line_of(tmp_path, ftw.NotEligibleError)
    assert "embed_tokens.weight: T5Gemma2TextScaledWordEmbedding does more than look rows up" in line


def test_ngram_table_is_refused(tmp_path: Path) -> None:
    tensors = {**llama_tensors(), "model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight": torch.ones(4, 8)}
    source = write_checkpoint(tmp_path / "ngram", tensors, llama_config())
    with pytest.raises(ftw.NotEligibleError, match="is an n-gram table, which transformers puts together"):
        load(source)


def test_shared_table_of_another_dtype_is_refused(qwen3: Saved) -> None:
    with pytest.raises(ftw.FtwError, match=r"found torch.float32, the model has torch.bfloat16; share='node'"):
        load(qwen3.folder, dtype=torch.bfloat16, share="node")


# What is no model of transformers.


def line_of(source: Path, kind: type[ftw.FtwError], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        load(source, **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def change_config(saved: Saved, **values: Any) -> None:
    path = saved.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def rename(saved: Saved, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(saved.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, saved.folder / "model.safetensors", {"format": "pt"})


def test_missing_weight_is_named(qwen3: Saved) -> None:
    rename(qwen3, lambda tensors: tensors.update(strange=tensors.pop("model.norm.weight")))
    line = line_of(qwen3.folder, ftw.CheckpointError)
    assert f"{qwen3.folder}: model.norm.weight: Qwen3ForCausalLM needs it, the checkpoint lacks it" in line
    assert "it has 1 that the model lacks, such as strange" in line


def test_weight_of_another_shape_is_named(qwen3: Saved) -> None:
    rename(qwen3, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    assert "model.norm.weight: found [3], Qwen3ForCausalLM has [16] there" in line_of(qwen3.folder, ftw.CheckpointError)


def test_weight_that_the_class_does_without_is_no_problem(qwen3: Saved) -> None:
    rename(qwen3, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert_same_weights(load(qwen3.folder), qwen3.load())


def test_fused_ftw_of_freetoken_is_refused_by_its_names(tmp_path: Path) -> None:
    source = write_ftw(
        tmp_path / "fused",
        {
            "model.embed_tokens.weight": torch.ones(128, 16),
            "lm_head.weight": torch.zeros(128, 16),
            "model.layers.0.self_attn.qkv_proj.weight": torch.ones(48, 16),
        },
    )
    config = build("Qwen3ForCausalLM").config
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(source)
    line = line_of(source, ftw.CheckpointError)
    assert "model.layers.0.input_layernorm.weight: Qwen3ForCausalLM needs it and" in line
    assert "such as model.layers.0.self_attn.qkv_proj.weight; safetensors, and FTW folders made from them" in line


def test_gguf_and_an_ftw_of_one_are_refused(tmp_path: Path) -> None:
    tables = {name: random_blocks(GGMLQuantizationType.Q8_0) for name in ("token_embd.weight", "output.weight")}
    path = write_gguf(tmp_path / "model.gguf", tables)
    ftw.convert(path, tmp_path / "out")
    for source in (path, tmp_path / "out"):
        assert f"{source}: format: found weights of a GGUF" in line_of(source, ftw.FtwError)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, "'NoSuchForCausalLM' is no model of transformers"),
        ({"architectures": None}, "architectures: there are none; name one by model_class"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures: found 'Qwen3ForCausalLM', a list of class names is"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM takes a LlamaConfig, model_type 'qwen3' is"),
        ({"model_type": "no_such_type"}, "config: transformers"),
    ],
    ids=["architecture", "none", "text", "family", "model_type"],
)
def test_unknown_model_is_refused(qwen3: Saved, change: dict[str, Any], words: str) -> None:
    change_config(qwen3, **change)
    assert words in line_of(qwen3.folder, ftw.CheckpointError)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "x"}, "got str"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"hidden_act": "nope"}, "KeyError: 'nope'"),
        ({"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, "nope"),
        ({"dtype": "float1024"}, "float1024"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "Loading a GPTQ quantized model requires"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("embed", ["host", "gpu"])
def test_config_of_no_use_is_refused_in_one_line(qwen3: Saved, change: dict[str, Any], words: str, embed: str) -> None:
    change_config(qwen3, **change)
    line = line_of(qwen3.folder, ftw.FtwError, embed=embed)
    assert line.startswith(str(qwen3.folder))
    assert words in line


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": False}], ids=["unasked", "refused"])
def test_code_of_a_checkpoint_is_never_run_and_nobody_asked(
    qwen3: Saved, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    code = f"open({str(tmp_path / 'has_run')!r}, 'w')\nfrom transformers import PretrainedConfig\n"
    (qwen3.folder / "config_own.py").write_text(f"{code}class Own(PretrainedConfig): model_type = 'own'\n")
    change_config(qwen3, model_type="own", auto_map={"AutoConfig": "config_own.Own"})
    assert "contains custom code" in line_of(qwen3.folder, ftw.CheckpointError, **options)
    change_config(qwen3, model_type="qwen3")
    assert isinstance(load(qwen3.folder, **options), Qwen3ForCausalLM)
    assert not (tmp_path / "has_run").exists()


def test_missing_config_is_named(qwen3: Saved) -> None:
    (qwen3.folder / "config.json").unlink()
    assert "config.json: file: is missing" in line_of(qwen3.folder, ftw.CheckpointError, embed="gpu")


def test_failure_while_reading_gives_the_tables_back(qwen3: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    shut = ftw.HostEmbedding.close
    monkeypatch.setattr(ftw.HostEmbedding, "close", lambda table: (closed.append(table.name), shut(table))[1])

    def fail(*_: object) -> None:
        raise ftw.CheckpointError("a", "b", "has changed")

    monkeypatch.setattr("ftw.loading.device_copy.DeviceCopy.load", fail)
    with pytest.raises(ftw.CheckpointError, match="a: b: has changed"):
        load(qwen3.folder)
    assert closed == ["model.embed_tokens.weight"]


def test_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "transformers.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(example, "docs/transformers.md", "exec"), names)
    assert host_modules(names["model"]) == ["model.embed_tokens"]
    assert names["tokens"].shape == (1, 3 + 20)


def test_report_and_close(qwen3: Saved) -> None:
    model = load(qwen3.folder)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, TransformersEmbedding)
    assert embedding.memory is model.ftw_memory
    assert model.ftw_memory.placement == "host"
    assert model.ftw_memory.pinned_bytes == {"model.embed_tokens.weight": 128 * 16 * 4}
    close(model)
    close(model)
    with pytest.raises(ftw.ClosedError, match=r"model.embed_tokens.weight"):
        logits(model, random_ids(1, 3))
