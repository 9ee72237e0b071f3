import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bert_ds.config.data import DataConfig
from bert_ds.data.masking import (
    BUILT,
    DAMAGED,
    OUTSIDE_MAPPING,
    TOO_MANY_PREDICTIONS,
    UNKNOWN_TOKEN,
    Corpus,
    build_rows,
    rules_for,
)
from bert_ds.data.sample_mapping import MappingSettings, build_mapping
from bert_ds.data.samples import UNUSED_LABEL, SampleBatch
from tests.data.reference_samples import random_corpus, reference_sample, word_piece_vocabulary

VOCABULARY = word_piece_vocabulary(100, 40)


def corpus_of(lengths: NDArray[np.int32], tokens: NDArray[np.integer],
              boundaries: NDArray[np.int64] | None = None) -> Corpus:
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * tokens.itemsize
    return Corpus(tokens, lengths, pointers, np.array([0, len(lengths)]) if boundaries is None else boundaries)


def built(corpus: Corpus, mapping: NDArray[np.unsignedinteger], *, seq_length: int, sentence_order: bool,
          seed: int = 1234, vocabulary=VOCABULARY, **settings: Any) -> SampleBatch:
    count, data = len(mapping), DataConfig(**settings)
    batch = SampleBatch.empty(count, seq_length, data.predictions_per_row(seq_length))
    rules = rules_for(vocabulary, data, binary_head=sentence_order, seed=seed)
    assert build_rows(corpus, mapping, rules, np.arange(count), np.arange(count), batch) == (BUILT, 0, 0)
    return batch


def labels_of(batch: SampleBatch, row: int) -> dict[int, int]:
    used = batch.masked_labels[row] != UNUSED_LABEL
    return dict(zip(batch.masked_positions[row][used].tolist(), batch.masked_labels[row][used].tolist(), strict=True))


def mapped(boundaries: NDArray[np.int64], lengths: NDArray[np.int32], *, seq_length: int, sentence_order: bool,
           num_samples: int, seed: int = 1234) -> NDArray[np.unsignedinteger]:
    return build_mapping(boundaries, lengths,
                         MappingSettings(num_samples=num_samples, max_tokens=seq_length - 3, short_seq_prob=0.1,
                                         seed=seed, min_sentences=2 if sentence_order else 1), source="corpus")


def toy_corpus() -> tuple[NDArray[np.int64], Corpus]:
    """Twelve documents drawn by a congruential generator."""
    state = 777

    def draw() -> int:
        nonlocal state
        state = (1103515245 * state + 12345) % 2**31
        return state >> 8

    boundaries, lengths, tokens = [0], [], []
    for _ in range(12):
        for _ in range(1 + draw() % 6):
            lengths.append(1 + draw() % 14)
            for place in range(lengths[-1]):
                token = draw() % 140
                token = token + 5 if token < 5 else token
                tokens.append(token - 95 if place == 0 and token >= 100 else token)
        boundaries.append(len(lengths))
    assert boundaries == [0, 2, 3, 9, 14, 16, 21, 24, 28, 30, 34, 40, 43]
    assert tokens[:6] == [69, 118, 40, 19, 25, 114]
    return np.array(boundaries), corpus_of(np.array(lengths, np.int32), np.array(tokens, np.uint16))


def megatron_digest(batch: SampleBatch) -> str:
    """md5 over Megatron's fields of all rows; unlike ours, its padding mask hides every [PAD] id."""
    digest = hashlib.md5()
    for row in range(len(batch.input_ids)):
        labels = np.full(batch.input_ids.shape[1], -1)
        for place, label in labels_of(batch, row).items():
            labels[place] = label
        text = batch.input_ids[row]
        for field in (text, batch.token_type_ids[row], labels, text != VOCABULARY.pad_id, labels >= 0):
            digest.update(field.astype("<i8").tobytes())
        digest.update(bytes([max(0, int(batch.sentence_order_labels[row, 0])), int(batch.truncated[row])]))
    return digest.hexdigest()


