"""Mersenne twister streams inside numba kernels, equal to C++'s std::mt19937(_64) and numpy's legacy RandomState.

The sample order and the masks of Megatron-LM are defined by these streams, so they are reproduced bit for bit.
Source: Matsumoto and Nishimura, "Mersenne Twister", 1998, and its 64-bit variant of 2004.

A stream is one array: the generator's state, then words ready to be used, up to the array's end. The kernel keeps the
index of the next word and draws like this, because a call that takes an array costs numba more than the draw itself:

    stream = new_stream_32()
    at = start_32(stream, seed)
    ...
    if at > LAST_START_32:              # fewer than MARGIN words are left
        at = refill_32(stream, at)
    uniform = as_double(stream[at], stream[at + 1])
    at += 2

Arithmetic is in uint64: numba would turn a sum of signed and unsigned into a float.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

MARGIN = 8
"""Words that may be drawn after one look at the index."""

_LENGTH_32, _MIDDLE_32 = 624, 397
_LENGTH_64, _MIDDLE_64 = 312, 156
LAST_START_32 = 2 * _LENGTH_32
"""Largest index from which MARGIN words can be drawn."""
LAST_START_64 = 2 * _LENGTH_64

_LOW_32_BITS = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)

Stream = NDArray[np.unsignedinteger]


@numba.njit(cache=True, nogil=True)
def new_stream_32() -> Stream:
    """An unseeded std::mt19937."""
    return np.empty(2 * _LENGTH_32 + MARGIN, np.uint32)


@numba.njit(cache=True, nogil=True)
def new_stream_64() -> Stream:
    """An unseeded std::mt19937_64."""
    return np.empty(2 * _LENGTH_64 + MARGIN, np.uint64)


@numba.njit(cache=True, nogil=True)
def start_32(stream: Stream, seed: int) -> int:
    """Seeds with the low 32 bits of `seed`, as std::mt19937(seed) and RandomState(seed) do. Returns the next index."""
    word = np.uint64(seed) & _LOW_32_BITS
    stream[0] = word
    for i in range(1, _LENGTH_32):
        word = (np.uint64(1812433253) * (word ^ (word >> np.uint64(30))) + np.uint64(i)) & _LOW_32_BITS
        stream[i] = word
    return refill_32(stream, len(stream))


@numba.njit(cache=True, nogil=True)
def start_64(stream: Stream, seed: int) -> int:
    """Seeds as std::mt19937_64(seed) does. Returns the next index."""
    word = np.uint64(seed)
    stream[0] = word
    for i in range(1, _LENGTH_64):
        word = np.uint64(6364136223846793005) * (word ^ (word >> np.uint64(62))) + np.uint64(i)
        stream[i] = word
    return refill_64(stream, len(stream))


@numba.njit(cache=True, nogil=True)
def as_double(first: int, second: int) -> float:
    """RandomState.random(): uniform in [0, 1) with 53 bits of two 32-bit words."""
    high = np.float64(np.uint64(first) >> np.uint64(5))
    low = np.float64(np.uint64(second) >> np.uint64(6))
    return (high * 67108864.0 + low) / 9007199254740992.0


@numba.njit(cache=True, nogil=True)
def bits_of(largest: int) -> int:
    """The smallest 2^k - 1 that is at least `largest` < 2^32. RandomState masks words with it and rejects the rest."""
    bits = np.uint64(largest)
    bits |= bits >> np.uint64(1)
    bits |= bits >> np.uint64(2)
    bits |= bits >> np.uint64(4)
    bits |= bits >> np.uint64(8)
    bits |= bits >> np.uint64(16)
    return np.uint32(bits)


@numba.njit(cache=True, nogil=True)
def draw_below(stream: Stream, at: int, bound: int) -> tuple[int, int]:
    """RandomState.randint(0, bound) for 1 <= bound < 2^32, and the next index. Draws nothing for 1."""
    largest = np.uint32(bound - 1)
    if largest == 0:
        return 0, at
    bits = bits_of(largest)
    while True:
        if at > LAST_START_32:
            at = refill_32(stream, at)
        value = stream[at] & bits
        at += 1
        if value <= largest:
            return np.int64(value), at


@numba.njit(cache=True, nogil=True)
def refill_32(stream: Stream, at: int) -> int:
    """Adds a round of words behind the unused ones from `at`, fewer than MARGIN; returns their new index."""
    # Three loops without a modulo, so that the compiler can vectorise them.
    for i in range(_LENGTH_32 - _MIDDLE_32):
        stream[i] = stream[i + _MIDDLE_32] ^ _twist_32(stream[i], stream[i + 1])
    for i in range(_LENGTH_32 - _MIDDLE_32, _LENGTH_32 - 1):
        stream[i] = stream[i + _MIDDLE_32 - _LENGTH_32] ^ _twist_32(stream[i], stream[i + 1])
    stream[_LENGTH_32 - 1] = stream[_MIDDLE_32 - 1] ^ _twist_32(stream[_LENGTH_32 - 1], stream[0])
    unused = len(stream) - at
    first = _LENGTH_32 + MARGIN - unused
    for i in range(unused):
        stream[first + i] = stream[at + i]
    for i in range(_LENGTH_32):
        word = np.uint64(stream[i])
        word ^= word >> np.uint64(11)
        word ^= (word << np.uint64(7)) & np.uint64(0x9D2C5680)
        word ^= (word << np.uint64(15)) & np.uint64(0xEFC60000)
        stream[_LENGTH_32 + MARGIN + i] = word ^ (word >> np.uint64(18))
    return first


@numba.njit(cache=True, nogil=True)
def refill_64(stream: Stream, at: int) -> int:
    """Like `refill_32`."""
    for i in range(_LENGTH_64 - _MIDDLE_64):
        stream[i] = stream[i + _MIDDLE_64] ^ _twist_64(stream[i], stream[i + 1])
    for i in range(_LENGTH_64 - _MIDDLE_64, _LENGTH_64 - 1):
        stream[i] = stream[i + _MIDDLE_64 - _LENGTH_64] ^ _twist_64(stream[i], stream[i + 1])
    stream[_LENGTH_64 - 1] = stream[_MIDDLE_64 - 1] ^ _twist_64(stream[_LENGTH_64 - 1], stream[0])
    unused = len(stream) - at
    first = _LENGTH_64 + MARGIN - unused
    for i in range(unused):
        stream[first + i] = stream[at + i]
    for i in range(_LENGTH_64):
        word = stream[i]
        word ^= (word >> np.uint64(29)) & np.uint64(0x5555555555555555)
        word ^= (word << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        word ^= (word << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        stream[_LENGTH_64 + MARGIN + i] = word ^ (word >> np.uint64(43))
    return first


@numba.njit(cache=True, nogil=True)
def _twist_32(upper: int, lower: int) -> int:
    mixed = (np.uint64(upper) & np.uint64(0x80000000)) | (np.uint64(lower) & np.uint64(0x7FFFFFFF))
    return (mixed >> _ONE) ^ ((mixed & _ONE) * np.uint64(0x9908B0DF))


@numba.njit(cache=True, nogil=True)
def _twist_64(upper: int, lower: int) -> int:
    mixed = (upper & np.uint64(0xFFFFFFFF80000000)) | (lower & np.uint64(0x7FFFFFFF))
    return (mixed >> _ONE) ^ ((mixed & _ONE) * np.uint64(0xB5026F5AA96619E9))
