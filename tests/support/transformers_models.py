"""Tiny models of transformers, saved as `save_pretrained` saves them, and what tests ask of them."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tiny_configs import tiny_config
from torch import nn
from transformers import PreTrainedModel

FIRST_ID = 6  # smaller ones are the tokens that begin, end and pad
# What a tiny configuration needs so that its model takes images: of 16 by 16 pixels, four tokens each.
_WITH_IMAGES: dict[str, dict[str, Any]] = {
    "LlavaForConditionalGeneration": {"vision_config.patch_size": 8},
    "Gemma3ForConditionalGeneration": {"vision_config.patch_size": 4, "mm_tokens_per_image": 4},
    "Qwen2_5_VLForConditionalGeneration": {
        "vision_config.window_size": 56,
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
    },
}


class Saved(NamedTuple):
    """A model on disk, and its class."""

    folder: Path
    kind: type[PreTrainedModel]

    def load(self, **options: Any) -> Any:
        """Load it as transformers does."""
        return align(self.kind.from_pretrained(self.folder, **options).eval())


def build(name: str, *, tie: bool = False, seed: int = 0) -> PreTrainedModel:
    """Build a model of random weights."""
    torch.manual_seed(seed)
    config = tiny_config(name, tie=tie)
    for path, value in _WITH_IMAGES.get(name, {}).items():
        *parents, key = path.split(".")
        part = config
        for parent in parents:
            part = getattr(part, parent)
        setattr(part, key, value)
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        if not parameter.any():  # Gemma3 begins with images that count for nothing
            nn.init.normal_(parameter)
    return model


def save(folder: Path, name: str, *, tie: bool = False, dtype: torch.dtype | None = None, **options: Any) -> Saved:
    """Save such a model in a dtype, with options of `save_pretrained`."""
    model = build(name, tie=tie)
    model.to(dtype or torch.float32).save_pretrained(folder, **options)
    return Saved(folder, type(model))


def random_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    """Return ids of words, so none that begin, end, pad or stand for an image."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ID, 38, shape, generator=generator)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def align(model: nn.Module) -> nn.Module:
    """Give each weight on a CPU memory that torch allocates.

    Sums there depend in their last bit on how memory is aligned, and transformers leaves weights where a file has them,
    at multiples of 8 bytes.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()
    return model


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return the bits of a model's logits."""
    return bits_of(align(model)(input_ids=ids, **inputs).logits)


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    """Compare the state dicts of two models, and what they do not hold: buffers."""
    mine, theirs = found.state_dict(), expected.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype
        assert torch.equal(bits_of(mine[name]), bits_of(tensor)), name
    buffers = dict(found.named_buffers())
    for name, tensor in expected.named_buffers():
        if "embed_scale" not in name:  # the lookup's own affair
            assert torch.equal(buffers[name], tensor), name