def test_samples_with_sentence_order_are_megatrons() -> None:
    boundaries, corpus = toy_corpus()
    mapping = mapped(boundaries[:12], corpus.lengths, seq_length=32, sentence_order=True, num_samples=20)
    assert [row[:2] for row in mapping.tolist()] == [
        [24, 28], [30, 34], [28, 30], [38, 40], [24, 28], [14, 16], [38, 40], [3, 9], [19, 21], [21, 24], [16, 19],
        [9, 12], [34, 38], [12, 14], [30, 34], [0, 2], [28, 30], [12, 14], [3, 9], [0, 2], [14, 16], [34, 38], [16, 19],
        [9, 12], [19, 21], [21, 24]]
    batch = built(corpus, mapping, seq_length=32, sentence_order=True)
    texts = {
        0: "2 29 100 97 62 37 103 4 72 115 96 99 138 125 74 77 4 98 3 51 128 4 19 112 8 89 4 91 76 118 101 3",
        1: "2 46 62 108 127 136 109 89 97 4 93 103 9 113 84 72 4 46 130 90 88 136 7 47 7 23 90 114 54 3 9 3",
        2: "2 4 4 24 3 62 4 34 136 33 27 58 64 49 138 100 98 3" + " 0" * 14,
        5: "2 50 40 3 4 4 42 6 7 3" + " 0" * 22,
    }
    for row, text in texts.items():
        assert batch.input_ids[row].tolist() == [int(word) for word in text.split()]
    assert [labels_of(batch, row) for row in texts] == [
        {7: 70, 16: 50, 21: 81, 26: 32}, {9: 74, 10: 93, 11: 103, 16: 86}, {1: 35, 2: 131, 6: 9}, {4: 6, 5: 122}]
    assert [int(batch.token_type_ids[row].argmax()) for row in texts] == [19, 30, 5, 4]
    assert [int(batch.sentence_order_labels[row, 0]) for row in texts] == [0, 0, 1, 0]
    assert batch.truncated[:3].tolist() == [True, True, False]
    assert batch.segment_ids[5].tolist() == [1] * 10 + [0] * 22
    assert megatron_digest(batch) == "84dab40baf2c0c3fb1107adb5ef83084"


def test_samples_without_sentence_order_are_megatrons() -> None:
    boundaries, corpus = toy_corpus()
    mapping = mapped(boundaries[:12], corpus.lengths, seq_length=32, sentence_order=False, num_samples=20)
    assert len(mapping) == 28
    assert mapping[:7].tolist() == [[9, 12, 29], [19, 21, 29], [3, 9, 29], [24, 28, 29], [28, 30, 29], [34, 38, 28],
                                    [38, 40, 29]]
    batch = built(corpus, mapping, seq_length=32, sentence_order=False)
    text = "2 32 139 127 124 70 74 4 4 24 14 92 33 123 6 85 78 17 100 124 87 4 64 10 81 138 46 56 38 112 3 0"
    assert batch.input_ids[0].tolist() == [int(word) for word in text.split()]
    assert labels_of(batch, 0) == {7: 48, 8: 7, 20: 87, 21: 113}
    assert (batch.sentence_order_labels == UNUSED_LABEL).all()
    assert not batch.token_type_ids.any()
    assert megatron_digest(batch) == "9a3394bd69caed3db98e7b49d00a6ac2"


OPTIONS = st.fixed_dictionaries({
    "mask_prob": st.sampled_from([0.05, 0.15, 0.4, 0.9]),
    "sentence_task": st.sampled_from(["order", "random_next"]),
    "masking_max_ngram": st.sampled_from([1, 3, 3, 7]),
    "masking_do_full_word": st.booleans(),
}, optional={
    "masking_use_longer_ngrams": st.booleans(),
    "masking_do_permutation": st.booleans(),
}) | st.just({"masking_use_geometric_distribution": True, "masking_max_ngram": 10})


@settings(max_examples=100, deadline=None)
@given(corpus_seed=st.integers(0, 2**20), seed=st.integers(0, 2**31 - 2), seq_length=st.sampled_from([8, 33, 128, 512]),
       max_length=st.sampled_from([3, 30, 300]), binary_head=st.booleans(), options=OPTIONS)
