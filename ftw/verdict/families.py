"""Model families: what an absent tie flag means in each, where the flag is read, and which classes have no LM head.

Read off transformers 5.24.0 (2026-11): the configuration classes' own defaults, and the classes that tie. A checkpoint
of a model type that is in none of these sets comes from remote code, about which nothing is assumed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftw.checkpoint import TIE_KEY

if TYPE_CHECKING:
    from ftw.checkpoint import ModelConfig

TIED_BY_DEFAULT = frozenset(
    """
    albert aya_vision bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small blip
    blip_text_model bloom camembert canary cohere cohere2 cohere2_moe cohere2_vision cohere_compass_text
    convbert cpmant csm ctrl d_fine dab-detr data2vec-text deberta deberta-v2 deepseek_vl deepseek_vl_hybrid
    deformable_detr deimv2 diffusion_gemma diffusion_gemma_text distilbert electra ernie ernie4_5 ernie4_5_moe
    ernie4_5_vl_moe ernie4_5_vl_moe_text esm falcon falcon_mamba fine_acoustics flaubert flava florence2 fnet
    fun_asr_nano funnel gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text
    gemma4_unified gemma4_unified_assistant gemma4_unified_text glmasr got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo
    gpt_neox_japanese granite_docling granite_docling_text granite_speech granite_speech5_ctc
    granite_speech_plus granite_swa grounding-dino gte hunyuan_vl hunyuan_vl_text hyperclovax_vision_v2 ibert
    internvl janus jetmoe jina_embeddings_v3 kimi_k25 kosmos-2 kosmos-2.5 kosmos_2_5_text_model
    kosmos_2_text_model lara_mini layoutlm led lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl lighton_ocr longformer longt5
    luke lxmert m2m_100 mamba marian mbart megatron-bert mimi mimi_decoder mimi_encoder minicpm3 minicpm_ocr
    mistral3 mm-grounding-dino mobilebert modernbert modernbert-decoder moonshine moss_transcribe_diarize mpnet
    mpt mra mt5 mvp neomme nllb-moe nomic_bert nystromformer openai-gpt opt ovis2 paddleocr_vl paddleocr_vl_text
    paligemma pe_audio_video pegasus pegasus_x plbart pop2piano pp_chart2table pp_doclayout_v3 pp_doclayout_v4
    prophetnet qwen2_5_omni_text qwen3_asr qwen3_vl_moe_text recurrent_gemma roberta roberta-prelayernorm
    roc_bert roformer rt_detr_v2 sam sam_hq seamless_m4t seamless_m4t_v2 shieldgemma2 smollm3 speech_to_text
    speecht5 squeezebert starcoder2 switch_transformers t5 t5_gemma_module t5gemma t5gemma2 t5gemma2_decoder
    t5gemma2_encoder t5gemma2_text tapas trocr udop umt5 vaultgemma vilt visual_bert voxtral_realtime whisper
    xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso youtu zamba zamba2 zaya
    """.split()
)

UNTIED_BY_DEFAULT = frozenset(
    """
    EvollaModel afmoe apertus apertus1p5 apertus1p5_text arcee aria aria_text axk1 axk2 bailing_hybrid bamba
    beam bitnet blt blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher bridgetower chameleon
    codegen cohere_asr cohere_compass cosmos3_edge cosmos3_edge_text cosmos3_omni cwm dbrx deepseek_ocr2
    deepseek_ocr2_encoder deepseek_ocr2_text deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge
    dory dots1 dots3_note dots3_note_text emu3 emu3_text_model esmc eurobert evolla exaone exaone4 exaone4_5
    exaone_moe falcon_h1 fast_vlm flex_olmo flint fsmt fuyu git glm glm4 glm46v glm4_moe glm4_moe_lite glm4v
    glm4v_moe glm4v_moe_text glm5_next glm5_next_text glm_image glm_moe_dsa glm_ocr glmga gpt_neox gpt_oss gptj
    granite granite4_vision granite4_vision_text granitemoe granitemoe_swa granitemoehybrid granitemoeshared
    helium higgs_audio_v2 hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hy_v4_vl hy_v4_vl_text
    hyperclovax idefics idefics2 idefics3 imagegpt internlm3 iquestcoder jais2 jamba kimi_linear kolibri1
    kyutai_speech_to_text laguna llama llama4 llama4_text llava llava_next llava_next_video llava_onevision
    longcat_flash mamba2 mellum mimo_v2_flash minicpmv4_6 minicpmv4_7 minimax minimax_m2 minimax_m3_vl
    minimax_m3_vl_text ministral ministral3 mistral mistral4 mistral_large4 mistral_large4_text mixtral
    mllama_text_model modernvbert molmo2 molmo2_text moonshine_streaming moshi moshi_depth muse_glimmer_text
    muse_spark_text musicgen_decoder musicgen_melody_decoder nanochat nemotron nemotron_h neucodec olmo olmo2
    olmo3 olmo_hybrid olmoe openai_privacy_filter perception_lm persimmon phi phi3 phi4_multimodal phimoe
    pix2struct pix2struct_text_model pp_formulanet_text qianfan_ocr qwen2 qwen2_5_omni_talker
    qwen2_5_omni_thinker qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
    qwen3_moe qwen3_next qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text qwen3_omni_moe_thinker
    qwen3_vl qwen3_vl_moe qwen4_exp qwen4_exp_text reformer rembert rwkv sarvam_mla sarvam_moe seed_oss smolvlm
    solar_open stablelm step3p5 ultrabert ultravbert unlimited_ocr unlimited_ocr_text vibevoice video_llama_3
    video_llava vipllava xcodec2 xlstm
    """.split()
)

WITHOUT_FLAG = frozenset(
    """
    aimv2 aimv2_text_model align align_text_model altclip altclip_text_model audioflamingo3 beit blip-2
    blip_2_qformer bridgetower_text_model bros canary_decoder chinese_clip chinese_clip_text_model clap
    clap_text_model clip clip_text_model clipseg clipseg_text_model clvp clvp_decoder clvp_encoder
    colmodernvbert colpali colqwen2 csm_depth_decoder_model data2vec-audio decision_transformer dia dia_decoder
    dia_encoder dpr embedding_gemma2 embedding_gemma2_text encoder-decoder fastspeech2_conformer
    flava_image_codebook flava_image_model flava_text_model gemma3n_audio gemma3n_vision glm4v_text
    glm_image_text glm_ocr_text gradium_phonon_tts granite_speech5_encoder groupvit groupvit_text_model hubert
    inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model inkling_text instructblip
    instructblip_qformer instructblipvideo instructblipvideo_qformer jev lasr_ctc layoutlmv2 layoutlmv3
    layoutxlm lilt markuplm metaclip_2 metaclip_2_text_model mllama muse_glimmer muse_spark musicflamingo
    nemo_speechlm nemotron3_5_asr nemotron3_5_transcribe_word_timestamp nemotron_asr_streaming nemotron_h_omni
    omdet-turbo omniasr omniasr_ctc ovis2_vision owlv2 owlv2_text_model owlvit owlvit_text_model parakeet_ctc
    parakeet_rnnt parakeet_tdt pe_audio pe_video perceiver pi0 pocket_tts pp_formulanet qwen2_5_omni qwen2_5_vl_text
    qwen2_audio qwen2_vl_text qwen3_omni_moe qwen3_omni_moe_text qwen3_vl_text rag sam3 sam3_lite_text
    sam3_lite_text_text_model sew sew-d siglip siglip2 siglip2_text_model siglip_text_model
    speech-encoder-decoder splinter step3p7 tipsv2 tipsv2_text_model tvp unispeech unispeech-sat vibevoice_asr
    videoprism videoprism_text_model vision-encoder-decoder vision-text-dual-encoder vits voxtral
    voxtral_encoder voxtral_realtime_encoder voxtral_realtime_text wav2vec2 wavlm xclip xclip_text_model
    """.split()
)

# What the flag is called where that is not TIE_KEY: the first that a configuration states counts.
FLAG_NAMES = dict.fromkeys(["lfm2", "lfm2_moe", "lfm2_vl"], ("tie_embedding", TIE_KEY))
# Where transformers 5 reads the flag, for the families that do not read it at the top level of config.json alone:
# there or in `text_config`, in the part whose class has the LM head, or in `text_config` if the top does not state it.
FLAG_AT_TOP_OR_IN_TEXT = frozenset(
    """
    blip fast_vlm glm4v glm4v_moe glm_ocr hunyuan_vl kosmos-2 llava llava_next_video llava_onevision minimax_m3_vl
    paddleocr_vl qwen2_5_vl qwen2_vl shieldgemma2 video_llama_3
    """.split()
)
FLAG_IN_PART = {
    **dict.fromkeys("blip-2 instructblip instructblipvideo kosmos-2.5 llama4 vibevoice".split(), "text_config"),
    **dict.fromkeys(["qwen2_5_omni", "qwen3_omni_moe"], "thinker_config"),
    **dict.fromkeys(["encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"], "decoder"),
    "rag": "generator",
}
FLAG_IN_TEXT_IF_ABSENT = frozenset(["perception_lm"])
FLAG_FORCED = frozenset(["longt5", "mt5", "t5", "udop", "umt5", "vilt"])
FLAG_WITHOUT_EFFECT = frozenset(
    """
    audioflamingo3 bailing_hybrid cpmant glm_image inkling2 inkling2_loop inkling_mm_model kimi_linear luke
    mllama mllama_text_model molmo2 moshi nemotron_h qwen2_audio reformer rembert t5gemma voxtral xlstm
    """.split()
)

# Families that no release ties: their heads have weights of their own, or map to other tokens than the table's.
NEVER_TIED = frozenset("bark clvp_decoder coarse_acoustics csm dia flava qwen2_5_omni_talker rembert semantic".split())
# Encoder-decoders whose LM head shares the decoder's table at most: one that the encoder has for itself is free.
ENCODER_TABLE_FREE = frozenset(["blip", "encoder-decoder", "fsmt", "t5gemma"])
# Those whose decoder's table is their LM head in transformers 4 whatever the flag says: its projection has that weight.
DECODER_TABLE_IS_HEAD = frozenset(["fsmt"])
# Those of which it is free where the configuration says that the two sides have vocabularies of their own.
ENCODER_TABLE_FREE_IF_NOT_SHARED = frozenset(["marian"])
SHARED_VOCABULARY_KEY = "share_encoder_decoder_embeddings"
# Models that compute with the whole of their decoder's table: DiffusionGemma's self-conditioning multiplies by it.
DECODER_TABLE_READ_WHOLE = frozenset(["diffusion_gemma"])

# GGUF architectures whose models have no LM head (llama.cpp's encoders, 2026-11).
GGUF_WITHOUT_HEAD = frozenset(
    """
    bert clip eurobert gemma-embedding jina-bert-v2 jina-bert-v3 modern-bert neo-bert nomic-bert nomic-bert-moe
    t5encoder wavtokenizer-dec
    """.split()
)

_MAX_NAME = 512  # no class has a longer one; matching a hostile one of megabytes would take hours
# Classes for other ends than text, whose weights of their own lie beside the model that they are made of.
_TASK = re.compile(
    r".+(For\w*Classification|ForQuestionAnswering(Simple)?|ForMultipleChoice|ForNextSentencePrediction|For\w*RewardModel"
    r"\w*)"
)
_HEADLESS = re.compile(
    rf"{_TASK.pattern}|.+(For\w*(Retrieval|Detection|Segmentation|Embedding)|ForTextEncoding|EncoderModel"
    r"|TextModelWithProjection|TalkerForConditionalGeneration)|(HF_|Jina|X|XLMR)?ColBERT\w*"
    r"|(Electra|Flava|Funnel|Splinter)ForPreTraining|BertGenerationEncoder|DPR(ContextEncoder|QuestionEncoder|Reader)"
    r"|(GradiumPhononTTS|HiggsAudioV2|Musicgen|MusicgenMelody|PI0|PocketTTS)ForConditionalGeneration"
    r"|CsmDepthDecoderForCausalLM|JevForDecision|SpeechT5ForTextToSpeech|ViltForImageAndTextRetrieval"
    r"|VisualBertForVisualReasoning"
)
_BASE_MODEL = re.compile(r".+Model")
# What transformers calls the parts that such a model is made of; alone, they have no head either.
_BASE_PART = re.compile(r".+(Encoder|Decoder|DecoderWrapper|Stack|TextTransformer)")
_BARE_ENDS = frozenset(["", "decoder", "decoderwrapper", "encoder", "model", "stack", "textmodel", "texttransformer"])
# Those that are not called as their model type is.
_BARE_CLASSES = frozenset(
    """
    BarkFineModel ClvpModel CsmBackboneModel DecisionTransformerGPT2Model DiffusionGemmaDecoderModel
    DiffusionGemmaEncoderTextModel FunnelBaseModel HunYuanDenseV1Model HunYuanMoEV1Model InklingModel
    Nemotron3_5TranscribeModel PaddleOCRTextModel PeAudioFrameLevelModel Qwen2_5OmniThinkerTextModel
    Qwen3OmniMoeTalkerModel Qwen3OmniMoeThinkerTextModel SeamlessM4TTextToUnitModel Speech2TextModel Step3p7TextModel
    VideoPrismClipModel
    """.split()
)
# Classes that hold a whole language model, whatever the rest of their name says.
_WITH_HEAD = re.compile(
    r".*(Head\w*Model|EncoderDecoderModel|BertGenerationDecoder|(?<!Nano)ChatModel|(?<!X)GLMModel|MTModel|Qwen2_5OmniModel"
    r"|Pix2StructTextModel|SeamlessM4T(v2)?Model|MusicgenMelodyModel|MusicgenModel|Blip2Model|RagModel"
    r"|BlipForQuestionAnswering|ShieldGemma2ForImageClassification)"
)

# What the names of tensors begin with in a class that holds a base model, and never in the base model itself.
_AROUND_BASE_MODEL = frozenset(
    """
    albert backbone bert biogpt convbert cpmant data2vec_text deberta distilbert electra ernie esm fnet funnel git
    gpt_neox gpt_neox_japanese gte ibert layoutlm led longformer luke lxmert mobilebert model mpnet mra nomic_bert
    nystromformer prophetnet reformer rembert roberta roberta_prelayernorm roc_bert roformer rwkv tapas transformer yoso
    """.split()
)
_OF_NO_TASK = tuple(
    f"{part}."
    for part in """
    audio_model audio_tower cls.predictions embed_out lm_head mtp multi_modal_projector rotary rotary_emb vision_model
    vision_tower visual
    """.split()
)
_HOLDS_ITSELF = frozenset(["kosmos_2_5_text_model", "kosmos_2_text_model"])  # whose base models are called so, too
_WRAPPERS = frozenset(["_orig_mod", "base_model", "module"])


def is_known(model_type: str | None) -> bool:
    """Return whether the installed knowledge covers a model type."""
    return model_type in TIED_BY_DEFAULT or model_type in UNTIED_BY_DEFAULT or model_type in WITHOUT_FLAG


def is_headless(architecture: str | None, model_type: str | None) -> bool:
    """Return whether a class surely has no LM head.

    Classifiers and encoders have none under any name; a bare "…Model" or "…Decoder" is trusted only in a family that is
    known, since remote code names whole chat models so.
    """
    if not architecture or len(architecture) > _MAX_NAME or _WITH_HEAD.fullmatch(architecture):
        return False
    if _HEADLESS.fullmatch(architecture):
        return True
    is_bare = is_base_model(architecture) or _BASE_PART.fullmatch(architecture) is not None
    return is_bare and is_known(model_type) and _is_called_so(architecture, model_type or "")


def _is_called_so(architecture: str, model_type: str) -> bool:
    """Return whether transformers has a bare class of that name for a model type; remote code names others alike."""
    stem = re.sub(r"[-_.]", "", model_type).lower()
    name = architecture.lower().replace("_", "")
    return architecture in _BARE_CLASSES or (name.startswith(stem) and name[len(stem) :] in _BARE_ENDS)


def is_base_model(architecture: str) -> bool:
    """Return whether a class is by its name a model without what a task adds to it, as `BertModel` is."""
    is_bare = len(architecture) <= _MAX_NAME and _BASE_MODEL.fullmatch(architecture) is not None
    return is_bare and _WITH_HEAD.fullmatch(architecture) is None and _HEADLESS.fullmatch(architecture) is None


def is_for_task(architecture: str) -> bool:
    """Return whether a class is by its name a model and what a task such as classification adds to it."""
    return len(architecture) <= _MAX_NAME and _TASK.fullmatch(architecture) is not None


def is_of_no_task(name: str) -> bool:
    """Return whether a tensor beside the base model tells of no task: a rest of an LM head, a tower, a draft."""
    return name.startswith(_OF_NO_TASK)


def classes_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the classes of a model: the one that is loaded, where that is known, else all that config.json names."""
    return (config.model_class,) if config.model_class else config.architectures


def class_with_head(config: ModelConfig) -> str | None:
    """Return the first class of a model that may have an LM head; None if it names none, or all surely have none."""
    return next((name for name in classes_of(config) if not is_headless(name, config.model_type)), None)


def is_named_as_base_model(config: ModelConfig, path: str) -> bool:
    """Return whether a table's path is what it is in a base model, not in a class that holds one."""
    first = next((part for part in path.split(".") if part not in _WRAPPERS), "")
    is_other = config.model_type in WITHOUT_FLAG or config.model_type in _HOLDS_ITSELF
    return is_other or first not in _AROUND_BASE_MODEL
