"""FP8 elements times the scales of their blocks, as torch multiplies and rounds them, in any range of bytes."""

import pytest
import torch

from ftw.layouts.recipes.dequantized import Dequantized
from ftw.layouts.recipes.recipe import Run


@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [(6, 10, (1, 10)), (6, 10, (2, 4)), (5, 7, (128, 128)), (300, 4, (128, 2))],
    ids=["rows", "blocks", "one-block", "tall"],
)
def test_any_range_is_what_torch_makes(rows, columns, block):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    shape = (-(-rows // block[0]), -(-columns // block[1]))
    scale = torch.rand(shape, generator=generator).to(torch.bfloat16)
    stored = {"weight": weight.view(torch.uint8), "scale": scale.view(torch.uint8)}
    content = {name: tensor.numpy().tobytes() for name, tensor in stored.items()}

    def read(name, view, offset):
        view[:] = content[name][offset : offset + len(view)]

    wide = scale.to(torch.float32).repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    wanted = (weight.to(torch.float32) * wide).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    runs = (Run(name, 0, len(content[name])) for name in ("weight", "scale"))
    recipe = Dequantized(*runs, "BF16", columns, block)
    assert recipe.nbytes == len(wanted)
    assert list(recipe.iter_sources()) == ["weight", "scale"]
    for start in range(0, recipe.nbytes, 3):
        for stop in {start + 1, min(start + 2 * columns + 1, recipe.nbytes), recipe.nbytes}:
            made = bytearray(stop - start)
            recipe.read_into(memoryview(made), start, read)
            assert made == wanted[start:stop]
