"""FP8 weights times the powers of two of their blocks are what torch makes of them, in any range.

Codes of NaN are left out: torch's processor code gives one or another NaN for them.
"""

import numpy as np
import pytest
import torch

from ftw.layouts.recipes import dequantized
from ftw.layouts.recipes.dequantized import Dequantized
from ftw.layouts.recipes.recipe import Run


def expected(weights, scales):
    factors = torch.exp2(torch.from_numpy(scales).float() - 127)
    factors = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weights.shape[0], : weights.shape[1]]
    floats = torch.from_numpy(weights).view(torch.float8_e4m3fn).float()
    return (floats * factors).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("step", [1 << 20, 4096], ids=["at once", "by rows"])
@pytest.mark.parametrize("shape", [(3, 5), (128, 128), (256, 300), (130, 129)], ids=str)
def test_blocks_are_multiplied_as_torch_does(shape, step, monkeypatch):
    monkeypatch.setattr(dequantized, "STEP_NBYTES", step)
    generator = np.random.default_rng(3)
    weights = generator.integers(0, 127, shape, dtype=np.uint8) | generator.integers(0, 2, shape, dtype=np.uint8) << 7
    scales = generator.integers(0, 255, (-(-shape[0] // 128), -(-shape[1] // 128)), dtype=np.uint8)
    stored = {"weight": weights.tobytes(), "scale": scales.tobytes()}

    def read(name, view, offset):
        view[:] = stored[name][offset : offset + len(view)]

    recipe = Dequantized(
        Run("weight", 0, weights.nbytes), Run("scale", 0, scales.nbytes), "F8_E8M0", shape[1], (128, 128)
    )
    whole = bytearray(recipe.nbytes)
    recipe.read_into(memoryview(whole), 0, read)
    assert whole == expected(weights, scales)
    for _ in range(10):
        start, stop = sorted(generator.integers(0, recipe.nbytes, 2).tolist())
        part = bytearray(stop + 1 - start)
        recipe.read_into(memoryview(part), start, read)
        assert part == whole[start : stop + 1]
