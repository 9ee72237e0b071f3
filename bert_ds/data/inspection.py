"""What is in a dataset: counts, lengths, what cannot serve, and what training will see of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert_ds.config.data import DataConfig
from bert_ds.data.bert_dataset import BertDataset, SampleSettings
from bert_ds.data.indexed_dataset import IndexedDataset
from bert_ds.data.sample_mapping import LONGEST_SENTENCE, MappingSettings, build_mapping
from bert_ds.data.samples import UNUSED_LABEL, SampleBatch
from bert_ds.data.vocabulary import Vocabulary

_AT_ONCE = 1 << 22
_ROWS_AT_ONCE = 256
_SPECIAL_TOKENS_OF_A_ROW = 3


@dataclass(frozen=True)
class Lengths:
    """Distribution of lengths in tokens."""

    histogram: NDArray[np.int64]
    """[longest + 1], how many have each length."""

    @classmethod
    def of(cls, lengths: NDArray[np.integer]) -> Lengths:
        histogram = np.zeros(int(lengths.max(initial=0)) + 1, np.int64)
        for first in range(0, len(lengths), _AT_ONCE):
            part = np.bincount(lengths[first:first + _AT_ONCE])
            histogram[:len(part)] += part
        return cls(histogram)

    @property
    def mean(self) -> float:
        return float(np.arange(len(self.histogram)) @ self.histogram / max(self.histogram.sum(), 1))

    def percentile(self, percent: float) -> int:
        """The smallest length that at least `percent` of all do not exceed."""
        reached = np.cumsum(self.histogram)
        return int(np.searchsorted(reached, max(percent / 100 * int(reached[-1]), 1)))

    def summary(self) -> dict[str, float]:
        return {"min": self.percentile(0), "mean": round(self.mean, 2),
                **{f"p{percent}": self.percentile(percent) for percent in (10, 50, 90, 99)},
                "max": len(self.histogram) - 1}


@dataclass(frozen=True, kw_only=True)
class CorpusStatistics:
    """What can be told from the files alone."""

    documents: int
    sentences: int
    tokens: int
    empty_documents: int
    too_few_sentences: int
    """Documents left out of training: not empty, but with fewer sentences than the task needs."""
    too_long_sentence: int
    """Documents left out of training since one of several sentences is longer than LONGEST_SENTENCE."""
    unknown_tokens: int | None
    """Tokens that are [UNK]; None without a vocabulary."""
    sentence_lengths: Lengths
    document_lengths: Lengths

    @property
    def unserving_documents(self) -> int:
        return self.empty_documents + self.too_few_sentences + self.too_long_sentence


@dataclass(frozen=True, kw_only=True)
class SampleStatistics:
    """What training sees at a sequence length, over many samples of one epoch."""

    seq_length: int
    samples_of_an_epoch: int
    samples_seen: int
    row_lengths: Lengths
    """Tokens of the rows without padding."""
    padding_share: float
    truncated_share: float
    """Rows from which tokens were cut off."""
    masked_share: float
    """Tokens to be predicted, of all that are not padding."""
    replaced_by_mask: float
    """Of these, those replaced by [MASK] ..."""
    replaced_at_random: float
    """... by another token ..."""
    kept: float
    """... and those left as they are, or for which the random draw gave the same token."""
    swapped_share: float | None
    """Rows whose sentence label is 1 (segments swapped, or the second from elsewhere); None without the task."""


def corpus_statistics(corpus: IndexedDataset, vocabulary: Vocabulary | None, *, binary_head: bool) -> CorpusStatistics:
    """Counts and lengths; reads the index, and all tokens where there is a vocabulary. Raises DataError."""
    corpus.verify()
    boundaries = corpus.document_indices
    sentences = np.diff(boundaries)
    has_long = np.zeros(len(sentences), np.bool_)
    long_sentences = np.flatnonzero(corpus.sequence_lengths > LONGEST_SENTENCE)
    has_long[np.searchsorted(boundaries, long_sentences, "right") - 1] = True
    too_long = has_long & (sentences > 1)
    too_few = (sentences > 0) & (sentences < (2 if binary_head else 1)) & ~too_long
    token_ends = np.append(corpus.sequence_pointers // corpus.dtype.itemsize, len(corpus.tokens))
    return CorpusStatistics(
        documents=len(sentences), sentences=len(corpus), tokens=len(corpus.tokens),
        empty_documents=int(np.count_nonzero(sentences == 0)),
        too_few_sentences=int(np.count_nonzero(too_few)), too_long_sentence=int(np.count_nonzero(too_long)),
        unknown_tokens=None if vocabulary is None else _count(corpus, vocabulary.unk_id),
        sentence_lengths=Lengths.of(corpus.sequence_lengths),
        document_lengths=Lengths.of(np.diff(token_ends[boundaries])),
    )


def _count(corpus: IndexedDataset, token: int) -> int:
    return sum(int(np.count_nonzero(corpus.tokens[first:first + _AT_ONCE] == token))
               for first in range(0, len(corpus.tokens), _AT_ONCE))


def samples_of_an_epoch(corpus: IndexedDataset, vocabulary: Vocabulary, data: DataConfig, *, seq_length: int,
                        binary_head: bool, seed: int) -> BertDataset:
    """The samples that one epoch over the whole corpus gives, shuffled. Raises DataError when no document serves."""
    settings = MappingSettings(num_samples=1, max_tokens=seq_length - _SPECIAL_TOKENS_OF_A_ROW, seed=seed,
                               short_seq_prob=data.short_seq_prob, min_sentences=2 if binary_head else 1)
    mapping = build_mapping(corpus.document_indices, corpus.sequence_lengths, settings, source=corpus.prefix)
    return BertDataset(corpus, mapping, SampleSettings(data=data, seq_length=seq_length, binary_head=binary_head,
                                                       seed=seed), vocabulary)


def sample_statistics(samples: BertDataset, vocabulary: Vocabulary, *, seq_length: int,
                      most_samples: int) -> SampleStatistics:
    """Statistics over the first `most_samples` of the shuffled samples."""
    seen = min(len(samples), most_samples)
    lengths, totals = list[NDArray[np.int64]](), np.zeros(7, np.int64)
    for batch in _batches(samples, seen):
        lengths.append(np.count_nonzero(batch.segment_ids, axis=1))
        totals += _totals(batch, vocabulary.mask_id)
    row_lengths = np.concatenate(lengths)
    tokens = int(row_lengths.sum())
    masked, by_mask, kept, labelled, swapped, truncated, rows = totals.tolist()
    return SampleStatistics(
        seq_length=seq_length, samples_of_an_epoch=len(samples), samples_seen=rows,
        row_lengths=Lengths.of(row_lengths), padding_share=1 - tokens / (rows * seq_length),
        truncated_share=truncated / rows, masked_share=masked / tokens, replaced_by_mask=by_mask / max(masked, 1),
        replaced_at_random=(masked - by_mask - kept) / max(masked, 1), kept=kept / max(masked, 1),
        swapped_share=swapped / labelled if labelled else None)


def _batches(samples: BertDataset, count: int) -> Iterator[SampleBatch]:
    for first in range(0, count, _ROWS_AT_ONCE):
        yield samples.build_batch(np.arange(first, min(first + _ROWS_AT_ONCE, count)))


def _totals(batch: SampleBatch, mask_id: int) -> NDArray[np.int64]:
    """Masked tokens; those that became [MASK]; those kept; labelled rows; label 1; truncated rows; rows."""
    is_masked = batch.masked_labels != UNUSED_LABEL
    shown = np.take_along_axis(batch.input_ids, batch.masked_positions, axis=1)[is_masked]
    originals = batch.masked_labels[is_masked]
    labels = batch.sentence_order_labels
    return np.array([len(shown), np.count_nonzero(shown == mask_id), np.count_nonzero(shown == originals),
                     np.count_nonzero(labels != UNUSED_LABEL), np.count_nonzero(labels == 1),
                     np.count_nonzero(batch.truncated), len(labels)])
