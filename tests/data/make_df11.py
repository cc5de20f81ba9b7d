"""Makes df11-0.5.0-*.safetensors beside it, with the encoder of the dfloat11 wheel; run once, by hand.

    pip install --no-deps --target /tmp/dfloat11 dfloat11==0.5.0 dahuffman==0.4.2
    python tests/data/make_df11.py /tmp/dfloat11

The metadata of each file hold the table's rows and columns, and the sha256 of its plain bf16 bytes.

    normal         random-normal values, as weights are; the last block is not full
    long-codes     exponents as rare as Fibonacci's numbers, whose codes have up to 22 bits
    no-position    the last code ends with a byte of a block in which none begins; dfloat11 then writes no position for
                   that block
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

MODULE = "model.embed_tokens"
BLOCK_BITS = 8 * 4096


def fibonacci(count: int) -> list[int]:
    numbers = [1, 1]
    while len(numbers) < count:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers


def weight_of(exponents: np.ndarray, generator: np.random.Generator) -> torch.Tensor:
    """Return bf16 values [elements] with these exponents, and random signs and mantissas."""
    others = generator.integers(0, 256, len(exponents), np.uint16)
    bits = (others & 0x80) << 8 | exponents.astype(np.uint16) << 7 | (others & 0x7F)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def long_codes(generator: np.random.Generator) -> torch.Tensor:
    counts = fibonacci(22)
    counts[-1] += -sum(counts) % 8
    exponents = np.repeat(np.arange(100, 100 + len(counts)), counts)
    return weight_of(generator.permutation(exponents), generator).reshape(-1, 8)


def no_position(encoder: Any, generator: np.random.Generator) -> torch.Tensor:
    """Return a table whose last code, the only one of 16 bits or more that is needed, crosses into a new block."""
    counts = fibonacci(16)
    for extra in range(1, BLOCK_BITS):
        exponents = np.repeat(np.arange(100, 100 + len(counts)), [*counts[:-1], counts[-1] + extra])
        codec, _ = encoder.get_codec(weight_of(exponents, generator))
        lengths = np.array([codec.get_code_table()[int(exponent)][0] for exponent in exponents])
        if lengths.sum() >= BLOCK_BITS + 8:
            break
    assert lengths.sum() == BLOCK_BITS + 8, lengths.sum()
    assert lengths[0] > 8, lengths[0]
    order = np.append(1 + generator.permutation(len(exponents) - 1), 0)
    return weight_of(exponents[order], generator).reshape(-1, 1)


def main(wheel: str) -> None:
    sys.path[:0] = [wheel, f"{wheel}/dfloat11"]  # the package itself needs cupy and a GPU
    import dfloat11_utils as encoder

    generator = np.random.default_rng(0)
    normal = torch.from_numpy(generator.normal(0, 0.02, (600, 72)).astype(np.float32)).bfloat16()
    tables = {"normal": normal, "long-codes": long_codes(generator), "no-position": no_position(encoder, generator)}
    for name, table in tables.items():
        _, counter = encoder.get_codec(table.flatten())
        codec, _, codes = encoder.get_32bit_codec(counter)
        stream, others, positions, gaps, splits = encoder.encode_weights([table.flatten()], codec, 8, 512)
        parts = {
            "luts": encoder.get_luts(codes), "encoded_exponent": stream, "sign_mantissa": others,
            "output_positions": positions.view(torch.uint8), "gaps": gaps, "split_positions": splits,
        }  # fmt: skip
        rows, columns = table.shape
        plain = table.view(torch.int16).numpy().tobytes()
        metadata = {"rows": str(rows), "columns": str(columns), "sha256": hashlib.sha256(plain).hexdigest()}
        tensors = {f"{MODULE}.{suffix}": part for suffix, part in parts.items()}
        save_file(tensors, Path(__file__).with_name(f"df11-0.5.0-{name}.safetensors"), metadata)


if __name__ == "__main__":
    main(sys.argv[1])
