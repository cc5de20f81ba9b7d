"""Tiny models of many families: enough configuration for transformers to build each, small enough to build them all."""

from typing import Any, NamedTuple

import torch
import transformers

VOCAB_SIZE = 96
TIE_KEY = "tie_word_embeddings"

_TOKENS = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    **_TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_BERT = {
    **_TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
_BART = {
    **_TOKENS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64,
    "forced_eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
_GPT = {**_TOKENS, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
_T5 = {**_TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_CLIP_VISION = {**_VISION, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 16}
_QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 16,
    "spatial_merge_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_GEMMA = {**_LLAMA, "head_dim": 8}
_GEMMA3 = {
    "text_config": _GEMMA, "vision_config": {**_VISION, "image_size": 16, "patch_size": 8}, "mm_tokens_per_image": 4,
}  # fmt: skip
_MAMBA = {**_TOKENS, "hidden_size": 16, "num_hidden_layers": 1}
_DISTILBERT = {**_TOKENS, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
_MODERNBERT = {"cls_token_id": 1, "sep_token_id": 2}
_FLAN_T5 = {**_T5, "feed_forward_proj": "gated-gelu"}
_WHISPER = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 8}
_LLAVA = {"text_config": {"model_type": "llama", **_LLAMA}, "vision_config": _CLIP_VISION, "image_token_index": 5}
_MISTRAL3 = {
    "text_config": {"model_type": "mistral", **_LLAMA},
    "vision_config": {"model_type": "pixtral", **_VISION, "image_size": 16, "patch_size": 8},
    "image_token_index": 5,
}
_QWEN2_VL = {
    "text_config": {**_LLAMA, "rope_parameters": _QWEN_ROPE},
    "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4},
}
_QWEN3_VL = {"text_config": {**_GEMMA, "rope_parameters": _QWEN_ROPE}, "vision_config": _QWEN_VISION}
_BLIP2 = {
    "text_config": {"model_type": "opt", **_BERT, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "vision_config": {**_VISION, "image_size": 16, "patch_size": 8},
    "qformer_config": {**_BERT, "encoder_hidden_size": 16},
    "num_query_tokens": 4, "image_token_index": 5,
}  # fmt: skip
_MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}

_DEEPSEEK = {
    **_LLAMA, **_MLA, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 1,
}  # fmt: skip

BOTH = (True, False)
BOTH_AND_DEFAULT = (True, False, None)


class Architecture(NamedTuple):
    """One class of a family.

    Attributes:
        id: What the tests call it.
        model: The model's class in transformers.
        config: The configuration's class.
        values: What the configuration is made with.
        ties: The values of the tie flag to build it with; `None` leaves the flag out.
        save: What `save_pretrained` is called with besides the folder.
    """

    id: str
    model: str
    config: str
    values: dict[str, Any]
    ties: tuple[bool | None, ...] = BOTH
    save: dict[str, Any] = {}  # noqa: RUF012 - a default, never written to


ARCHITECTURES = (
    Architecture("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_LLAMA, **_MOE}),
    Architecture("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 8}),
    Architecture("llama_sharded", "LlamaForCausalLM", "LlamaConfig", _LLAMA, save={"max_shard_size": "4KB"}),
    Architecture("llama_base", "LlamaModel", "LlamaConfig", _LLAMA),
    Architecture("llama_classifier", "LlamaForSequenceClassification", "LlamaConfig", _LLAMA),
    Architecture("mistral", "MistralForCausalLM", "MistralConfig", _LLAMA),
    Architecture("mixtral", "MixtralForCausalLM", "MixtralConfig", {**_LLAMA, **_MOE}),
    Architecture("gpt_oss", "GptOssForCausalLM", "GptOssConfig", {**_LLAMA, **_MOE, "head_dim": 8}),
    Architecture("gpt2", "GPT2LMHeadModel", "GPT2Config", _GPT, BOTH_AND_DEFAULT),
    Architecture("gptj", "GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 4}),
    Architecture("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", _BERT),
    Architecture("bloom", "BloomForCausalLM", "BloomConfig", {**_GPT, "hidden_size": 16}),
    Architecture("falcon", "FalconForCausalLM", "FalconConfig", _LLAMA, BOTH_AND_DEFAULT),
    Architecture("opt", "OPTForCausalLM", "OPTConfig", {**_BERT, "ffn_dim": 24, "word_embed_proj_dim": 8}),
    Architecture("phi3", "Phi3ForCausalLM", "Phi3Config", _LLAMA),
    Architecture("cohere2", "Cohere2ForCausalLM", "Cohere2Config", {**_LLAMA, "head_dim": 8}, BOTH_AND_DEFAULT),
    Architecture("gemma2", "Gemma2ForCausalLM", "Gemma2Config", {**_LLAMA, "head_dim": 8}),
    Architecture("gemma3_text", "Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA, BOTH_AND_DEFAULT),
    Architecture("mamba", "MambaForCausalLM", "MambaConfig", _MAMBA, BOTH_AND_DEFAULT),
    Architecture("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", _DEEPSEEK),
    Architecture("nanochat_base", "NanoChatModel", "NanoChatConfig", {**_LLAMA, "head_dim": 8}),
    Architecture("xlnet", "XLNetLMHeadModel", "XLNetConfig", {**_TOKENS, "d_model": 16, "n_layer": 1, "n_head": 2}),
    Architecture("bert", "BertModel", "BertConfig", _BERT),
    Architecture("bert_masked", "BertForMaskedLM", "BertConfig", _BERT),
    Architecture("bert_classifier", "BertForSequenceClassification", "BertConfig", _BERT),
    Architecture("roberta", "RobertaForMaskedLM", "RobertaConfig", _BERT),
    Architecture("albert", "AlbertForMaskedLM", "AlbertConfig", {**_BERT, "embedding_size": 8}),
    Architecture("electra", "ElectraForMaskedLM", "ElectraConfig", {**_BERT, "embedding_size": 8}),
    Architecture("electra_discriminator", "ElectraForPreTraining", "ElectraConfig", {**_BERT, "embedding_size": 8}),
    Architecture("distilbert", "DistilBertForMaskedLM", "DistilBertConfig", _DISTILBERT),
    Architecture("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", {**_BERT, **_MODERNBERT}),
    Architecture("clip_text", "CLIPTextModel", "CLIPTextConfig", _BERT, (None,)),
    Architecture("siglip_text", "SiglipTextModel", "SiglipTextConfig", {**_BERT, "hidden_size": 8}, (None,)),
    Architecture("t5", "T5ForConditionalGeneration", "T5Config", _T5, (True, None)),
    Architecture("flan_t5", "T5ForConditionalGeneration", "T5Config", _FLAN_T5, (False,)),
    Architecture("t5_encoder", "T5EncoderModel", "T5Config", _T5, (True,)),
    Architecture("bart", "BartForConditionalGeneration", "BartConfig", _BART, BOTH_AND_DEFAULT),
    Architecture("bart_base", "BartModel", "BartConfig", _BART),
    Architecture("mbart", "MBartForConditionalGeneration", "MBartConfig", _BART),
    Architecture("marian", "MarianMTModel", "MarianConfig", _BART),
    Architecture("whisper", "WhisperForConditionalGeneration", "WhisperConfig", {**_BART, **_WHISPER}),
    Architecture("llava", "LlavaForConditionalGeneration", "LlavaConfig", _LLAVA),
    Architecture("qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen2VLConfig", _QWEN2_VL),
    Architecture("qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen3VLConfig", _QWEN3_VL),
    Architecture("gemma3", "Gemma3ForConditionalGeneration", "Gemma3Config", _GEMMA3),
    Architecture("mistral3", "Mistral3ForConditionalGeneration", "Mistral3Config", _MISTRAL3, BOTH_AND_DEFAULT),
    Architecture("blip2", "Blip2ForConditionalGeneration", "Blip2Config", _BLIP2, (None,)),
    Architecture("blip2_base", "Blip2Model", "Blip2Config", _BLIP2, (None,)),
    Architecture("shieldgemma2", "ShieldGemma2ForImageClassification", "ShieldGemma2Config", _GEMMA3, (None,)),
)


def build(architecture: Architecture, tie: bool | None) -> torch.nn.Module:
    """Build a model with random weights, in bfloat16."""
    values = dict(architecture.values) if tie is None else {**architecture.values, TIE_KEY: tie}
    config = getattr(transformers, architecture.config)(**values)
    torch.manual_seed(0)
    return getattr(transformers, architecture.model)(config).to(torch.bfloat16)
