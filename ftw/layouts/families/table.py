"""The families of models that FreeToken serves, a row for each: how their checkpoints become what its models load.

The rules are those of FreeToken 0.2.1. A new family is a row in a module beside this one, its name below, a test id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.layouts.families.deepseek import DEEPSEEK_V4, DEEPSEEK_V41
from ftw.layouts.families.flint import FLINT
from ftw.layouts.families.gemma import GEMMA4, GEMMA4_TEXT, GEMMA4_UNIFIED, MUSE_GLIMMER
from ftw.layouts.families.glm import GLM4_MOE, GLM5_NEXT, GLM_MOE_DSA
from ftw.layouts.families.llama import GPT_OSS, LLAMA, QWEN2, QWEN3, QWEN3_MOE
from ftw.layouts.families.minimax import MINIMAX_M2, MINIMAX_M3
from ftw.layouts.families.qwen import QWEN3_5, QWEN3_5_TEXT, QWEN3_VL, QWEN3_VL_MOE, QWEN4_EXP

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.layouts.families.family import Family

FAMILIES: tuple[Family, ...] = (
    *(LLAMA, QWEN2, QWEN3, QWEN3_MOE, GPT_OSS),
    *(QWEN3_VL, QWEN3_VL_MOE, QWEN3_5, QWEN3_5_TEXT, QWEN4_EXP),
    *(GEMMA4, GEMMA4_TEXT, GEMMA4_UNIFIED, MUSE_GLIMMER),
    *(MINIMAX_M2, MINIMAX_M3, FLINT),
    *(GLM4_MOE, GLM_MOE_DSA, GLM5_NEXT),
    *(DEEPSEEK_V4, DEEPSEEK_V41),
)
# Architectures that FreeToken registers, and does not serve.
NOT_SERVED = {
    "Mistral3ForConditionalGeneration": "FreeToken looks for the text model's sizes at the top of config.json",
}


def find_family(checkpoint: Checkpoint) -> Family | None:
    """Return the row of a checkpoint's architecture, None if there is none."""
    architecture = checkpoint.config.architecture
    return next((family for family in FAMILIES if architecture in family.architectures), None)
