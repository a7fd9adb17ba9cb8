"""Conversions of blocks between the 16-bit floats and float32.

They give the bits that NumPy gives. NumPy converts float16 number by number, which takes two to four times as long. For
results below 6e-5, where float16 has fewer digits, it takes twenty times as long. bfloat16 has its own fast loops.
"""

from __future__ import annotations

import numpy as np

from service.dtypes import FLOAT16, FLOAT32, Array
from service.kernels._blocks import scratch

INT32 = np.dtype(np.int32)
UINT16 = np.dtype(np.uint16)

FRACTION_BITS = 13
"""Bits that the fraction of a float32 has beyond those of a float16."""

BIAS = 112
"""The exponent bits of a float32 less those of the same number as float16."""

SIGN_COPIES = 0x70000000
"""The bits between the sign of a float32 and the largest exponent of float16."""

FINITE_BITS = 0xF7FF
"""The bits of the largest finite float16, shifted left by one, which drops the sign."""


def widen(block: Array, slot: int) -> Array:
    """Copy `block`, of a 16-bit float, to the scratch array `slot` as float32."""
    wide = scratch(slot, block.size, FLOAT32).reshape(block.shape)
    if block.dtype != FLOAT16 or not _all_finite(block):
        wide[...] = block
        return wide
    bits = wide.view(INT32)
    bits[...] = block.view(np.int16)
    np.left_shift(bits, FRACTION_BITS, out=bits)
    np.bitwise_and(bits, ~SIGN_COPIES, out=bits)
    np.multiply(wide, 2.0**BIAS, out=wide)  # exact for the smallest numbers, too, which have no exponent bits
    return wide


def _all_finite(block: Array) -> bool:
    bits = block.view(UINT16)
    shifted = np.add(bits, bits, out=scratch(0, block.size, UINT16).reshape(block.shape))
    return bool(shifted.max(initial=0) <= FINITE_BITS)


def narrow(wide: Array, out: Array) -> None:
    """Round the float32 block `wide` to the nearest numbers of `out`, which has a 16-bit float. Overwrite `wide`.

    Of two numbers as near, `out` gets the one with an even fraction.
    """
    if out.dtype != FLOAT16:
        out[...] = wide
        return
    bits, out_bits = wide.view(INT32), out.view(UINT16)
    sign, unit = (scratch(slot, wide.size, INT32).reshape(wide.shape) for slot in (0, 1))
    np.bitwise_and(bits, -(1 << 31), out=sign)
    np.bitwise_xor(bits, sign, out=bits)
    if wide.max(initial=0) < 2.0**16:
        _round(wide, unit)
        np.right_shift(sign, 16, out=sign)
        np.bitwise_or(bits, sign, out=bits)
        np.copyto(out_bits, bits, casting="unsafe")
    else:  # numbers beyond float16's range, infinities or NaN
        np.bitwise_or(bits, sign, out=bits)
        np.copyto(out, wide, casting="unsafe")


def _round(wide: Array, unit: Array) -> None:
    """Replace each number of `wide`, from 0 to below 2 ** 16, with an integer: the bits of the nearest float16.

    `unit` is scratch for a power of two. Next to that power, neighbours in float32 are as far apart as neighbours in
    float16 next to the number. So adding the power rounds the number, and the sum's bits count its steps.
    """
    bits, power = wide.view(INT32), unit.view(FLOAT32)
    np.bitwise_and(bits, 0x7F800000, out=unit)  # the power of two at or below the number
    np.maximum(power, 2.0**-14, out=power)  # below this, all steps of float16 have one size
    np.multiply(power, 2.0**FRACTION_BITS, out=power)
    np.add(wide, power, out=wide)
    np.subtract(bits, unit, out=bits)
    np.right_shift(unit, FRACTION_BITS, out=unit)
    np.add(bits, unit, out=bits)
    np.subtract(bits, 126 << 10, out=bits)  # the exponent bits of the smallest power
