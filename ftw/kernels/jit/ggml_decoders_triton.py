"""Decoders of GGUF's packed types, one for each row of `ftw.ggml_types.PACKED_TYPES`: `decode_<name in lower case>`.

    decode(block, octet, c, codebook) -> values, float32

    block      addresses of blocks' first bytes, even but for MXFP4; one for each octet
    octet      which run of eight values of its block is wanted, 0 … block size / 8 - 1
    c          which value of the run, 0 … 7, known when the kernel is compiled
    codebook   int8, what `ftw.kernels.codebooks` has for the type; unused by most

A kernel asks for the eight values one after another; what does not depend on `c`, such as a scale, is the same
expression each time, and the compiler computes it once. That and loads of two bytes make a value cost a few
instructions instead of a hundred. A thread issues its loads in the order in which they stand here, and waits at the
first that needs another's result, so what comes out of a codebook is asked for last.

Operations come in the order of the gguf package's decoders, with nothing fused, so that values are equal to the last
bit. In the comments `[a, b]` is a run of b bytes from byte a of the block on.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


@triton.jit
def _byte(address):
    return tl.load(address).to(tl.int32)


@triton.jit
def _signed(byte):
    return (byte ^ 0x80) - 0x80


@triton.jit
def _word(address):
    """Two bytes, little-endian, from an even address."""
    return tl.load(address.to(tl.pointer_type(tl.uint16), bitcast=True)).to(tl.int32)


@triton.jit
def _byte_of_run(run, c: tl.constexpr):
    """Byte c of a run that begins at an even address."""
    return (_word(run + c // 2 * 2) >> (c % 2 * 8)) & 255


@triton.jit
def _as_half(bits):
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _half(address):
    return _as_half(_word(address))


@triton.jit
def _nibble(byte, number):
    """Half a byte: nibble 0 is the low one."""
    return (byte >> (number * 4)) & 15


@triton.jit
def _pair(byte, number):
    """Two bits of a byte: pair 0 is the lowest."""
    return (byte >> (number * 2)) & 3


@triton.jit
def _negated(values, sign):
    """Negate where the bit `sign` is 1."""
    return (values.to(tl.int32, bitcast=True) ^ (sign << 31)).to(tl.float32, bitcast=True)


@triton.jit
def decode_q4_0(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], nibbles [2, 16]: the low ones are values 0 … 15
    quant = _nibble(_byte_of_run(block + 2 + (octet & 1) * 8, c), octet >> 1) - 8
    return _half(block) * quant.to(tl.float32)


@triton.jit
def decode_q4_1(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], minimum [2, 2], nibbles [4, 16]
    quant = _nibble(_byte_of_run(block + 4 + (octet & 1) * 8, c), octet >> 1)
    return _half(block) * quant.to(tl.float32) + _half(block + 2)


@triton.jit
def decode_q5_0(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], fifth bits [2, 4], nibbles [6, 16]
    low = _nibble(_byte_of_run(block + 6 + (octet & 1) * 8, c), octet >> 1)
    fifth = (_byte(block + 2 + octet) >> c) & 1
    return _half(block) * ((low | (fifth << 4)) - 16).to(tl.float32)


@triton.jit
def decode_q5_1(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], minimum [2, 2], fifth bits [4, 4], nibbles [8, 16]
    low = _nibble(_byte_of_run(block + 8 + (octet & 1) * 8, c), octet >> 1)
    fifth = (_byte(block + 4 + octet) >> c) & 1
    return _half(block) * (low | (fifth << 4)).to(tl.float32) + _half(block + 2)


@triton.jit
def decode_q8_0(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], signed bytes [2, 32]
    return _signed(_byte_of_run(block + 2 + octet * 8, c)).to(tl.float32) * _half(block)


@triton.jit
def decode_q2_k(block, octet, c: tl.constexpr, codebook):
    # scale and minimum of each 16 values, in nibbles [0, 16]; pairs [16, 64], scale [80, 2], scale of minima [82, 2]
    scale_and_minimum = _byte(block + (octet >> 1))
    scale = _half(block + 80) * _nibble(scale_and_minimum, 0).to(tl.float32)
    minimum = _half(block + 82) * _nibble(scale_and_minimum, 1).to(tl.float32)
    quant = _pair(_byte_of_run(block + 16 + (octet >> 4) * 32 + (octet & 3) * 8, c), (octet >> 2) & 3)
    return scale * quant.to(tl.float32) - minimum


@triton.jit
def decode_q3_k(block, octet, c: tl.constexpr, codebook):
    # third bits [0, 32], pairs [32, 64], scales of 6 bits for each 16 values [96, 12], scale [108, 2]
    group = octet >> 1
    low = _nibble(_byte(block + 96 + (group & 7)), group >> 3)
    high = _pair(_byte(block + 104 + (group & 3)), group >> 2)
    scale = _half(block + 108) * ((low | (high << 4)) - 32).to(tl.float32)
    third = (_byte_of_run(block + (octet & 3) * 8, c) >> (octet >> 2)) & 1
    pair = _pair(_byte_of_run(block + 32 + (octet >> 4) * 32 + (octet & 3) * 8, c), (octet >> 2) & 3)
    return scale * (pair - ((third ^ 1) << 2)).to(tl.float32)


@triton.jit
def _k_scale_and_minimum(block, group):
    """Scale and minimum of each 32 values, 6 bits each in bytes [4, 12], times the two halves before them."""
    scales = block + 4 + (group & 3)
    first, second, rest = _byte(scales), _byte(scales + 4), _byte(scales + 8)
    is_low = group < 4
    scale = tl.where(is_low, first & 63, (rest & 15) | ((first >> 2) & 48))
    minimum = tl.where(is_low, second & 63, (rest >> 4) | ((second >> 2) & 48))
    return _half(block) * scale.to(tl.float32), _half(block + 2) * minimum.to(tl.float32)


@triton.jit
def decode_q4_k(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], scale of minima [2, 2], scales [4, 12], nibbles [16, 128]
    group = octet >> 2
    scale, minimum = _k_scale_and_minimum(block, group)
    quant = _nibble(_byte_of_run(block + 16 + (group >> 1) * 32 + (octet & 3) * 8, c), group & 1)
    return scale * quant.to(tl.float32) - minimum


@triton.jit
def decode_q5_k(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], scale of minima [2, 2], scales [4, 12], fifth bits [16, 32], nibbles [48, 128]
    group = octet >> 2
    scale, minimum = _k_scale_and_minimum(block, group)
    fifth = (_byte_of_run(block + 16 + (octet & 3) * 8, c) >> group) & 1
    low = _nibble(_byte_of_run(block + 48 + (group >> 1) * 32 + (octet & 3) * 8, c), group & 1)
    return scale * (low | (fifth << 4)).to(tl.float32) - minimum


@triton.jit
def decode_q6_k(block, octet, c: tl.constexpr, codebook):
    # nibbles [0, 128], pairs [128, 64], signed scales of each 16 values [192, 16], scale [208, 2]
    scale = _half(block + 208) * _signed(_byte(block + 192 + (octet >> 1))).to(tl.float32)
    low = _nibble(_byte_of_run(block + (octet >> 4) * 64 + (octet & 7) * 8, c), (octet >> 3) & 1)
    high = _pair(_byte_of_run(block + 128 + (octet >> 4) * 32 + (octet & 3) * 8, c), (octet >> 2) & 3)
    return scale * ((low | (high << 4)) - 32).to(tl.float32)


@triton.jit
def decode_tq1_0(block, octet, c: tl.constexpr, codebook):
    # five values to a byte, in base 3 [0, 48]: 32 bytes of five runs, then 16; four to a byte [48, 4]; scale [52, 2]
    is_first, is_last = octet < 20, octet >= 30
    digit = tl.where(is_first, octet >> 2, tl.where(is_last, (octet - 30) * 2 + c // 4, (octet - 20) >> 1))
    start = tl.where(is_first, (octet & 3) * 8, tl.where(is_last, 48 - c // 4 * 4, 32 + (octet & 1) * 8))
    power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
    # A byte is a fraction of 256; times a power of three, its first digit is the one that is wanted.
    quant = ((((_byte_of_run(block + start, c) * power) & 255) * 3) >> 8) - 1
    return _half(block + 52) * quant.to(tl.float32)


@triton.jit
def decode_tq2_0(block, octet, c: tl.constexpr, codebook):
    # pairs [0, 64], scale [64, 2]
    quant = _pair(_byte_of_run(block + (octet >> 4) * 32 + (octet & 3) * 8, c), (octet >> 2) & 3) - 1
    return _half(block + 64) * quant.to(tl.float32)


@triton.jit
def _doubled_e2m1(bits):
    """Twice the value of a float of one sign, two exponent and one mantissa bit: 0, 1, 2, 3, 4, 6, 8 or 12."""
    exponent, mantissa = (bits >> 1) & 3, bits & 1
    value = tl.where(exponent == 0, mantissa, (2 | mantissa) << ((exponent - 1) & 3))
    return tl.where((bits & 8) == 0, value, -value).to(tl.float32)


@triton.jit
def decode_mxfp4(block, octet, c: tl.constexpr, codebook):
    # exponent [0, 1], nibbles [1, 16]; values are doubled, so the scale is half of 2 ** (exponent - 127)
    exponent = _byte(block)
    bits = tl.where(exponent < 2, 0x200000 << (exponent & 1), (exponent - 1) << 23)
    quant = _nibble(_byte(block + 1 + (octet & 1) * 8 + c), octet >> 1)
    return bits.to(tl.float32, bitcast=True) * _doubled_e2m1(quant)


@triton.jit
def decode_nvfp4(block, octet, c: tl.constexpr, codebook):
    # scales of each 16 values [0, 4], unsigned with 4 bits of exponent and 3 of mantissa; nibbles [4, 32]
    bits = _byte(block + (octet >> 1))
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    # As above, half of the scale: exponents are biased by 7, float32's by 127.
    normal = (((exponent + 119) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    scale = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.0009765625, normal)
    scale = tl.where(bits == 0x7F, 0.0, scale)
    return scale * _doubled_e2m1(_nibble(_byte_of_run(block + 4 + (octet >> 1) * 8, c), octet & 1))


@triton.jit
def _entry(codebook, index):
    return tl.load(codebook + index).to(tl.float32)


@triton.jit
def decode_iq4_nl(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], nibbles [2, 16]
    quant = _nibble(_byte_of_run(block + 2 + (octet & 1) * 8, c), octet >> 1)
    return _half(block) * _entry(codebook, quant)


@triton.jit
def decode_iq4_xs(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], scales of 6 bits for each 32 values: pairs [2, 2], nibbles [4, 4]; nibbles [8, 128]
    group = octet >> 2
    low = _nibble(_byte(block + 4 + (group >> 1)), group & 1)
    high = _pair(_byte(block + 2 + (group >> 2)), group & 3)
    scale = _half(block) * ((low | (high << 4)) - 32).to(tl.float32)
    quant = _nibble(_byte_of_run(block + 8 + group * 16 + (octet & 1) * 8, c), (octet >> 1) & 1)
    return scale * _entry(codebook, quant)


@triton.jit
def _grid_byte(codebook, word, c: tl.constexpr):
    """Byte c of an entry that begins at the given word of four bytes."""
    words = codebook.to(tl.pointer_type(tl.int32), bitcast=True)
    return (tl.load(words + word + c // 4) >> (c % 4 * 8)) & 255


@triton.jit
def _sign_of_seven(signs, c: tl.constexpr):
    """Sign of value c out of seven bits: the eighth is chosen so that their number is even."""
    if c < 7:
        return (signs >> c) & 1
    parity = signs ^ (signs >> 4)
    parity = parity ^ (parity >> 2)
    return (parity ^ (parity >> 1)) & 1


@triton.jit
def _seven_signs(address, number):
    """Seven bits: number 0 … 3 of the 28 from an even address on."""
    word = _word(address) | ((_word(address + 2) & 0xFFF) << 16)
    return (word >> (number * 7)) & 127


@triton.jit
def _step(scale, nibble):
    return scale * (0.5 + nibble.to(tl.float32))


@triton.jit
def decode_iq2_xxs(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2]; of each 32 values four grid indices and four times seven signs below a scale of 4 bits [2, 64]
    group = block + 2 + (octet >> 2) * 8
    sign = _sign_of_seven(_seven_signs(group + 4, octet & 3), c)
    scale = _step(_half(block), _word(group + 6) >> 12) * 0.25
    value = _grid_byte(codebook, _byte(group + (octet & 3)) * 2, c).to(tl.float32)
    return _negated(scale * value, sign)


@triton.jit
def decode_iq2_xs(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], words of 9 bits of grid index and 7 signs [2, 64], nibbles of scale for each 16 values [66, 8]
    word = _word(block + 2 + octet * 2)
    scale = _step(_half(block), _nibble(_byte(block + 66 + (octet >> 2)), (octet >> 1) & 1)) * 0.25
    return _negated(scale * _grid_byte(codebook, (word & 511) * 2, c).to(tl.float32), _sign_of_seven(word >> 9, c))


@triton.jit
def decode_iq2_s(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], grid indices [2, 32], signs [34, 32], two more bits of the indices [66, 8], nibbles of scale [74, 8]
    index = _byte(block + 2 + octet) | (_pair(_byte(block + 66 + (octet >> 2)), octet & 3) << 8)
    sign = (_byte(block + 34 + octet) >> c) & 1
    scale = _step(_half(block), _nibble(_byte(block + 74 + (octet >> 2)), (octet >> 1) & 1)) * 0.25
    return _negated(scale * _grid_byte(codebook, index * 2, c).to(tl.float32), sign)


@triton.jit
def decode_iq3_xxs(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], grid indices of four values each [2, 64]; of each 32 values signs and scale as in IQ2_XXS [66, 32]
    group = block + 66 + (octet >> 2) * 4
    sign = _sign_of_seven(_seven_signs(group, octet & 3), c)
    scale = _step(_half(block), _word(group + 2) >> 12) * 0.5
    index = _byte_of_run(block + 2 + octet * 2, c // 4)
    return _negated(scale * _grid_byte(codebook, index, c % 4).to(tl.float32), sign)


@triton.jit
def decode_iq3_s(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], grid indices [2, 64], their ninth bits [66, 8], signs [74, 32], nibbles of scale [106, 4]
    ninth = (_byte(block + 66 + (octet >> 2)) >> ((octet & 3) * 2 + c // 4)) & 1
    index = _byte_of_run(block + 2 + octet * 2, c // 4) | (ninth << 8)
    sign = (_byte(block + 74 + octet) >> c) & 1
    scale = _half(block) * (1 + 2 * _nibble(_byte(block + 106 + (octet >> 3)), (octet >> 2) & 1)).to(tl.float32)
    return _negated(scale * _grid_byte(codebook, index, c % 4).to(tl.float32), sign)


@triton.jit
def decode_iq1_s(block, octet, c: tl.constexpr, codebook):
    # scale [0, 2], grid indices [2, 32]; words of three more bits of four indices, scale, sign of the shift [34, 16]
    word = _word(block + 34 + (octet >> 2) * 2)
    index = _byte(block + 2 + octet) | (((word >> ((octet & 3) * 3)) & 7) << 8)
    scale = _half(block) * (2 * ((word >> 12) & 7) + 1).to(tl.float32)
    shift = tl.where((word & 0x8000) == 0, 0.125, -0.125)
    return scale * (_signed(_grid_byte(codebook, index * 2, c)).to(tl.float32) + shift)


@triton.jit
def decode_iq1_m(block, octet, c: tl.constexpr, codebook):
    # grid indices [0, 32], nibbles of three more bits and the sign of the shift [32, 16], scales [48, 8]: four words of
    # four times 3 bits, whose upper nibbles are the scale
    nibble = _nibble(_byte(block + 32 + (octet >> 1)), octet & 1)
    index = _byte(block + octet) | ((nibble & 7) << 8)
    low = (_word(block + 48) >> 12) | ((_word(block + 50) >> 12) << 4)
    high = (_word(block + 52) >> 12) | ((_word(block + 54) >> 12) << 4)
    group = octet >> 1
    word = _word(block + 48 + (group >> 2) * 2)
    scale = _as_half(low | (high << 8)) * (2 * ((word >> ((group & 3) * 3)) & 7) + 1).to(tl.float32)
    shift = tl.where((nibble & 8) == 0, 0.125, -0.125)
    return scale * (_signed(_grid_byte(codebook, index * 2, c)).to(tl.float32) + shift)
