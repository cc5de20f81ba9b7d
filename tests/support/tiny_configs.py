"""Tiny configurations of any class of transformers: its default, shrunk until the model builds in no time.

The default becomes a dictionary, every size in it is replaced by a small one that its name tells, in nested parts too,
and the class reads the result back. What this gets wrong for a class is put right in `OVERRIDES`.
"""

import re
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

TIE_KEY = "tie_word_embeddings"
TEXT_KEYS = ("text_config", "thinker_config", "decoder", "vlm_config", "llm_config")
VOCAB_SIZE = 128  # a power of two, which some codebooks have to be
HIDDEN_SIZE = 16
HEADS = 2
HEAD_DIM = 8
LAYERS = 2

# The first pattern that matches the whole of a key decides; a value of None leaves the key as it is.
_SIZES: tuple[tuple[str, int | None], ...] = (
    (r".*token_(id|index).*|.*_idx|.*_token", None),
    (
        r".*kernel.*|.*_ratios?|conv_dim|num_labels|layer_norm_eps|.*dropout.*|.*_factor|num_channels|in_channels|in_chans|num_hash_functions",
        None,
    ),
    (r".*vocab_size.*|.*codebook_size|num_embeddings|n_vocab|.*_vocab", VOCAB_SIZE),
    (
        r"max_.*positions?(_embeddings)?|n_positions|n_ctx|max_seq_len(gth)?|.*max_position.*|seq_length|.*max_seq_len.*",
        64,
    ),
    (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim", HEAD_DIM // 2),
    (r"rotary_emb_base", None),
    (r"upsample_groups", HIDDEN_SIZE),
    (r"base_channels", 32),
    (r"mamba_(num|n)_heads", 4),
    (r".*lora_(rank|dim|r)|.*_rank", HEAD_DIM),
    (r".*(head_dim|d_kv|kv_channels|head_size|attention_key_size|d_head|dim_head)", HEAD_DIM),
    (r"(num_)?experts_per_tok(en)?|.*experts_per_tok|.*top_?k.*|num_selected_experts", 2),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r".*shared_experts?", 1),
    (r".*experts?", 4),
    (r".*num_(key_value|kv)_heads|n_kv_heads?|.*_kv_heads", HEADS),
    (r".*(attention_heads|num_heads|n_heads?|.*_heads|heads)", HEADS),
    (r"(.*_)?(num|n)_?layers?|.*hidden_layers|.*_layers|.*depth|.*_depths", LAYERS),
    (r".*(intermediate|ffn|inner|mlp|d_ff|feed_forward|hidden_dim).*(size|dim)?", 2 * HIDDEN_SIZE),
    (
        r".*(hidden|d_model|n_embd|embed|embedding|projection|output|proj|model|out)_?(size|dims?|channels)?",
        HIDDEN_SIZE,
    ),
    (r"dim|d_model|n_embd|width|.*_width|.*_dim|.*hidden.*size.*", HIDDEN_SIZE),
    (r".*image_size|.*img_size", 16),
    (r".*patch_size|.*stride", None),
    (r".*(window|chunk).*|.*_length", 16),
    (r"num_mel_bins|.*mel_bins|n_mels", 8),
    (r".*state_size|.*_size", HIDDEN_SIZE),
)
# What a default leaves open and its class would have worked out before it wrote the dictionary.
_OPEN = {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS, "vocab_size": VOCAB_SIZE, "attention_head_dim": HEAD_DIM}
_DROPPED = (TIE_KEY, "transformers_version", "architectures", "dtype", "torch_dtype", "per_layer_config")
_PATTERNS = tuple((re.compile(pattern), size) for pattern, size in _SIZES)


def shrink(values: dict[str, Any]) -> dict[str, Any]:
    """Replace every size in a configuration's dictionary by a small one; tie flags are dropped."""
    counts = [
        value
        for key, value in values.items()
        if isinstance(value, int) and isinstance(key, str) and re.fullmatch(r".*layers?|.*depth", key)
    ]
    return {key: _shrink_value(key, value, counts) for key, value in values.items() if key not in _DROPPED}


def _size_of(key: str) -> int | None:
    return next((size for pattern, size in _PATTERNS if pattern.fullmatch(key)), None)


