"""What ftw knows of families, against the configuration classes of the installed transformers, and classes by name."""

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
import transformers.models
from huggingface_hub.errors import StrictDataclassError
from places import DATA
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging

from ftw.checkpoint import TIE_KEY
from ftw.verdict import families

NAMES = json.loads((DATA / "names.json").read_text())
NO_FLAG = "no flag"


@pytest.fixture(scope="session")
def defaults() -> dict[str, object]:
    """Return the flag of each family's default configuration in the installed transformers."""
    logging.set_verbosity_error()
    found: dict[str, object] = {}
    for config in _config_classes():
        if config.model_type:
            found[config.model_type] = getattr(_default_config(config), "tie_word_embeddings", NO_FLAG)
    by_name = {config.__name__: config for config in _config_classes()}
    for model_type, name in CONFIG_MAPPING_NAMES.items():  # some families have another one's class
        if name in by_name:
            flag = getattr(_default_config(by_name[name]), "tie_word_embeddings", NO_FLAG)
            found.setdefault(model_type, flag)
    return found


def test_families_tied_by_default_are_those_of_transformers(defaults: dict[str, object]) -> None:
    assert {name for name, flag in defaults.items() if flag is True} == families.TIED_BY_DEFAULT & set(defaults)


def test_families_untied_by_default_are_those_of_transformers(defaults: dict[str, object]) -> None:
    untied = {name for name, flag in defaults.items() if flag is False or flag is None}
    assert untied == families.UNTIED_BY_DEFAULT & set(defaults)


def test_families_without_flag_declare_none_in_transformers(defaults: dict[str, object]) -> None:
    flags = {name: flag for name, flag in defaults.items() if name in families.WITHOUT_FLAG}
    assert len(flags) > 100
    assert set(flags.values()) == {NO_FLAG}


def test_most_families_are_in_the_installed_release(defaults: dict[str, object]) -> None:
    known = families.TIED_BY_DEFAULT | families.UNTIED_BY_DEFAULT | families.WITHOUT_FLAG
    assert len(known & set(defaults)) > 500


def test_families_are_in_one_set_each() -> None:
    sets = (families.TIED_BY_DEFAULT, families.UNTIED_BY_DEFAULT, families.WITHOUT_FLAG)
    assert len(frozenset().union(*sets)) == sum(map(len, sets))


@pytest.mark.parametrize(
    "name",
    [
        "FLAG_AT_TOP_OR_IN_TEXT", "FLAG_IN_PART", "FLAG_IN_TEXT_IF_ABSENT", "FLAG_NAMES", "FLAG_FORCED",
        "FLAG_WITHOUT_EFFECT",
    ],
    ids=str,
)  # fmt: skip
def test_families_that_read_the_flag_elsewhere_are_known(name: str) -> None:
    assert [family for family in sorted(getattr(families, name)) if not families.is_known(family)] == []


@pytest.mark.parametrize("model_type", sorted(families.FLAG_FORCED), ids=str)
def test_family_with_forced_flag_ignores_what_it_is_given(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"the installed transformers has no {model_type}")
    config = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])(tie_word_embeddings=False)
    assert config.tie_word_embeddings is True


