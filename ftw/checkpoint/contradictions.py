"""Contradictions: a configuration that says two things which cannot both be true, so nothing is computed of them.

What is checked is what transformers checks when it builds a configuration (5.24), and what attention itself needs:

    layer_types, mlp_layer_types   one entry for each of num_hidden_layers
    hidden_size                    a multiple of the attention heads: of a family that transformers checks, and of any
                                   other one where no head_dim says how large a head is
    attention heads                a multiple of the key and value heads
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftw.checkpoint.kv_cache import HEAD_DIM, HIDDEN_SIZE, MAX_COUNT, NUM_HEADS, NUM_KV_HEADS, first_count
from ftw.files import is_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BY_LAYER = ("layer_types", "mlp_layer_types")
# Families whose configuration transformers refuses if the heads do not divide hidden_size, a head_dim or not.
HEADS_DIVIDE = frozenset(
    "altclip_text_model altclip_vision_model arcee aria_text canary_decoder chinese_clip_text_model "
    "chinese_clip_vision_model clip_text_model clip_vision_model clipseg_text_model clipseg_vision_model "
    "cosmos3_edge_text cwm deepseek_ocr2_text deepseek_v2 dots3_note_audio_encoder dots3_note_vision_encoder esmc "
    "eurobert exaone gemma2 gemma3_text gemma3n_text gpt_neox gradium_phonon_tts higgs_audio_v2 hrm_text hyperclovax "
    "internlm3 iquestcoder jais2 llama metaclip_2_text_model metaclip_2_vision_model minicpm3 muse_glimmer_text "
    "muse_spark_text nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp "
    "nemotron3_diarization_audio neucodec pocket_tts superglue t5_gemma_module t5gemma2_decoder t5gemma2_text "
    "tipsv2_text_model ultrabert unlimited_ocr_text unlimited_ocr_vision_encoder vaultgemma xcodec2".split()
)


def find_contradictions(part: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what contradicts itself in the language model's own part of a config.json, a sentence for each."""
    return (*_wrong_lists(part), *_wrong_heads(part))


def find_gguf_contradictions(
    heads: object, kv_heads: object, hidden_size: object, key_length: object
) -> tuple[str, ...]:
    """Return what contradicts itself in the metadata of a GGUF, which may have a number of heads for each layer."""
    numbers = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": hidden_size}
    return tuple(_wrong_heads({**numbers, "head_dim": key_length}))


def _wrong_lists(part: Mapping[str, Any]) -> Iterator[str]:
    layers = part.get("num_hidden_layers")
    for key in _BY_LAYER:
        entries = part.get(key)
        if isinstance(entries, list) and is_count(layers) and layers and len(entries) != layers:
            yield f"num_hidden_layers is {min(layers, MAX_COUNT)}, but {key} has {len(entries)} entries"


def _wrong_heads(part: Mapping[str, Any]) -> Iterator[str]:
    heads, kv_heads = first_count((part,), NUM_HEADS), first_count((part,), NUM_KV_HEADS)
    hidden_size, head_dim = first_count((part,), HIDDEN_SIZE), first_count((part,), HEAD_DIM)
    needs_no_share = head_dim is not None or first_count((part,), ("kv_lora_rank",)) is not None
    is_checked = str(part.get("model_type")) in HEADS_DIVIDE or not needs_no_share
    if heads and hidden_size and is_checked and hidden_size % heads:
        yield f"hidden_size is {hidden_size}, which is no multiple of {heads} attention heads"
    if heads and kv_heads and heads % kv_heads:
        yield f"{heads} attention heads cannot share {kv_heads} key and value heads evenly"
