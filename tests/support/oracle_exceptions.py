"""Where the oracle's classes are left out, and where a verdict differs from transformers 5 on the safe side, and why.

The tests hold each of these: one that is no longer an exception fails. A table called eligible is never one.
"""

# Classes that no tiny configuration builds here.
CANNOT_BUILD = {
    "Apertus1p5ForConditionalGeneration": "its vocabulary has to hold the codebooks of an image and an audio tokenizer",
    "Apertus1p5Model": "its vocabulary has to hold the codebooks of an image and an audio tokenizer",
    "Ernie4_5_VLMoeForConditionalGeneration": "its lists of experts do not survive the way through a dictionary",
    "Ernie4_5_VLMoeModel": "its lists of experts do not survive the way through a dictionary",
    "FastVlmForConditionalGeneration": "needs timm",
    "FastVlmModel": "needs timm",
    "Gemma3nForConditionalGeneration": "needs timm",
    "Gemma3nModel": "needs timm",
    "Gemma4AssistantForCausalLM": "its own default is refused",
    "Granite4VisionForConditionalGeneration": "its down-sampling has no default",
    "Granite4VisionModel": "its down-sampling has no default",
    "InklingForConditionalGeneration": "needs scipy",
    "InklingModel": "needs scipy",
    "Nemotron3_5TranscribeForConditionalGeneration": "its chunks have to fit its own default",
    "Nemotron3_5TranscribeModel": "its chunks have to fit its own default",
    "PerceptionLMForConditionalGeneration": "needs timm",
    "PerceptionLMModel": "needs timm",
    "T5GemmaEncoderModel": "refuses the default, which is an encoder-decoder",
    "VibeVoiceAsrForConditionalGeneration": "its chunks have to fit the hops of its tokenizer",
    "VibeVoiceAsrModel": "its chunks have to fit the hops of its tokenizer",
}

# Classes whose fixed parts take seconds to build.
TOO_LARGE = {
    "VibeVoiceForConditionalGeneration": "its tokenizers' widths are fixed: a billion parameters",
}

# Classes whose configuration refuses a true flag.
REFUSES_TRUE = ("CsmDepthDecoderForCausalLM", "DbrxForCausalLM", "DbrxModel")

# Classes that compute with a whole table besides looking rows up in it: the part of the table's name, and how.
READ_WHOLE = {
    "DiffusionGemmaForBlockDiffusion": ("decoder", "self-conditioning multiplies probabilities by the decoder's table"),
    "DiffusionGemmaModel": ("decoder", "self-conditioning multiplies probabilities by the decoder's table"),
    "PerceiverForMaskedLM": ("input_preprocessor", "the output is multiplied by the table that the input came from"),
}

_ALWAYS = ("absent", "true", "false", "stripped")
_ALWAYS_BASE = ("true", "false")
_V4 = "transformers 4 shares the two weights by the same flag"
_REMOTE = "older remote code runs under transformers 4, which shares the two weights by the same flag"
_V5_ALONE = "transformers 5 ignores a flag of true, and code for transformers 4 would share the two weights by it"
_TWO_TENSORS = "its table lies in two tensors, without the name of a weight"

# Classes whose verdict differs on the safe side: with which flags, and why.
SAFE_SIDE: dict[str, tuple[tuple[str, ...], str]] = {
    "BarkCausalModel": (("true",), "its configuration names no family"),
    "BailingHybridForCausalLM": (("true",), _REMOTE),
    "BigBirdPegasusForCausalLM": (("absent", "true", "stripped"), _V4),
    "Cosmos3EdgeForConditionalGeneration": (("true",), _V5_ALONE),
    "EsmcForMaskedLM": (("true",), _V5_ALONE),
    "EvollaForProteinText2Text": (("true",), _V4),
    "GradiumPhononTTSForConditionalGeneration": (_ALWAYS, "its table has a name that it shares with no other class"),
    "Inkling2ForCausalLM": (("true",), _V5_ALONE),
    "Inkling2ForConditionalGeneration": (("true",), _V5_ALONE),
    "Inkling2LoopForCausalLM": (("true",), _V5_ALONE),
    "Inkling2LoopForConditionalGeneration": (("true",), _V5_ALONE),
    "InklingForCausalLM": (("true",), _V5_ALONE),
    "JanusForConditionalGeneration": (("stripped",), "its head for images may be the LM head, so the tie is not known"),
    "KimiLinearForCausalLM": (("true",), _REMOTE),
    "LukeForMaskedLM": (("absent", "true"), _V4),
    "Molmo2ForConditionalGeneration": (_ALWAYS, _TWO_TENSORS),
    "Molmo2Model": (_ALWAYS_BASE, _TWO_TENSORS),
    "Molmo2TextModel": (_ALWAYS_BASE, _TWO_TENSORS),
    "MuseSparkForConditionalGeneration": (("true",), _V5_ALONE),
    "MusicFlamingoForConditionalGeneration": (("true",), _V5_ALONE),
    "NemotronHForCausalLM": (("true",), _REMOTE),
    "OmniASRForConditionalGeneration": (("true",), _V5_ALONE),
    "NemotronH_Omni_Reasoning_V3": (("true",), _REMOTE),
    "PPFormulaNetForConditionalGeneration": (("true",), _V4),
    "Pop2PianoForConditionalGeneration": (
        _ALWAYS,
        "transformers 4 shares the two weights by the same flag, which its configuration forces",
    ),
    "xLSTMForCausalLM": (("true",), _V4),
}