def test_samples_follow_the_rules_in_any_corpus(corpus_seed: int, seed: int, seq_length: int, max_length: int,
                                                binary_head: bool, options: dict[str, Any]) -> None:
    boundaries, lengths, tokens = random_corpus(corpus_seed, len(VOCABULARY), num_documents=6, max_sentences=9,
                                                max_length=max_length)
    lengths = np.append(lengths, np.array([4, 5], np.int32))
    tokens = np.append(tokens, np.arange(100, 109, dtype=np.uint16))
    boundaries = np.append(boundaries, len(lengths))
    corpus = corpus_of(lengths, tokens, boundaries)
    mapping = mapped(boundaries, lengths, seq_length=seq_length, sentence_order=binary_head, num_samples=12, seed=seed)
    batch = built(corpus, mapping, seq_length=seq_length, sentence_order=binary_head, seed=seed, **options)
    sentences = [sentence.tolist() for sentence in np.split(tokens.astype(int), np.cumsum(lengths)[:-1])]
    rows = [(int(np.count_nonzero(boundaries <= start)), sentences[start:end]) for start, end, _ in mapping.tolist()]
    for row, target in enumerate(mapping[:, 2].tolist()):
        expected = reference_sample(rows, row, target, VOCABULARY, DataConfig(**options), seed=seed,
                                    binary_head=binary_head)
        padding = seq_length - len(expected.tokens)
        assert batch.input_ids[row].tolist() == expected.tokens + [0] * padding
        assert batch.token_type_ids[row].tolist() == expected.types + [0] * padding
        assert batch.segment_ids[row].tolist() == [1] * len(expected.tokens) + [0] * padding
        assert list(labels_of(batch, row).items()) == sorted(expected.labels.items())
        assert batch.truncated[row] == expected.truncated
        label = UNUSED_LABEL if expected.label is None else int(expected.label)
        assert batch.sentence_order_labels[row].tolist() == [label]


def test_a_random_next_segment_is_of_another_document() -> None:
    # Every document has words of its own.
    boundaries = np.arange(0, 401, 10)
    lengths = np.full(400, 6, np.int32)
    tokens = np.repeat(5 + np.arange(40, dtype=np.uint16), 60)
    mapping = mapped(boundaries, lengths, seq_length=64, sentence_order=True, num_samples=2000)
    batch = built(corpus_of(lengths, tokens, boundaries), mapping, seq_length=64, sentence_order=True,
                  sentence_task="random_next")
    labels = batch.sentence_order_labels[:, 0]
    assert abs(labels.mean() - 0.5) < 0.05
    restored = batch.input_ids.copy()
    used = batch.masked_labels != UNUSED_LABEL
    restored[np.nonzero(used)[0], batch.masked_positions[used]] = batch.masked_labels[used]
    inside = (restored >= 5) & (restored < 45)
    for row, label in enumerate(labels.tolist()):
        first, second = (set(restored[row][inside[row] & (batch.token_type_ids[row] == kind)]) for kind in (0, 1))
        assert len(first) == len(second) == 1
        assert (first != second) == bool(label)
    alone = np.array([0, 400])
    only_next = built(corpus_of(lengths, tokens, alone), mapping, seq_length=64, sentence_order=True,
                      sentence_task="random_next")
    assert not only_next.sentence_order_labels.any(), "one document has no other"


