"""Names of tensors, against every name under which transformers stores an embedding, a head or another lookup table."""

import json

import pytest
from counting import count_steps
from places import DATA

from ftw.checkpoint.stored_modules import MAX_MODULES
from ftw.checkpoint.tensor_names import find_heads, find_other_tables, find_token_embeddings
from ftw.errors import CheckpointError

NAMES = json.loads((DATA / "names.json").read_text())

EMBEDDINGS_NOT_FOUND = {
    # BLT and the double-headed GPT keep the one weight under the head's name; the verdict takes the head for the table.
    "lm_head.weight",
    # Speech parts of a model that reads its text elsewhere.
    "speech_decoder_model.model.decoder.input_embeds_layer.weight",
    "talker.model.embed_tokens.weight",
    # A transcript's encoder: "embed" alone is too common a name to be taken anywhere but at known paths.
    "flow_lm.condition_provider.conditioners.transcript_in_segment.embed.weight",
}
HEADS_NOT_FOUND = {
    # Their output is the table itself, no module of theirs is a head.
    "model.decoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "thinker.model.embed_tokens.weight",
}
OTHERS_TAKEN = {
    # The second text table of an encoder-decoder, which looks up tokens too.
    "decoder.word_embeddings.weight",
    "encoder.word_embeddings.weight",
    "led.decoder.embed_tokens.weight",
    "led.encoder.embed_tokens.weight",
    "model.language_model.decoder.embed_tokens.weight",
    "model.language_model.encoder.embed_tokens.weight",
    "prophetnet.encoder.word_embeddings.weight",
    # A text encoder beside other parts (FLAVA, MusicGen, CLVP, CSM): its rows are read by token ids.
    "embed_text_tokens.weight",
    "flava.text_model.embeddings.word_embeddings.weight",
    "text_encoder.embed_tokens.weight",
    "text_encoder_model.token_embedding.weight",
    # Kyutai's speech-to-text wraps its one table, of text and of codes, in a module of the same name.
    "embed_tokens.embed_tokens.weight",
    "model.embed_tokens.embed_tokens.weight",
}
OTHER_TABLES = sorted(set(NAMES["other_lookup_tables"]) - set(NAMES["embedding"]))


@pytest.mark.parametrize("name", NAMES["embedding"], ids=str)
def test_embedding_of_transformers_is_found(name: str) -> None:
    found = [module.tensors for module in find_token_embeddings([name])]
    assert found == ([] if name in EMBEDDINGS_NOT_FOUND else [{"weight": name}])


@pytest.mark.parametrize("name", NAMES["lm_head"], ids=str)
def test_head_of_transformers_is_found(name: str) -> None:
    found = [module.tensors for module in find_heads([name])]
    assert found == ([] if name in HEADS_NOT_FOUND else [{"weight": name}])


@pytest.mark.parametrize("name", OTHER_TABLES, ids=str)
def test_other_lookup_table_is_no_token_embedding(name: str) -> None:
    assert bool(find_token_embeddings([name])) is (name in OTHERS_TAKEN)
    assert find_heads([name]) == []


def test_exceptions_are_names_of_the_list() -> None:
    assert set(NAMES["embedding"]) >= EMBEDDINGS_NOT_FOUND
    assert set(NAMES["lm_head"]) >= HEADS_NOT_FOUND
    assert set(OTHER_TABLES) >= OTHERS_TAKEN


@pytest.mark.parametrize("name", sorted(set(NAMES["embedding"]) - {"lm_head.weight"}), ids=str)
def test_embedding_of_transformers_is_no_head(name: str) -> None:
    assert find_heads([name]) == []


@pytest.mark.parametrize(
    "name",
    [
        "model.embedding.weight",  # gguf-py's map of remote-code models
        "backbone.embedding.weight",
        "transformer.in_out_embed.weight",
        "transformer.embedding.word_embeddings.weight",
        "embedding.word_embeddings.weight",
        "transformer.token_embeddings.weight",
        "model.transformer.wte.weight",
        "model.tok_embeddings.weight",
        "transformer.embd.wte.weight",
        "language_model.embedding.word_embeddings.weight",
    ],
    ids=str,
)
def test_embedding_of_remote_code_is_found(name: str) -> None:
    assert [module.tensors for module in find_token_embeddings([name])] == [{"weight": name}]


@pytest.mark.parametrize(
    "name",
    [
        "transformer.output_layer.weight",
        "output_layer.weight",
        "model.transformer.ff_out.weight",
        "lm_head.linear.weight",
        "model.lm_head.weight",
        "head.weight",
        "output.weight",
    ],
    ids=str,
)
def test_head_of_remote_code_is_found(name: str) -> None:
    assert [module.tensors for module in find_heads([name])] == [{"weight": name}]


