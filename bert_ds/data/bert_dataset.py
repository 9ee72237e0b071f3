"""From files to samples: the datasets of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_ds.config.data import DataConfig
from bert_ds.data.blending import (
    SURPLUS,
    BlendedDataset,
    blend_order,
    parse_data_path,
    samples_of_each,
)
from bert_ds.data.dataset_metadata import read_metadata
from bert_ds.data.index_cache import load_or_build
from bert_ds.data.indexed_dataset import IndexedDataset
from bert_ds.data.masking import (
    BUILT,
    DAMAGED,
    OUTSIDE_MAPPING,
    UNKNOWN_TOKEN,
    Corpus,
    build_rows,
    predictions_per_row,
    rules_for,
)
from bert_ds.data.sample_mapping import ALGORITHM_VERSION, MappingSettings, build_mapping
from bert_ds.data.samples import SampleBatch, SampleSource
from bert_ds.data.splits import SPLITS, document_range
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import DataError, raise_if_any

_SPECIAL_TOKENS_OF_A_ROW = 3
_SETTING = "--data-path"


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """The splits of a run; None where no samples were asked for."""

    train: SampleSource | None
    valid: SampleSource | None
    test: SampleSource | None


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """What a sample depends on beside the text, the vocabulary and the mapping."""

    seq_length: int
    mask_prob: float
    binary_head: bool
    seed: int


class BertDataset:
    """Masked rows from one corpus: a pure function of (text, mapping, settings, index). Thread-safe."""

    def __init__(self, corpus: IndexedDataset, mapping: NDArray[np.unsignedinteger], settings: SampleSettings,
                 vocabulary: Vocabulary) -> None:
        """mapping: [samples, 3], see `build_mapping`."""
        if not np.issubdtype(corpus.dtype, np.integer):
            raise DataError.of(_SETTING, corpus.prefix, f"holds {corpus.dtype}, not tokens",
                               "preprocess the text again")
        self.corpus = corpus
        self.mapping = mapping
        self._settings = settings
        self._vocab_size = len(vocabulary)
        self._arrays = Corpus(corpus.tokens, corpus.sequence_lengths, corpus.sequence_pointers)
        self._rules = rules_for(vocabulary, mask_prob=settings.mask_prob, sentence_order=settings.binary_head,
                                seed=settings.seed)
        self._num_predictions = predictions_per_row(settings.seq_length, settings.mask_prob)

    def __len__(self) -> int:
        return len(self.mapping)

    def build_batch(self, indices: NDArray[np.int64]) -> SampleBatch:
        """The samples [B] of `indices`; see SampleSource."""
        batch = SampleBatch.empty(len(indices), self._settings.seq_length, self._num_predictions)
        status, k, token = build_rows(self._arrays, self.mapping, self._rules, np.asarray(indices, np.int64),
                                      np.arange(len(indices)), batch)
        if status != BUILT:
            raise self._failure(status, int(indices[k]), token)
        return batch

    def _failure(self, status: int, index: int, token: int) -> Exception:
        prefix = self.corpus.prefix
        if status == OUTSIDE_MAPPING:
            return IndexError(f"sample {index} of {len(self)}")
        if status == UNKNOWN_TOKEN:
            return DataError.of(
                _SETTING, prefix,
                f"sample {index} holds the token id {token} but the vocabulary has {self._vocab_size} entries",
                "give --vocab-file the vocabulary that the data were preprocessed with")
        if status == DAMAGED:
            start, end, _ = self.mapping[index].tolist()
            return DataError.of(
                _SETTING, prefix, f"sample {index} (sentences {start} to {end}) does not lie in {prefix}.bin as "
                f"{prefix}.idx describes it", "copy both files again")
        return AssertionError(f"sample {index} has more than {self._num_predictions} masked tokens")


def build_datasets(data: DataConfig, *, seq_length: int, binary_head: bool, seed: int, vocabulary: Vocabulary,
                   num_samples: Mapping[str, int]) -> Datasets:
    """The datasets of a run, the same in every process with the same arguments.

    num_samples: samples that train, valid and test must have; a split with 0 is left out.

    Let one process call this first: it fills the index cache, which the others only map. Raises ConfigError and
    DataError.
    """
    settings = SampleSettings(seq_length=seq_length, mask_prob=data.mask_prob, binary_head=binary_head, seed=seed)
    blend = parse_data_path(data.data_path)
    corpora = [IndexedDataset(prefix) for prefix in blend.prefixes]
    for corpus in corpora:
        _check_vocabulary(corpus, data, vocabulary)
    built: dict[str, SampleSource | None] = {}
    for split in SPLITS:
        wanted = num_samples.get(split, 0)
        source = _SplitSource(data, settings, vocabulary, split)
        if wanted == 0:
            built[split] = None
        elif len(corpora) == 1 and blend.weights is None:
            built[split] = source.dataset(corpora[0], wanted)
        else:
            built[split] = source.blend(corpora, blend.weights, wanted)
    return Datasets(**built)


def _check_vocabulary(corpus: IndexedDataset, data: DataConfig, vocabulary: Vocabulary) -> None:
    metadata = read_metadata(corpus.prefix)
    if metadata is not None:
        raise_if_any(DataError, metadata.problems(vocabulary, data.vocab_file, data.tokenizer_type))


@dataclass(frozen=True)
class _SplitSource:
    """Builds one split of a run."""

    data: DataConfig
    settings: SampleSettings
    vocabulary: Vocabulary
    split: str

    def dataset(self, corpus: IndexedDataset, num_samples: int) -> BertDataset:
        """At least `num_samples` samples of one corpus."""
        first, end = self._documents(corpus)
        mapping_settings = MappingSettings(
            num_samples=num_samples,
            max_tokens=self.settings.seq_length - _SPECIAL_TOKENS_OF_A_ROW,
            short_seq_prob=self.data.short_seq_prob,
            seed=self.settings.seed,
            min_sentences=2 if self.settings.binary_head else 1,
        )

        def build() -> NDArray[np.unsignedinteger]:
            corpus.verify()
            return build_mapping(corpus.document_indices[first:end + 1], corpus.sequence_lengths, mapping_settings,
                                 source=f"{corpus.prefix} ({self.split})")

        description = {"array": "sample mapping", "version": ALGORITHM_VERSION, "index": corpus.fingerprint,
                       "documents": [first, end], **asdict(mapping_settings)}
        name = f"{Path(corpus.prefix).name}-{self.split}"
        mapping = load_or_build(self._cache_folder(corpus), name, description, build)
        return BertDataset(corpus, mapping, self.settings, self.vocabulary)

    def blend(self, corpora: Sequence[IndexedDataset], weights: Sequence[float] | None,
              num_samples: int) -> BlendedDataset:
        """Samples of several corpora. Without weights each gives in proportion to its tokens in this split, as one
        corpus made of all of them would (Megatron-LM cannot blend BERT data without weights)."""
        weights = weights or [self._num_tokens(corpus) for corpus in corpora]
        size = sum(samples_of_each(weights, num_samples))
        datasets = [self.dataset(corpus, wanted)
                    for corpus, wanted in zip(corpora, samples_of_each(weights, num_samples, SURPLUS), strict=True)]
        description = {"array": "blend", "version": 1, "weights": list(weights), "size": size}
        order = load_or_build(self._cache_folder(corpora[0]), f"blend-{self.split}", description,
                              lambda: blend_order(weights, size))
        return BlendedDataset(datasets, order, source=" ".join(self.data.data_path))

    def _documents(self, corpus: IndexedDataset) -> tuple[int, int]:
        return document_range(self.data.split, self.split, corpus.num_documents, source=corpus.prefix)

    def _num_tokens(self, corpus: IndexedDataset) -> int:
        """Tokens of this split, at least 1."""
        first, end = (int(corpus.document_indices[document]) for document in self._documents(corpus))
        pointers = corpus.sequence_pointers
        ends = corpus.tokens.nbytes if end >= len(corpus) else int(pointers[end])
        begins = corpus.tokens.nbytes if first >= len(corpus) else int(pointers[first])
        return max(1, (ends - begins) // corpus.dtype.itemsize)

    def _cache_folder(self, corpus: IndexedDataset) -> Path:
        if self.data.data_cache_path is not None:
            return Path(self.data.data_cache_path)
        return Path(corpus.prefix).parent / "cache"
