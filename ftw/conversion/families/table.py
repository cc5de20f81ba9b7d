"""The families of models that FreeToken serves, a row for each: how their checkpoints become what its models load.

The rules are those of FreeToken 0.2.1. A new family is a row in a module beside this one, its name below, a test id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftw.conversion.families.llama import LLAMA, QWEN3_MOE

if TYPE_CHECKING:
    from ftw.checkpoint import Checkpoint
    from ftw.conversion.families.family import Family

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN3_MOE)


def find_family(checkpoint: Checkpoint) -> Family | None:
    """Return the row of a checkpoint's architecture, None if there is none."""
    architecture = checkpoint.config.architecture
    return next((family for family in FAMILIES if architecture in family.architectures), None)
