"""Words: values, names and keys that the choice of mutations draws from."""

from __future__ import annotations

from fuzz.mutations import ELEMENT_NBYTES, TORCH_NAMES

NUMBERS = (
    -1, 0, 1, 2, 3, 4, 7, 8, 9, 12, 24, 31, 32, 64, 255, 256, 4095, 4096, 8192, 65535, 65536, 65537, (1 << 31) - 1,
    1 << 31, (1 << 32) - 1, 1 << 32, 1 << 48, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 4096,
    (1 << 64) - 32, (1 << 64) - 1, 1 << 64, 10**30, -(1 << 63),
)  # fmt: skip
STEPS = (1, -1, 2, 8, -8, 32, -32, 4096, -4096)
# What a value of any other type may be; strings as `fuzz.documents` reads them.
OTHERS = (
    None, True, False, "", "x", 1.5, 0.0, -1e300, [], {}, [0], [[]], {"a": 1}, "@raw:NaN", "@raw:Infinity",
    "@raw:-Infinity", "@raw:1e400", "@raw:-0", "@raw:1.0", "@raw:", "@raw:{}{}", "@digits:400", "@digits:5000",
    "@nest:64", "@nest:140", "@nest:5000", "@nest:100000", "@rep:600:x", "@rep:100000:x", "@rep:70000:a.", "\ud800",
    "\0", "..", ".", "../x", "/", "/dev/zero", "a/b", "a\\b", "\n\x1b[31m", "\u202e", "\u00e9" * 130,
    "[bold]x[/]", "%s{}",
)  # fmt: skip
DTYPES = (
    *ELEMENT_NBYTES, "F4", "F6_E2M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "C64", "U16", "I16", "U32", "I32", "U64",
    *TORCH_NAMES.values(), "uint16", "uint32", "int16", "int32", "complex64", "float8_e5m2", "float8_e8m0fnu",
)  # fmt: skip
NAMES = (
    "model.embed_tokens.weight", "model.embed_tokens.qweight", "model.embed_tokens.weight_scale", "lm_head.weight",
    "lm_head.qweight", "lm_head.bias", "model.embed_tokens.scales", "model.embed_tokens.weight.absmax",
    "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
    "model.embed_tokens_per_layer.weight", "head.weight", "model.engram.embed.shard_0.weight",
    "model.engram.embed.shard_1.weight", "model.engram.embed.shard_2.weight", "model.engram.embed.0.weight",
    "model.engram.embed.weight", "model.embed_tokens.encoded_exponent", "transformer.wte.weight",
    "module.model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "token_embd.weight",
    "output.weight", "token_embd.qweight", "output.bias", "per_layer_token_embd.weight",
    "blk.0.ple_ngram_embd.weight", "gate_up#L00000", "ple_ngram_embd.0.weight", "ple_ngram_embd.1.weight",
    "model.layers.0.mlp.experts.0.up_proj.weight", "__metadata__", "blk.0.ffn_up_exps.weight",
    "model.layers.0.mlp.experts.gate_up_proj", "position_embd.weight", "token_types.weight",
    "a\x1b[31m.embed_tokens.weight", "a\x1b[31m.lm_head.weight", "a\u202e.engram.embed.0.weight",
)  # fmt: skip
KEYS = (
    "format", "version", "align", "shard_limit", "total_bytes", "tensors", "shards", "side_files", "ftw", "name",
    "kind", "dtype", "shape", "global_off", "nbytes", "file", "ggml_type", "logical_shape", "role", "placement",
    "xxh3_64", "sha256", "data_offsets", "weight_map", "tie_word_embeddings", "architectures", "model_type",
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "text_config",
    "decoder", "layer_types", "dfloat11_config", "quantization_config", "num_experts", "n_routed_experts",
    "kv_lora_rank", "qk_rope_head_dim", "split_ngram_parts", "hidden_size_per_layer_input", "global_head_dim",
    "num_kv_shared_layers", "attn_layer_indices", "hybrid_override_pattern", "block_types", "attn_type_list",
    "attn_layer_period", "attn_layer_offset", "block_configs", "full_attention_interval", "linear_attn_config",
    "attn_config", "multi_query", "quant_mode",
)  # fmt: skip
WORDS = (
    "LlamaForCausalLM", "BertModel", "LlamaForSequenceClassification", "Gemma3nForConditionalGeneration",
    "GPT2LMHeadModel", "T5ForConditionalGeneration", "T5EncoderModel", "llama", "bert", "t5", "bart", "ibert",
    "gpt2", "gemma3n", "mamba", "qwen3", "gemma4", "t5encoder", "Q8_0", "Q4_0", "Q4_K", "MXFP4", "Q8_1", "F16",
    "experts_bank", "weight", "host", "token_embedding", "full_attention", "hybrid", "linear_attention",
    "freetoken_weight", "source_metadata.gguf", "0123456789abcdef", "M*-M", "adapter", "GGUF", "ggml",
    "PK\x03\x04", "<", ">",
)  # fmt: skip
GGUF_KEYS = (
    "general.architecture", "general.alignment", "general.file_type", "general.type", "split.no", "split.count",
    "split.tensors.count", "tokenizer.ggml.tokens", "freetoken.output_weight_present", "llama.embedding_length",
    "llama.vocab_size", "llama.block_count", "llama.features_length", "llama.expert_count",
    "llama.attention.head_count", "llama.attention.head_count_kv", "llama.attention.key_length",
    "llama.attention.value_length", "llama.embedding_length_per_layer_input", "llama.full_attention_interval",
    "llama.attention.shared_kv_layers", "llama.nextn_predict_layers", "llama.attention.kv_lora_rank",
    "llama.rope.dimension_count", "llama.attention.key_length_swa", "llama.attention.value_length_swa",
    "llama.attention.sliding_window_pattern",
)  # fmt: skip
FILES = (
    "model.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json",
    "model.safetensors.index.json", "consolidated.safetensors", "adapter_model.safetensors", "extra.safetensors",
    "freetoken-00000.ftw", "freetoken-00001.ftw", "freetoken-00009.ftw", "freetoken_weight.json",
    "source_metadata.gguf", "model.gguf", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "m-00003-of-00003.gguf",
    "mmproj-model.gguf", "mtp-model.gguf",
    "ple-table-00000.safetensors", "tokenizer.json", "pytorch_model.bin", "copied.json.tmp",
)  # fmt: skip
SIZES = (24, 8, 64, 1, 0, 12, 23, 25, 16, 6, 4)
