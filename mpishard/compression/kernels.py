"""The compressors' loops over NumPy arrays: one pass over memory each.

Every function that compresses also fills `rest`, unless it is empty, with the values minus the decompressed values.
Every function that decompresses adds to `values` if `add` is set, and else overwrites them.  All of these use the exact
bits of `decompress`.  Therefore nothing here is compiled with ``fastmath`` except a sum whose order is free.

A cast after each integer operation keeps the width (Numba widens to 64 bits), which 32-bit vector instructions need.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend.jit_function import HostFunction, inner

Array = Any
_HALF, _SIGN, _INFINITE = np.float32(0.5), np.int32(0x8000), np.int32(0x7F800000)
LARGEST_HALF = 65504.0
# The scale of a block with NaN, of which arithmetic makes other bits on other processors.
NAN = np.float32(np.nan)
_RUN = 1024  # elements that fit the first-level cache several times


@inner
def _int32(x):  # type: ignore[no-untyped-def]
    return np.float32(x).view(np.int32)


@inner
def _float32(bits):  # type: ignore[no-untyped-def]
    return np.int32(bits).view(np.float32)


@inner
def _sent(scale):  # type: ignore[no-untyped-def]
    return scale if scale == scale else NAN


@inner
def _half(x):  # type: ignore[no-untyped-def]
    """The bits of a float32 of at most 65504, an infinity or NaN, as float16, rounded to nearest even."""
    bits = _int32(x)
    magnitude = np.int32(bits & np.int32(0x7FFFFFFF))
    odd = np.int32(np.int32(magnitude >> np.int32(13)) & np.int32(1))
    normal = np.int32(np.int32(magnitude - np.int32(0x38000000 - 0xFFF)) + odd)
    # The last bit of a float32 near 0.5 is that of a subnormal float16, so that the addition rounds to it.
    small = np.int32(_int32(np.float32(_float32(magnitude) + _HALF)) - _int32(_HALF))
    found = small if magnitude < np.int32(0x38800000) else np.int32(normal >> np.int32(13))
    found = np.int32(0x7C00) if magnitude == _INFINITE else found
    found = np.int32(0x7E00) if magnitude > _INFINITE else found
    return np.int32(found | np.int32(np.int32(bits >> np.int32(16)) & _SIGN))


@inner
def _of_half(half):  # type: ignore[no-untyped-def]
    half = np.int32(half)
    magnitude = np.int32(half & np.int32(0x7FFF))
    # This avoids arithmetic with subnormal numbers, which is slow.
    small = np.float32(np.float32(magnitude) * np.float32(2.0**-24))
    shifted = np.int32(magnitude << np.int32(13))
    bias = np.int32(0x70000000) if magnitude >= np.int32(0x7C00) else np.int32(0x38000000)
    normal = np.int32(shifted + bias)
    bits = _int32(small) if magnitude < np.int32(0x400) else normal
    return _float32(np.int32(bits | np.int32(np.int32(half & _SIGN) << np.int32(16))))


def _to_float16(values: np.ndarray, halves: np.ndarray, rest: np.ndarray) -> None:
    largest, infinity = values.dtype.type(LARGEST_HALF), values.dtype.type(np.inf)
    for begin in range(0, values.size, _RUN):
        count = min(_RUN, values.size - begin)
        run, out, left = values[begin : begin + count], halves[begin : begin + count], rest[begin : begin + count]
        for i in range(count):
            x = run[i]
            y = largest if x > largest else x
            y = -largest if y < -largest else y
            out[i] = _half(x if abs(x) == infinity else y)
        for i in range(left.size):
            left[i] = run[i] - values.dtype.type(_of_half(out[i]))


def _from_float16(values: np.ndarray, halves: np.ndarray, add: bool) -> None:
    if add:
        for i in range(values.size):
            values[i] += values.dtype.type(_of_half(halves[i]))
    else:
        for i in range(values.size):
            values[i] = _of_half(halves[i])


@inner
def upper_half(x):  # type: ignore[no-untyped-def]
    """In a compiled function: the bits of a float32 as bfloat16, rounded to nearest even; NaN stays NaN.

    An int32 has them in its lower half; the sign fills the upper one.
    """
    bits = _int32(x)
    odd = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
    rounded = np.int32(np.int32(bits + np.int32(0x7FFF)) + odd)
    special = np.int32(bits | np.int32(0x400000))
    is_nan = np.int32(bits & np.int32(0x7FFFFFFF)) > _INFINITE
    return np.int32((special if is_nan else rounded) >> np.int32(16))


@inner
def _of_upper(upper):  # type: ignore[no-untyped-def]
    return _float32(np.int32(np.int32(upper) << np.int32(16)))


def _to_bfloat16(values: np.ndarray, halves: np.ndarray, rest: np.ndarray) -> None:
    for begin in range(0, values.size, _RUN):
        count = min(_RUN, values.size - begin)
        run, out, left = values[begin : begin + count], halves[begin : begin + count], rest[begin : begin + count]
        for i in range(count):
            out[i] = upper_half(run[i])
        for i in range(left.size):
            left[i] = run[i] - values.dtype.type(_of_upper(out[i]))


def _from_bfloat16(values: np.ndarray, halves: np.ndarray, add: bool) -> None:
    if add:
        for i in range(values.size):
            values[i] += values.dtype.type(_of_upper(halves[i]))
    else:
        for i in range(values.size):
            values[i] = _of_upper(halves[i])


def _to_int8(
    values: np.ndarray, bits: np.ndarray, scales: np.ndarray, codes: np.ndarray, rest: np.ndarray, block: int, mask: int
) -> None:
    real, whole = values.dtype.type, bits.dtype.type
    levels, mask = real(127), whole(mask)
    place = np.empty(1, bits.dtype)
    top = place.view(values.dtype)
    for b in range(scales.size):
        begin = b * block
        count = min(block, values.size - begin)
        row, places, out = values[begin : begin + count], bits[begin : begin + count], codes[begin : begin + count]
        largest = whole(0)
        for i in range(count):
            magnitude = whole(places[i] & mask)
            largest = magnitude if magnitude > largest else largest
        place[0] = largest
        scales[b] = _sent(np.float32(top[0] / levels))
        scale = real(scales[b])
        if not np.isfinite(scale):
            for i in range(count):
                out[i] = 1
        elif scale == 0:
            for i in range(count):
                out[i] = 0
        else:
            for i in range(count):
                level = np.rint(row[i] / scale)
                level = levels if level > levels else level
                level = -levels if level < -levels else level
                out[i] = np.int8(level)
        if rest.size:
            left = rest[begin : begin + count]
            for i in range(count):
                left[i] = row[i] - real(out[i]) * scale


def _from_int8(values: np.ndarray, scales: np.ndarray, codes: np.ndarray, block: int, add: bool) -> None:
    real = values.dtype.type
    for b in range(scales.size):
        begin = b * block
        count = min(block, values.size - begin)
        row, given = values[begin : begin + count], codes[begin : begin + count]
        scale = real(scales[b])
        if add:
            for i in range(count):
                row[i] += real(given[i]) * scale
        else:
            for i in range(count):
                row[i] = real(given[i]) * scale


def _to_signs(values: np.ndarray, scales: np.ndarray, signs: np.ndarray, rest: np.ndarray, block: int) -> None:
    zero = values.dtype.type(0)
    for b in range(scales.size):
        begin = b * block
        count = min(block, values.size - begin)
        row, left = values[begin : begin + count], rest[begin : begin + count]
        total = 0.0
        for i in range(count):
            total += np.float64(abs(row[i]))
        scales[b] = _sent(np.float32(total / count))
        scale = values.dtype.type(scales[b])
        for i in range(left.size):
            left[i] = row[i] - (scale if row[i] >= zero else -scale)
    whole = values.size // 8
    for k in range(whole):
        byte = 0
        for j in range(8):
            byte = 2 * byte + (values[8 * k + j] >= zero)
        signs[k] = byte
    if values.size % 8:
        byte = 0
        for i in range(8 * whole, values.size):
            byte = 2 * byte + (values[i] >= zero)
        signs[whole] = byte << (8 - values.size % 8)


def _from_signs(values: np.ndarray, scales: np.ndarray, signs: np.ndarray, block: int, add: bool) -> None:
    for b in range(scales.size):
        begin = b * block
        end = min(begin + block, values.size)
        scale = values.dtype.type(scales[b])
        # Elements in whole bytes take a fast loop.
        first = min(begin + (-begin & 7), end)
        last = max(first, end & -8)
        row, given = values[first:last], signs[first >> 3 : last >> 3]
        if add:
            for k in range(given.size):
                for j in range(8):
                    row[8 * k + j] += scale if given[k] & np.uint8(128 >> j) else -scale
        else:
            for k in range(given.size):
                for j in range(8):
                    row[8 * k + j] = scale if given[k] & np.uint8(128 >> j) else -scale
        for part in ((begin, first), (last, end)):
            for i in range(part[0], part[1]):
                term = scale if signs[i >> 3] & (128 >> (i & 7)) else -scale
                values[i] = values[i] + term if add else term


def _above(bits: np.ndarray, places: np.ndarray, mask: int, low: int) -> int:
    """Write the indices of all magnitudes above `low` to `places`, and count them."""
    mask, least = bits.dtype.type(mask), bits.dtype.type(low)
    count = 0
    for i in range(bits.size):
        places[count] = i  # without a branch: the next index overwrites this one unless it counts
        count += bits.dtype.type(bits[i] & mask) > least
    return count


def _pick(bits: np.ndarray, places: np.ndarray, mask: int, least: int, spare: int) -> None:
    """Move to the front of `places` the indices of magnitudes above `least`, and of the first `spare` equal to it."""
    mask, least = bits.dtype.type(mask), bits.dtype.type(least)
    count = 0
    for k in range(places.size):
        place = places[k]
        magnitude = bits.dtype.type(bits[place] & mask)
        equal = magnitude == least and spare > 0
        if equal or magnitude > least:
            places[count] = place
            count += 1
            spare -= equal


def bits(values: Array) -> tuple[Array, int]:
    """A view of `values` as integers, and a mask; the masked integers have the order of magnitudes, with NaN last."""
    whole = np.dtype(f"i{values.dtype.itemsize}")
    return values.view(whole), int(np.iinfo(whole).max)


to_float16: HostFunction = HostFunction(_to_float16)
from_float16: HostFunction = HostFunction(_from_float16)
to_bfloat16: HostFunction = HostFunction(_to_bfloat16)
from_bfloat16: HostFunction = HostFunction(_from_bfloat16)
to_int8: HostFunction = HostFunction(_to_int8, _nrt=True)  # it makes an array
from_int8: HostFunction = HostFunction(_from_int8)
to_signs: HostFunction = HostFunction(_to_signs, fastmath={"reassoc"})
from_signs: HostFunction = HostFunction(_from_signs)
above: HostFunction = HostFunction(_above)
pick: HostFunction = HostFunction(_pick)
