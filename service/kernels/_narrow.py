"""Conversions of blocks between the 16-bit floats and float32.

They give the bits that NumPy gives. NumPy converts float16 number by number, which takes two to four times as long. For
results below 6e-5, where float16 has fewer digits, it takes twenty times as long. bfloat16 has its own fast loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from service.dtypes import FLOAT16, FLOAT32, Array, DType, cast, compute_dtype
from service.kernels._blocks import claim, new_output, row_major, scratch, spare_memory

INT32 = np.dtype(np.int32)
UINT16 = np.dtype(np.uint16)

# Constants are arrays: with Python numbers NumPy holds the interpreter lock for twice as long before it begins.
FRACTION_BITS = np.array(13, INT32)
"""Bits that the fraction of a float32 has beyond those of a float16."""

FRACTION_SCALE = np.array(2.0**13, FLOAT32)

BIAS_SCALE = np.array(2.0**112, FLOAT32)
"""The exponent bits of a float32 are by 112 larger than those of the same number as float16."""

SIGN_BIT = np.array(-(1 << 31), INT32)
SIGN_SHIFT = np.array(16, INT32)
EXPONENT_BITS = np.array(0x7F800000, INT32)

FLOAT16_BITS = np.array(~0x70000000, INT32)
"""All bits but those between the sign of a float32 and the largest exponent of float16."""

LEAST_POWER = np.array(2.0**-14, FLOAT32)
"""Below this, all steps of float16 have one size."""

LEAST_POWER_BITS = np.array(126 << 10, INT32)
"""The bits of `LEAST_POWER` times `FRACTION_SCALE`, shifted to where float16 has its exponent."""

FINITE_BITS = 0xF7FF
"""The bits of the largest finite float16, shifted left by one, which drops the sign."""


def widen(block: Array, slot: int) -> Array:
    """Copy `block`, of a 16-bit float, to the scratch array `slot` as float32."""
    wide = scratch(slot, block.size, FLOAT32).reshape(block.shape)
    if block.dtype != FLOAT16 or not _all_finite(block, wide):
        wide[...] = block
        return wide
    bits = wide.view(INT32)
    bits[...] = block.view(np.int16)
    np.left_shift(bits, FRACTION_BITS, out=bits)
    np.bitwise_and(bits, FLOAT16_BITS, out=bits)
    np.multiply(wide, BIAS_SCALE, out=wide)  # exact for the smallest numbers, too, which have no exponent bits
    return wide


def _all_finite(block: Array, spare: Array) -> bool:
    bits = block.view(UINT16)
    shifted = np.add(bits, bits, out=spare.reshape(-1).view(UINT16)[: block.size].reshape(block.shape))
    return bool(shifted.max(initial=0) <= FINITE_BITS)


def narrow(wide: Array, out: Array, slots: tuple[int, int]) -> None:
    """Round the float32 block `wide` to the nearest numbers of `out`, which has a 16-bit float.

    Of two numbers as near, `out` gets the one with an even fraction. Overwrite `wide` and the scratch arrays `slots`.
    """
    if out.dtype != FLOAT16:
        out[...] = wide
        return
    power, sign = (scratch(slot, wide.size, FLOAT32).reshape(wide.shape) for slot in slots)
    bits, sign, out_bits = wide.view(INT32), sign.view(INT32), out.view(UINT16)
    np.bitwise_and(bits, SIGN_BIT, out=sign)
    np.bitwise_xor(bits, sign, out=bits)
    if wide.max(initial=0) < 2.0**16:
        _round(wide, power)
        np.right_shift(sign, SIGN_SHIFT, out=sign)
        np.bitwise_or(bits, sign, out=bits)
        np.copyto(out_bits, bits, casting="unsafe")
    else:  # numbers beyond float16's range, infinities or NaN
        np.bitwise_or(bits, sign, out=bits)
        np.copyto(out, wide, casting="unsafe")


def _round(wide: Array, power: Array) -> None:
    """Replace each number of `wide`, from 0 to below 2 ** 16, with an integer: the bits of the nearest float16.

    `power` is scratch for a power of two. Next to that power, neighbours in float32 are as far apart as neighbours in
    float16 next to the number. So adding the power rounds the number, and the sum's bits count its steps.
    """
    bits, power_bits = wide.view(INT32), power.view(INT32)
    np.bitwise_and(bits, EXPONENT_BITS, out=power_bits)  # the power of two at or below the number
    np.maximum(power, LEAST_POWER, out=power)
    np.multiply(power, FRACTION_SCALE, out=power)
    np.add(wide, power, out=wide)
    np.subtract(bits, power_bits, out=bits)
    np.right_shift(power_bits, FRACTION_BITS, out=power_bits)
    np.add(bits, power_bits, out=bits)
    np.subtract(bits, LEAST_POWER_BITS, out=bits)


def load(block: Array, dtype: DType, slot: int) -> Array:
    """Return `block` as `dtype`: itself, or a copy in the scratch array `slot`."""
    if block.dtype == dtype:
        return block
    if dtype == FLOAT32:
        return widen(block, slot)
    wide = scratch(slot, block.size, dtype).reshape(block.shape)
    wide[...] = block
    return wide


def room_for(out: Array, dtype: DType, slot: int) -> Array:
    """Return memory for a block of `dtype` that `store` then writes to `out`: that of `out`, or scratch."""
    return out if out.dtype == dtype else scratch(slot, out.size, dtype).reshape(out.shape)


def store(block: Array, out: Array, slots: tuple[int, int]) -> None:
    """Round what is in the memory of `room_for` to the dtype of `out`. Overwrite that memory and scratch, `slots`."""
    if block.dtype == FLOAT32 and out.itemsize == 2:
        narrow(block, out, slots)
    elif block.dtype != out.dtype:
        out[...] = cast(block, out.dtype)


def widen_tensor(tensor: Array) -> Array:
    """Return the tensor row-major, as float32 if it has 16-bit floats."""
    dtype = compute_dtype(tensor.dtype)
    if tensor.dtype == dtype:
        return row_major(tensor)
    claim(tensor.size * dtype.itemsize)
    return np.ascontiguousarray(tensor, dtype)


def compute_wide(
    shapes: Mapping[str, tuple[int, ...]], dtype: DType, compute: Callable[[dict[str, Array]], object]
) -> dict[str, Array]:
    """Return outputs of these names and shapes, which `compute` fills. It gets float32 memory for 16-bit floats.

    NumPy makes no floating-point warnings meanwhile.
    """
    outputs: dict[str, Array] = {name: new_output(None, shape, dtype) for name, shape in shapes.items()}
    wide = compute_dtype(dtype)
    memory = {name: one if dtype == wide else spare_memory(one.shape, wide) for name, one in outputs.items()}
    with np.errstate(all="ignore"):
        compute(memory)
        for name, output in outputs.items():
            if output is not memory[name]:
                output[...] = memory[name]
    return outputs
