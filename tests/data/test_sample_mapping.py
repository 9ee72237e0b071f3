import hashlib
import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bert_ds.data.sample_mapping import MappingSettings, build_mapping
from bert_ds.errors import DataError
from tests.data.reference_samples import random_corpus, reference_rows

LENGTHS = [5, 7, 9, 12, 3, 20, 4, 4, 4, 4, 30, 2, 15, 8, 6, 600, 5]
BOUNDARIES = [0, 3, 5, 6, 10, 15, 17]


def rows_of(boundaries: list[int], lengths: list[int], *, num_samples: int, min_sentences: int = 2,
            max_tokens: int = 29, seed: int = 1234, short_seq_prob: float = 0.1) -> NDArray[np.unsignedinteger]:
    return build_mapping(
        np.array(boundaries), np.array(lengths, np.int32),
        MappingSettings(num_samples=num_samples, max_tokens=max_tokens, short_seq_prob=short_seq_prob, seed=seed,
                        min_sentences=min_sentences), source="corpus")


def digest(rows: NDArray[np.unsignedinteger]) -> str:
    return hashlib.md5(rows.astype("<u4").tobytes()).hexdigest()


@pytest.mark.proves("the sample mapping is Megatron-LM's", "EXACT")
@pytest.mark.parametrize(("min_sentences", "num_samples", "expected"), [
    (2, 1, [[3, 5, 29], [0, 3, 29], [6, 10, 29], [12, 15, 29], [10, 12, 29]]),
    (2, 8, [[12, 15, 29], [10, 12, 29], [0, 3, 29], [12, 15, 29], [3, 5, 29], [0, 3, 29], [3, 5, 29], [6, 10, 29],
            [6, 10, 29], [10, 12, 29]]),
    (1, 1, [[11, 15, 29], [3, 5, 29], [0, 3, 29], [5, 6, 29], [10, 11, 29], [6, 10, 29]]),
])
def test_rows_are_megatrons(min_sentences: int, num_samples: int, expected: list[list[int]]) -> None:
    assert rows_of(BOUNDARIES, LENGTHS, num_samples=num_samples, min_sentences=min_sentences).tolist() == expected


def test_rows_of_several_epochs_are_megatrons() -> None:
    rows = rows_of(BOUNDARIES, LENGTHS, num_samples=20)
    assert rows[:5].tolist() == [[6, 10, 18], [12, 15, 29], [6, 10, 29], [3, 5, 29], [10, 12, 29]]
    assert rows.dtype == np.uint32
    assert digest(rows) == "e0bf6a29145626ac5b9ee4f568fbe1e6"
    single = rows_of(BOUNDARIES, LENGTHS, num_samples=20, min_sentences=1)
    assert single[1].tolist() == [0, 3, 18]
    assert digest(single) == "96ae38f279b421ac46c6ce2db26b46c2"


def congruential_corpus() -> tuple[list[int], list[int]]:
    state = 12345
    boundaries, lengths = [0], []

    def step() -> int:
        nonlocal state
        state = (1103515245 * state + 12345) % 2**31
        return state

    for _ in range(200):
        lengths += [1 + (step() >> 8) % 60 for _ in range(1 + step() % 17)]
        boundaries.append(len(lengths))
    return boundaries, lengths


def test_rows_of_a_larger_corpus_are_megatrons() -> None:
    boundaries, lengths = congruential_corpus()
    assert (len(lengths), sum(lengths), boundaries[:6]) == (1864, 56422, [0, 10, 17, 33, 45, 53])
    rows = rows_of(boundaries, lengths, num_samples=1000, max_tokens=509)
    assert len(rows) == 1010
    assert rows[[0, 1, 2, 3, -1]].tolist() == [[836, 853, 509], [1751, 1756, 509], [1114, 1131, 509],
                                               [1142, 1145, 509], [75, 80, 509]]
    assert digest(rows) == "2c3883e4f4c6809db6a50cf75aa4929f"
    rows = rows_of(boundaries, lengths, num_samples=3000, max_tokens=125, seed=42)
    assert len(rows) == 3117
    assert rows[:6].tolist() == [[1142, 1145, 125], [171, 174, 82], [205, 209, 125], [840, 845, 125],
                                 [1579, 1581, 125], [45, 47, 24]]
    assert digest(rows) == "83720d7475597d5a35fb167147df33a2"