def _shrink_value(key: str, value: Any, counts: list[int]) -> Any:
    if value is None:
        return _OPEN.get(key)
    if isinstance(value, bool | str) or not isinstance(key, str):
        return value
    if isinstance(value, dict):
        if "mrope_section" in value:
            return {**shrink(value), "mrope_section": [1, 1, 2]}
        return value if key in ("id2label", "label2id") else shrink(value)
    if isinstance(value, list | tuple) and value:
        return _shrink_list(key, value, counts)
    if not isinstance(value, int):
        return value
    if re.fullmatch(r".*token_(id|index)|.*_idx|.*_token", key):
        return value if value < VOCAB_SIZE else _token(key)
    size = _size_of(key)
    return value if size is None or value <= size else size


def _shrink_list(key: str, value: Any, counts: list[int]) -> Any:
    if key.endswith(("token_id", "token_ids")):
        return [token if token < VOCAB_SIZE else 2 for token in value]
    if key == "mrope_section":
        return [1, 1, 2]
    if len(value) in counts and len(value) > LAYERS:
        if all(isinstance(item, str) for item in value):
            kinds = list(dict.fromkeys(value))[:LAYERS]
            return (kinds * LAYERS)[:LAYERS]
        return [_shrink_value(key, item, counts) for item in value[:LAYERS]]
    if all(isinstance(item, dict) for item in value):
        return [shrink(item) for item in value]
    size = _size_of(key)
    if size and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return [min(item, size) for item in value]
    return value


def _token(key: str) -> int:
    return 3 + sum(map(ord, key)) % (VOCAB_SIZE - 3)


_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE_BY_LAYER = {"full_attention": _ROPE, "sliding_attention": _ROPE}
# What the general way gets wrong, by configuration class; "a.b" reaches into a part.
OVERRIDES: dict[str, dict[str, Any]] = {
    "Apertus1p5Config": {"audio_config.decoder_hidden_size": 32},
    "ChameleonConfig": {
        "vocabulary_map": {"<image>": 5},
        "vq_config.channel_multiplier": [1],
        "vq_config.base_channels": 32,
    },
    "CohereCompassConfig": {"text_config.rope_parameters": _ROPE_BY_LAYER},
    "CohereCompassTextConfig": {"rope_parameters": _ROPE_BY_LAYER},
    "CpmAntConfig": {"dim_ff": 32, "prompt_types": 2, "prompt_length": 8},
    "DbrxConfig": {"attn_config.rope_theta": 10000.0},
    "DeepseekOcr2Config": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "DiffusionGemmaConfig": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 8,
    },
    "DoryConfig": {
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "num_hidden_layers": 3,
        "layer_types": ...,
    },
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 8},
    "Dots3NoteConfig": {"text_config.layer_types": ["full_attention"] * 2},
    "Emu3Config": {
        "vocabulary_map": {"<image>": 5, "<|extra_200|>": 6},
        "vq_config.channel_multiplier": [1],
        "vq_config.base_channels": 32,
    },
    "FalconH1Config": {"mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_n_heads": 4},
    "FunAsrNanoConfig": {"adaptor_config.intermediate_size": 4},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
    "Gemma4AssistantConfig": {"text_config.hidden_size_per_layer_input": 0},
    "Glm5NextConfig": {"text_config.index_topk": 16},
    "Granite4VisionConfig": {
        "deepstack_layer_map": [[0, 0]],
        "vision_config.hidden_size": 64,
        "text_config.hidden_size": 64,
    },
    "HYV4VLConfig": {"text_config.rope_parameters.mrope_section": [1, 1, 0]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"num_heads": 4},
    "Molmo2Config": {"adapter_config.vision_feature_layer": [0, 1]},
    "MoonshineStreamingConfig": {"num_key_value_heads": HEADS, "num_attention_heads": HEADS, "head_dim": HEAD_DIM},
    "NeoMMEConfig": {"head_dim": 16, "hidden_size": 32},
    "PerceiverConfig": {"num_self_attends_per_block": 1, "d_latents": 16, "d_model": 16},
    "Qwen4ExpConfig": {f"text_config.{key}": value for key, value in _INDEXER.items()},
    "Qwen4ExpTextConfig": _INDEXER,
    "Qwen3OmniMoeConfig": {"talker_config.text_config.shared_expert_intermediate_size": 16},
    "ReformerConfig": {"axial_pos_embds_dim": (8, 8), "axial_pos_shape": (8, 8)},
    "ZambaConfig": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
}
# What a model needs besides, by its own class.
MODEL_OVERRIDES: dict[str, dict[str, Any]] = {
    "Qwen2_5OmniForConditionalGeneration": {"enable_audio_output": False},  # its vocoder has 116 million parameters
    "Qwen3OmniMoeForConditionalGeneration": {"enable_audio_output": False},  # its talker's default cannot be built
    "ReformerModelWithLMHead": {"is_decoder": True},
}