def test_class_with_a_head_is_not_headless() -> None:
    with_head = {name for classes in NAMES["lm_head"].values() for name in classes}
    assert [name for name in sorted(with_head) if families.is_headless(name, "bert")] == []


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("GPT2LMHeadModel", "gpt2"),
        ("GPT2DoubleHeadsModel", "gpt2"),
        ("BertForMaskedLM", "bert"),
        ("BertForPreTraining", "bert"),
        ("LxmertForPreTraining", "lxmert"),
        ("T5ForConditionalGeneration", "t5"),
        ("MarianMTModel", "marian"),
        ("FSMTModel", "fsmt"),
        ("EncoderDecoderModel", "encoder-decoder"),
        ("VisionEncoderDecoderModel", "vision-encoder-decoder"),
        ("SpeechEncoderDecoderModel", "speech-encoder-decoder"),
        ("Pix2StructTextModel", "pix2struct_text_model"),
        ("SeamlessM4TModel", "seamless_m4t"),
        ("SeamlessM4Tv2Model", "seamless_m4t_v2"),
        ("Blip2Model", "blip-2"),
        ("RagModel", "rag"),
        ("BlipForQuestionAnswering", "blip"),
        ("ShieldGemma2ForImageClassification", "shieldgemma2"),
        ("BertGenerationDecoder", "bert-generation"),
        ("VisualBertForRegionToPhraseAlignment", "visual_bert"),
        ("ColQwen2", "qwen2_vl"),  # of colpali-engine: some of its releases have a language model inside
        ("SomebodysDecoder", "somebodys"),
        ("SeamlessM4TForTextToSpeech", "seamless_m4t"),
        ("InternVLChatModel", "internvl_chat"),
        ("InternVLChatModel", "internvl"),
        ("ChatGLMModel", "chatglm"),
        ("ChatGLMForConditionalGeneration", "chatglm"),
        ("MiniCPMV", "minicpmv"),
        ("SomebodysModel", "somebodys"),
        ("SomebodysModel", None),
        ("Model", "bert"),
        (None, "bert"),
        ("", "bert"),
    ],
    ids=str,
)
def test_is_headless_says_no(architecture: str | None, model_type: str | None) -> None:
    assert families.is_headless(architecture, model_type) is False


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("BertModel", "bert"),
        ("LlamaModel", "llama"),
        ("Qwen3Model", "qwen3"),
        ("NanoChatModel", "nanochat"),
        ("GPT2Model", "gpt2"),
        ("T5Model", "t5"),
        ("CLIPTextModel", "clip_text_model"),
        ("CLIPTextModelWithProjection", "clip_text_model"),
        ("CLIPModel", "clip"),
        ("InternVLModel", "internvl"),
        ("T5EncoderModel", "t5"),
        ("T5EncoderModel", None),
        ("BertForSequenceClassification", "bert"),
        ("LlamaForSequenceClassification", "llama"),
        ("SomebodysForSequenceClassification", "somebodys"),
        ("GPT2ForTokenClassification", "gpt2"),
        ("BertForQuestionAnswering", "bert"),
        ("BertForMultipleChoice", "bert"),
        ("BertForNextSentencePrediction", "bert"),
        ("ElectraForPreTraining", "electra"),
        ("FunnelForPreTraining", "funnel"),
        ("LlamaBidirectionalForRewardModel", "llama"),
        ("LlamaForRewardModelWithGating", "llama"),
        ("Qwen2ForProcessRewardModel", "qwen2"),
        ("HF_ColBERT", "bert"),
        ("ColQwen2ForRetrieval", "colqwen2"),
        ("ColPaliForRetrieval", "colpali"),
        ("Qwen3VLForEmbedding", "qwen3_vl"),
        ("NeoMMEForRetrieval", "neomme"),
        ("BlipForImageTextRetrieval", "blip"),
        ("CLIPSegForImageSegmentation", "clipseg"),
        ("OwlViTForObjectDetection", "owlvit"),
        ("FlavaForPreTraining", "flava"),
        ("XLNetForQuestionAnsweringSimple", "xlnet"),
        ("ProphetNetEncoder", "prophetnet"),
        ("ProphetNetDecoder", "prophetnet"),
        ("ClvpEncoder", "clvp_encoder"),
        ("CsmDepthDecoderForCausalLM", "csm_depth_decoder_model"),
        ("ViltForImageAndTextRetrieval", "vilt"),
        ("VisualBertForVisualReasoning", "visual_bert"),
        ("SpeechT5ForTextToSpeech", "speecht5"),
        ("Qwen2_5OmniTalkerForConditionalGeneration", "qwen2_5_omni_talker"),
        ("Qwen3OmniMoeTalkerForConditionalGeneration", "qwen3_omni_moe_talker"),
    ],
    ids=str,
)
def test_is_headless_says_yes(architecture: str, model_type: str | None) -> None:
    assert families.is_headless(architecture, model_type) is True


_STATED = re.compile(r"\b(tie|tied|share|untie)_\w*(emb|weight|head|vocab)\w*")
# Words of configuration classes that are like a tie flag's, and what they are about instead.
_OF_OTHER_TIES = {
    "share_bbox_head": "a detector's boxes",
    "share_embedding": "PatchTST's patches",
    "share_encoder_decoder_embeddings": "Marian's two tables of words",
    "tie_codebooks_embeddings": "CSM's codebooks",
}


def test_every_name_of_a_tie_flag_in_transformers_is_known() -> None:
    names: dict[str, set[str]] = {}
    for path in Path(transformers.models.__path__[0]).glob("*/configuration_*.py"):
        for match in _STATED.finditer(path.read_text(encoding="utf-8")):
            names.setdefault(match[0], set()).add(path.parent.name)
    assert set(names) == {TIE_KEY, "tie_embedding", *_OF_OTHER_TIES}
    assert names["tie_embedding"] == set(families.FLAG_NAMES)


def _config_classes() -> Iterator[type[Any]]:
    """Yield every configuration class of the installed transformers."""
    for package in pkgutil.iter_modules(transformers.models.__path__, "transformers.models."):
        if not package.ispkg:
            continue
        for module in pkgutil.iter_modules(importlib.import_module(package.name).__path__, f"{package.name}."):
            if module.name.rpartition(".")[2].startswith("configuration_"):
                classes = vars(importlib.import_module(module.name)).values()
                yield from (value for value in classes if _is_config_class(value))


def _is_config_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, transformers.PreTrainedConfig)


def _default_config(config: type[Any]) -> object:
    """Return a default configuration, whose constructor may force a flag; the class where none can be made."""
    try:
        return config()
    except (StrictDataclassError, ValueError):
        return config