@pytest.mark.parametrize(
    "wrapper",
    ["module.", "_orig_mod.", "base_model.model.", "module.module.", "module._orig_mod.", "_orig_mod.module."],
    ids=str,
)
def test_wrapper_is_stripped_for_the_search_and_kept_in_the_name(wrapper: str) -> None:
    table, head = f"{wrapper}model.embed_tokens.weight", f"{wrapper}lm_head.weight"
    assert find_token_embeddings([table, head]) == [(f"{wrapper}model.embed_tokens", {"weight": table})]
    assert find_heads([table, head]) == [(f"{wrapper}lm_head", {"weight": head})]
    assert [module.path for module in find_token_embeddings([f"{wrapper}embeddings.weight"])] == [
        f"{wrapper}embeddings"
    ]


@pytest.mark.parametrize(
    "name",
    ["lm_head.bias", "cls.predictions.bias", "cls.predictions.decoder.bias", "final_logits_bias", "embed_out.bias"],
    ids=str,
)
def test_bias_alone_is_no_head(name: str) -> None:
    assert find_heads([name]) == []


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.61.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight",
        "mtp.embed_tokens.weight",
        "mtp.lm_head.weight",
        "mtp.0.head.weight",
        "model.mtp_layers.0.head.weight",
    ],
    ids=str,
)
def test_copy_of_a_prediction_layer_is_not_picked(name: str) -> None:
    assert find_token_embeddings([name]) == []
    assert find_heads([name]) == []


@pytest.mark.parametrize(
    "suffix",
    ["qweight", "weight_packed", "luts", "W_q", "weight._data", "_weight_qdata", "sign_mantissa", "codebooks"],
    ids=str,
)
def test_quantised_module_counts_as_head_and_as_table(suffix: str) -> None:
    assert [module.path for module in find_heads([f"lm_head.{suffix}"])] == ["lm_head"]
    assert [module.path for module in find_token_embeddings([f"model.embed_tokens.{suffix}"])] == ["model.embed_tokens"]


def test_module_has_what_lies_beside_its_weight() -> None:
    names = ["model.embed_tokens.weight", "model.embed_tokens.scales", "model.embed_tokens.biases", "lm_head.weight"]
    [table] = find_token_embeddings(names)
    assert table.tensors == {suffix: f"model.embed_tokens.{suffix}" for suffix in ("weight", "scales", "biases")}
    assert find_heads(names)[0].tensors == {"weight": "lm_head.weight"}


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (["shared.weight"], "shared"),
        (["decoder.embed_tokens.weight", "encoder.embed_tokens.weight"], "encoder.embed_tokens"),
        (
            ["model.shared.weight", "model.decoder.embed_tokens.weight", "model.encoder.embed_tokens.weight"],
            "model.encoder.embed_tokens",
        ),
        (["prophetnet.word_embeddings.weight", "prophetnet.decoder.word_embeddings.weight"],
         "prophetnet.decoder.word_embeddings"),
        (["shared.weight", "text_decoder.embed_tokens.weight", "text_encoder.embed_tokens.weight"],
         "text_encoder.embed_tokens"),
        (["text_encoder.embed_tokens.weight", "model.embed_tokens.weight"], "model.embed_tokens"),
        (["wte.weight", "h.0.encoder.embed_tokens.weight"], "wte"),
    ],
    ids="shared-alone two-sides bart-untied prophetnet-decoder seamless composite unrelated-encoder".split(),
)  # fmt: skip
def test_first_table_is_the_one_that_the_model_reads(names: list[str], first: str) -> None:
    assert find_token_embeddings(names)[0].path == first
    assert find_token_embeddings(reversed(names))[0].path == first
    assert len(find_token_embeddings(names)) == len(names)


@pytest.mark.parametrize(
    "name", ["embed_tokens." + "scale_" * 200_000 + "!", "module." * 4_000_000 + "x"], ids=["suffix", "wrappers"]
)
@pytest.mark.timeout(120)  # it takes microseconds, or minutes
def test_endless_name_is_passed_over_at_once(name: str) -> None:
    assert find_token_embeddings([name]) == []
    assert find_heads([name]) == []


def test_as_many_modules_of_a_kind_are_found_as_are_allowed_and_no_more() -> None:
    finds = {
        "embed_tokens": find_token_embeddings,
        "lm_head": find_heads,
        "ngram_embedding": lambda names, source: find_other_tables(names, [], source),
    }
    for leaf, find in finds.items():
        names = [f"m{number}.{leaf}.{part}" for number in range(MAX_MODULES) for part in ("weight", "scales")]
        assert len(find(names, "src")) == MAX_MODULES
        with pytest.raises(CheckpointError, match=r"^src: tensors: more than 4096 .* are stored, at most 4096 are"):
            find([*names, f"more.{leaf}.weight"], "src")


@pytest.mark.timeout(120)  # 2 s, or many minutes where C does more work than there are steps
def test_many_tables_are_ordered_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftw.checkpoint.stored_modules.MAX_MODULES", 200_000)
    names = [f"m{number}.embed_tokens.weight" for number in range(200_000)]
    assert len(find_token_embeddings(names)) == 200_000
    few, many = (count_steps(lambda count=count: find_token_embeddings(names[:count])) for count in (5_000, 20_000))
    assert many < 5 * few