_WITH_WORDS = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ",
    "TEXT_ENCODING", "RETRIEVAL",
)  # fmt: skip
_MORE_FAMILIES = {"bert-generation", "dpr", "higgs_audio_v2"}
# Of other tables: classes that look words up for other ends, and parts of models, alone.
OTHERS = {
    "BarkCausalModel": "bark", "BarkFineModel": "fine_acoustics", "BlipForConditionalGeneration": "blip",
    "BlipForImageTextRetrieval": "blip", "BlipForQuestionAnswering": "blip",
    "BertGenerationDecoder": "bert-generation", "CLIPSegForImageSegmentation": "clipseg", "ClvpDecoder": "clvp_decoder",
    "ClvpEncoder": "clvp_encoder", "ClvpForCausalLM": "clvp_decoder",
    "CsmDepthDecoderForCausalLM": "csm_depth_decoder_model", "DiaForConditionalGeneration": "dia",
    "FlaubertForQuestionAnsweringSimple": "flaubert", "FlavaForPreTraining": "flava",
    "NeoMMEForRetrieval": "neomme", "PerceiverForSequenceClassification": "perceiver",
    "ProphetNetDecoder": "prophetnet", "ProphetNetEncoder": "prophetnet",
    "Qwen2_5OmniTalkerForConditionalGeneration": "qwen2_5_omni_talker",
    "SpeechT5ForTextToSpeech": "speecht5", "ViltForImageAndTextRetrieval": "vilt",
    "VisualBertForVisualReasoning": "visual_bert", "XLMForQuestionAnsweringSimple": "xlm",
    "XLNetForQuestionAnsweringSimple": "xlnet",
}  # fmt: skip
_CLASSIFIERS = (
    "albert",
    "bert",
    "distilbert",
    "gemma2",
    "gpt2",
    "ibert",
    "llama",
    "modernbert",
    "qwen3",
    "t5",
    "xlnet",
)


def classes() -> dict[str, str]:
    """Return the classes of the installed release that look tokens up, and the family of each.

    They are those of its tables of language models, the base models of the same families, and classifiers of a few.
    """
    found: dict[str, str] = {}
    for task in _WITH_WORDS:
        _add(found, getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES"))
    families = set(found.values())
    _add(found, modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES)
    for mapping in (modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES):
        _add(found, {family: names for family, names in mapping.items() if family in families | _MORE_FAMILIES})
    classifiers = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    _add(found, {family: classifiers[family] for family in _CLASSIFIERS})
    return dict(sorted({**OTHERS, **found}.items()))


def _add(found: dict[str, str], mapping: Mapping[str, str | tuple[str, ...]]) -> None:
    for family, names in mapping.items():
        for name in (names,) if isinstance(names, str) else names:
            found.setdefault(name, family)


def tiny_values(model: str) -> dict[str, Any]:
    """Return what the tiny configuration of a model's class is made with, without any tie flag."""
    config_class = getattr(transformers, model).config_class
    values = shrink(config_class().to_dict())
    overrides = OVERRIDES.get(config_class.__name__, {}) | MODEL_OVERRIDES.get(model, {})
    for path, value in overrides.items():
        *parents, key = path.split(".")
        part = values
        for parent in parents:
            part = part.setdefault(parent, {})
        if value is ...:
            part.pop(key, None)
        else:
            part[key] = value
    return values


def tiny_config(model: str, tie: bool | None = None, text_tie: bool | None = None) -> PreTrainedConfig:
    """Build the tiny configuration of a model's class, with the tie flag of the top and that of its text part."""
    values = tiny_values(model)
    if tie is not None:
        values[TIE_KEY] = tie
    if text_tie is not None:
        values[next(key for key in TEXT_KEYS if key in values)][TIE_KEY] = text_tie
    return getattr(transformers, model).config_class(**values)