@settings(max_examples=60, deadline=None)
@given(corpus_seed=st.integers(0, 2**20), seed=st.integers(0, 2**31 - 2), num_samples=st.integers(1, 200),
       min_sentences=st.sampled_from([1, 2]), max_tokens=st.integers(5, 509), max_length=st.sampled_from([8, 40, 560]),
       short_seq_prob=st.sampled_from([0, 0.1, 0.3, 0.4, 0.8, 1]))
def test_rows_follow_the_rules_in_any_corpus(corpus_seed: int, seed: int, num_samples: int, min_sentences: int,
                                             max_tokens: int, max_length: int, short_seq_prob: float) -> None:
    boundaries, lengths, _ = random_corpus(corpus_seed, 100, num_documents=8, max_sentences=7, max_length=max_length)
    # One document that serves, so that there is an answer.
    lengths = np.concatenate((lengths, [4, 5])).tolist()
    boundaries = [*boundaries.tolist(), len(lengths)]
    rows = rows_of(boundaries, lengths, num_samples=num_samples, min_sentences=min_sentences, max_tokens=max_tokens,
                   seed=seed, short_seq_prob=short_seq_prob)
    expected = reference_rows(boundaries, lengths, num_samples, max_tokens, short_seq_prob, seed, min_sentences)
    assert sorted(rows.tolist()) == sorted(expected)


@pytest.mark.parametrize(("boundaries", "lengths", "min_sentences", "told"), [
    ([0, 1, 2, 3], [5, 5, 5], 2, ["3 documents, 3 have fewer than 2 sentences", "--split-sentences"]),
    ([0, 2, 4], [5, 513, 600, 1], 2, ["2 hold a sentence of more than 512 tokens", "split long sentences"]),
    ([0, 0, 0], [], 1, ["2 have fewer than 1 sentence", "not empty"]),
    ([0, 1, 3], [5, 513, 5], 2, ["1 have fewer", "1 hold a sentence", "--bert-no-binary-head"]),
])
def test_a_corpus_that_cannot_serve_is_refused_at_once(boundaries: list[int], lengths: list[int], min_sentences: int,
                                                       told: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        rows_of(boundaries, lengths, num_samples=10**9, min_sentences=min_sentences)
    assert all(part in str(caught.value) for part in told)


def test_documents_left_out_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        rows_of(BOUNDARIES, LENGTHS, num_samples=1)
    assert "of 6 documents, 1 are left out with fewer than 2 sentences, 1 with a sentence of more" in caplog.text


def test_more_rows_never_change_the_order_of_those_before() -> None:
    boundaries, lengths = congruential_corpus()
    arrays = np.array(boundaries), np.array(lengths, np.int32)
    plan = MappingSettings(num_samples=1000, max_tokens=125, short_seq_prob=0.1, seed=2**31 - 2, min_sentences=2)
    planned = build_mapping(*arrays, plan, source="corpus")
    before = planned
    for needed in (len(planned), len(planned) + 1, 2500, 4000):
        rows = build_mapping(*arrays, replace(plan, needed_samples=needed), source="corpus")
        assert len(rows) >= needed
        assert (rows[:len(before)] == before).all()
        before = rows
    # Each further epoch is all of the text, in an order of its own.
    sentences = np.zeros(len(lengths), int)
    for start, end, _ in rows[len(planned):].tolist():
        sentences[start:end] += 1
    assert (sentences[sentences > 0] == sentences.max()).all()
    assert sentences.max() >= 2
