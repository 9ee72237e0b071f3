import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_ds.data.mersenne_twister import (
    LAST_START_32,
    LAST_START_64,
    as_double,
    draw_below,
    new_stream_32,
    new_stream_64,
    refill_32,
    refill_64,
    start_32,
    start_64,
)


@numba.njit
def drawn_doubles(seed, count):
    stream = new_stream_32()
    at = start_32(stream, seed)
    out = np.empty(count)
    for i in range(count):
        if at > LAST_START_32:
            at = refill_32(stream, at)
        out[i] = as_double(stream[at], stream[at + 1])
        at += 2
    return out


@numba.njit
def drawn_below(seed, bounds):
    stream = new_stream_32()
    at = start_32(stream, seed)
    out = np.empty(len(bounds), np.int64)
    for i in range(len(bounds)):
        out[i], at = draw_below(stream, at, bounds[i])
    return out


@numba.njit
def word_64(seed, number):
    stream = new_stream_64()
    at = start_64(stream, seed)
    for _ in range(number - 1):
        if at > LAST_START_64:
            at = refill_64(stream, at)
        at += 1
    if at > LAST_START_64:
        at = refill_64(stream, at)
    return stream[at]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), bounds=st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=50))
def test_32_bit_stream_is_numpys_legacy_generator(seed: int, bounds: list[int]) -> None:
    assert (drawn_doubles(seed, 1500) == np.random.RandomState(seed).random_sample(1500)).all()
    repeated = np.array(bounds * 40)
    random_state = np.random.RandomState(seed)
    assert drawn_below(seed, repeated).tolist() == [random_state.randint(0, bound) for bound in repeated.tolist()]


def test_64_bit_stream_is_the_c_standards() -> None:
    # ISO C++ [rand.predef]: the 10000th word of a default-seeded std::mt19937_64.
    assert word_64(5489, 10000) == 9981545732273789042