def test_shares_of_a_large_sample() -> None:
    vocabulary = word_piece_vocabulary(20000, 10000)
    boundaries, lengths, tokens = random_corpus(0, len(vocabulary), num_documents=4000, max_sentences=40, max_length=50)
    mapping = mapped(boundaries, lengths, seq_length=128, sentence_order=True, num_samples=1)
    batch = built(corpus_of(lengths, tokens), mapping, seq_length=128, sentence_order=True, vocabulary=vocabulary)
    used = batch.masked_labels != UNUSED_LABEL
    labels = batch.masked_labels[used]
    shown = np.take_along_axis(batch.input_ids, batch.masked_positions.astype(np.int64), axis=1)[used]
    full = mapping[:, 2] == 125
    assert abs(used[full].sum() / np.count_nonzero(batch.segment_ids[full]) - 0.145) < 0.005
    assert abs((shown == vocabulary.mask_id).mean() - 0.8) < 0.005
    assert abs((shown == labels).mean() - 0.1) < 0.005
    assert abs(batch.sentence_order_labels.mean() - 0.5) < 0.02
    assert abs((~full).mean() - 0.1) < 0.01
    assert not np.isin(labels, [vocabulary.cls_id, vocabulary.sep_id]).any()
    # A word is masked as a whole: what follows a masked token and continues it is masked too.
    restored = batch.input_ids.copy()
    rows = np.nonzero(used)[0]
    restored[rows, batch.masked_positions[used]] = labels
    is_masked = np.zeros(restored.shape, bool)
    is_masked[rows, batch.masked_positions[used]] = True
    joined = vocabulary.is_continuation[restored[:, 1:]] & (restored[:, :-1] > vocabulary.mask_id)
    assert (is_masked[:, 1:] == is_masked[:, :-1])[joined].all()


def test_a_replacement_that_drew_pad_stays_visible() -> None:
    vocabulary = word_piece_vocabulary(6, 0)
    boundaries, lengths, tokens = random_corpus(0, len(vocabulary), num_documents=50, max_sentences=9, max_length=20)
    mapping = mapped(boundaries, lengths, seq_length=64, sentence_order=True, num_samples=1)
    batch = built(corpus_of(lengths, tokens), mapping, seq_length=64, sentence_order=True, vocabulary=vocabulary)
    drew_pad = (batch.input_ids == vocabulary.pad_id) & (batch.segment_ids == 1)
    assert drew_pad.any()
    assert (np.diff(batch.segment_ids, axis=1) <= 0).all()


def test_room_for_predictions() -> None:
    rooms = [DataConfig().predictions_per_row(*arguments) for arguments in ((512,), (128,), (512, 8))]
    assert rooms == [80, 24, 88]
    assert DataConfig(masking_do_permutation=True).predictions_per_row(512) == 160


SOUND = ([0, 6, 14], [0, 2, 29], [5, 6, 7, 8, 9, 10, 11])


@pytest.mark.parametrize(("pointers", "row", "tokens", "index", "status"), [
    (*SOUND, 0, BUILT),
    (*SOUND, 1, OUTSIDE_MAPPING),
    (*SOUND, -1, OUTSIDE_MAPPING),
    ([0, 6, 14], [0, 4, 29], SOUND[2], 0, DAMAGED),
    ([0, 6, 14], [2, 2, 29], SOUND[2], 0, DAMAGED),
    ([0, 6, 14], [0, 2, 30], SOUND[2], 0, DAMAGED),
    ([0, 8, 14], [0, 2, 29], SOUND[2], 0, DAMAGED),
    ([1, 7, 14], [0, 2, 29], SOUND[2], 0, DAMAGED),
    ([-8, -2, 14], [0, 2, 29], SOUND[2], 0, DAMAGED),
    ([2**62, 2**62 + 6, 14], [0, 2, 29], SOUND[2], 0, DAMAGED),
    ([0, 6, 14], [0, 2, 29], SOUND[2][:6], 0, DAMAGED),
    ([0, 6, 14], [0, 2, 29], [5, 6, 7, 8, 9, 140, 11], 0, UNKNOWN_TOKEN),
])
def test_nothing_is_read_outside_the_corpus(pointers: list[int], row: list[int], tokens: list[int], index: int,
                                            status: int) -> None:
    corpus = Corpus(np.array(tokens, np.uint16), np.array([3, 4, 9], np.int32), np.array(pointers), np.array([0, 3]))
    rules = rules_for(VOCABULARY, DataConfig(), binary_head=True, seed=1)
    batch = SampleBatch.empty(1, 32, 8)
    mapping = np.array([row], np.uint32)
    assert build_rows(corpus, mapping, rules, np.array([index]), np.array([0]), batch)[0] == status
    no_room = SampleBatch.empty(1, 32, 0)
    if status == BUILT:
        assert build_rows(corpus, mapping, rules, np.array([0]), np.array([0]), no_room)[0] == TOO_MANY_PREDICTIONS
