"""From files to samples: the datasets of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_ds.config.data import DataConfig
from bert_ds.data.blending import Blend, BlendedDataset, blend_order, blends_of_splits, samples_of_each
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
    measure_samples,
    rules_for,
)
from bert_ds.data.packing import PackedDataset, PackedRows
from bert_ds.data.sample_mapping import ALGORITHM_VERSION, MappingSettings, build_mapping
from bert_ds.data.samples import SampleBatch, SampleSource
from bert_ds.data.splits import SPLITS, document_range, parse_split
from bert_ds.data.vocabulary import EOS, EXTRA_TOKENS, Vocabulary
from bert_ds.errors import DataError, Problem, UserError, raise_if_any

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

    data: DataConfig
    """Of which the masking and the sentence task are read."""
    seq_length: int
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
        self._arrays = Corpus(corpus.tokens, corpus.sequence_lengths, corpus.sequence_pointers, corpus.document_indices)
        self._rules = rules_for(vocabulary, settings.data, binary_head=settings.binary_head, seed=settings.seed)
        self._num_predictions = settings.data.predictions_per_row(settings.seq_length)

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

    def lengths(self, indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """Tokens [B] of the samples of `indices`; see MeasuredSource."""
        lengths = np.empty(len(indices), np.int32)
        status, k = measure_samples(self._arrays, self.mapping, self._rules, np.asarray(indices, np.int64),
                                    self._settings.seq_length, lengths)
        if status != BUILT:
            raise self._failure(status, int(indices[k]), 0)
        return lengths

    def _failure(self, status: int, index: int, token: int) -> Exception:
        prefix = self.corpus.prefix
        if status == OUTSIDE_MAPPING:
            return IndexError(f"sample {index} of {len(self)}")
        if status == UNKNOWN_TOKEN:
            return DataError.of(
                _SETTING, prefix,
                f"sample {index} holds the token id {token} but the vocabulary has {self._vocab_size} entries",
                _repair_of_unknown(token, self._settings.data, self._vocab_size))
        if status == DAMAGED:
            start, end, _ = self.mapping[index].tolist()
            return DataError.of(
                _SETTING, prefix, f"sample {index} (sentences {start} to {end}) does not lie in {prefix}.bin as "
                f"{prefix}.idx describes it", "copy both files again")
        return AssertionError(f"sample {index} has more than {self._num_predictions} masked tokens")


def open_corpora(data: DataConfig, vocabulary: Vocabulary) -> dict[str, IndexedDataset]:
    """Every corpus that the splits read, by prefix; reads no more than headers, ends and samples of the tokens.

    Raises ConfigError, and DataError with all that is wrong: files that are missing or damaged, corpora that were not
    made with this vocabulary or not with the same one.
    """
    corpora: dict[str, IndexedDataset] = {}
    problems: list[Problem] = []
    for blend in blends_of_splits(data).values():
        for prefix in () if blend is None else blend.prefixes:
            if prefix in corpora:
                continue
            try:
                corpora[prefix] = IndexedDataset(prefix)
                problems += _vocabulary_problems(corpora[prefix], data, vocabulary)
            except UserError as error:
                problems += error.problems
    first = next(iter(corpora.values()), None)
    for prefix, corpus in corpora.items():
        if first is not None and corpus.dtype != first.dtype:
            problems.append(Problem(
                _SETTING, prefix, f"holds {corpus.dtype} and {first.prefix} {first.dtype}: they were made with "
                "vocabularies of different sizes", "preprocess all texts with the same vocabulary"))
    raise_if_any(DataError, dict.fromkeys(problems))
    return corpora


def build_datasets(data: DataConfig, *, seq_length: int, binary_head: bool, seed: int, vocabulary: Vocabulary,
                   num_samples: Mapping[str, int], eval_seq_length: int | None = None) -> Datasets:
    """The datasets of a run, the same in every process with the same arguments.

    num_samples: samples, or packed rows, that train, valid and test must have; a split with 0 is left out, and so is a
    test that the settings give no data. A text of fewer samples is gone through again and again.
    eval_seq_length: length of the rows of valid and test; None means seq_length.

    Let one process call this first: it fills the index cache, which the others only map. Raises ConfigError and
    DataError.
    """
    corpora = open_corpora(data, vocabulary)
    built: dict[str, SampleSource | None] = {}
    for split, blend in blends_of_splits(data).items():
        wanted = num_samples.get(split, 0)
        if wanted == 0 or (split == "test" and not _gives_test(data, blend)):
            built[split] = None
        elif blend is None:
            raise DataError.of(f"--{split}-data-path", "none", f"{split} has no data, while train has its own",
                               f"give --{split}-data-path, or train without evaluation (--eval-interval none)")
        else:
            length = seq_length if split == "train" or eval_seq_length is None else eval_seq_length
            settings = SampleSettings(data=data, seq_length=length, binary_head=binary_head, seed=seed)
            planned = data.planned_samples if split == "train" else None
            source = _SplitSource(settings=settings, vocabulary=vocabulary, split=split, blend=blend,
                                  corpora=[corpora[prefix] for prefix in blend.prefixes], planned=planned or wanted,
                                  wanted=wanted)
            built[split] = _packed(source) if data.pack_sequences else source.build()
    return Datasets(**built)


def _gives_test(data: DataConfig, blend: Blend | None) -> bool:
    return blend is not None and (data.has_data_of_splits or parse_split(data.split)[SPLITS.index("test")] is not None)


def _packed(source: _SplitSource) -> PackedDataset:
    """The split's rows, each of several samples; `planned` and `wanted` count rows."""
    settings = source.settings
    data = settings.data
    form = PackedRows(
        seq_length=settings.seq_length, max_sequences=data.sequences_per_row,
        num_predictions=data.predictions_per_row(settings.seq_length, data.sequences_per_row),
        pad_id=source.vocabulary.pad_id, cache_folder=source.cache_folder, name=f"{source.name}-packed")

    def draw(planned: int, wanted: int, cached: bool) -> _SplitSource:
        return replace(source, planned=planned, wanted=wanted, cached=cached)

    return form.build(draw, planned=source.planned, wanted=source.wanted)


def _vocabulary_problems(corpus: IndexedDataset, data: DataConfig, vocabulary: Vocabulary) -> list[Problem]:
    """Where the corpus does not fit the vocabulary: by its metadata, or else by a sample of its tokens."""
    prefix = corpus.prefix
    metadata = read_metadata(prefix)
    if metadata is None:
        sampled = corpus.sampled_tokens()
        unknown = sampled[(sampled < 0) | (sampled >= len(vocabulary))]
        size = len(vocabulary)
        return [Problem(_SETTING, prefix, f"holds the token id {token} but the vocabulary has {size} entries",
                        _repair_of_unknown(int(token), data, size)) for token in unknown[:1]]
    problems = [*metadata.problems(vocabulary, data.vocab_file, data.tokenizer_type)]
    if not problems and metadata.document_end_token == EOS and EOS not in vocabulary.tokens:
        problems.append(Problem("--vocab-extra-bos-eos", False, f"documents of {prefix} end with {EOS}, which the "
                                "vocabulary lacks", "give the flag"))
    return problems


def _repair_of_unknown(token: int, data: DataConfig, vocab_size: int) -> str:
    repair = "give --vocab-file the vocabulary that the data were preprocessed with"
    if not data.vocab_extra_bos_eos and 0 <= token - vocab_size < len(EXTRA_TOKENS):
        return f"{repair}, or --vocab-extra-bos-eos if Megatron-LM made them with --append-eod"
    return repair


@dataclass(frozen=True, kw_only=True)
class _SplitSource:
    """One split of a run, sample by sample."""

    settings: SampleSettings
    vocabulary: Vocabulary
    split: str
    blend: Blend
    corpora: Sequence[IndexedDataset]
    """Those of the blend's prefixes."""
    planned: int
    """Samples that the order is drawn for."""
    wanted: int
    """Samples to be had."""
    cached: bool = True
    """Whether the arrays are kept for the next process."""

    def build(self) -> BertDataset | BlendedDataset:
        """The samples of one corpus as they come, or those of several blended."""
        parts = self._parts()
        datasets = [BertDataset(corpus, self._mapping(corpus, mapping), self.settings, self.vocabulary)
                    for corpus, mapping in parts]
        if not self._is_blend:
            return datasets[0]
        order = self._array(self.corpora[0], f"blend-{self.split}", self._describe_blend(),
                            lambda: blend_order(self._weights, self._size))
        return BlendedDataset(datasets, order, source=self.blend.source)

    def describe(self) -> dict[str, object]:
        """Everything that the order and the lengths of the samples depend on."""
        settings = self.settings
        return {"mappings": [self._describe_mapping(corpus, mapping) for corpus, mapping in self._parts()],
                "blend": self._describe_blend() if self._is_blend else None,
                "sentence_task": settings.data.sentence_task if settings.binary_head else None}

    @property
    def name(self) -> str:
        """For files and messages."""
        return f"blend-{self.split}" if self._is_blend else f"{Path(self.corpora[0].prefix).name}-{self.split}"

    @property
    def cache_folder(self) -> Path:
        """Where indexes that are the split's, not a corpus', are kept."""
        return self._folder(self.corpora[0])

    @property
    def _is_blend(self) -> bool:
        """A single weighted prefix makes a blend too, except where the split has data of its own, as in Megatron-LM; a
        blend's larger surplus may ask for an epoch more."""
        return len(self.corpora) > 1 or not (self.blend.weights is None or self.settings.data.has_data_of_splits)

    @property
    def _weights(self) -> Sequence[float]:
        """Without weights each corpus gives in proportion to its tokens in this split, as one corpus made of all of
        them would (Megatron-LM cannot blend BERT data without weights)."""
        return self.blend.weights or [self._num_tokens(corpus) for corpus in self.corpora]

    @property
    def _size(self) -> int:
        """Samples of the blend."""
        return sum(samples_of_each(self._weights, self.wanted))

    def _parts(self) -> list[tuple[IndexedDataset, MappingSettings]]:
        """What is taken from each corpus."""
        if not self._is_blend:
            return [(self.corpora[0], self._mapping_settings(self.planned, self.wanted))]
        surplus = self.settings.data.mid_level_dataset_surplus
        return [(corpus, self._mapping_settings(planned, wanted)) for corpus, planned, wanted in zip(
            self.corpora, samples_of_each(self._weights, self.planned, surplus),
            samples_of_each(self._weights, self.wanted, surplus), strict=True)]

    def _mapping_settings(self, planned: int, wanted: int) -> MappingSettings:
        """At least `wanted` samples, in the order drawn for `planned`."""
        settings = self.settings
        return MappingSettings(
            num_samples=planned,
            needed_samples=wanted if wanted > planned else 0,
            max_tokens=settings.seq_length - _SPECIAL_TOKENS_OF_A_ROW,
            short_seq_prob=settings.data.short_seq_prob,
            seed=settings.seed,
            min_sentences=2 if settings.binary_head else 1,
        )

    def _mapping(self, corpus: IndexedDataset, settings: MappingSettings) -> NDArray[np.unsignedinteger]:
        first, end = self._documents(corpus)

        def build() -> NDArray[np.unsignedinteger]:
            corpus.verify()
            return build_mapping(corpus.document_indices[first:end + 1], corpus.sequence_lengths, settings,
                                 source=f"{corpus.prefix} ({self.split})")

        return self._array(corpus, f"{Path(corpus.prefix).name}-{self.split}",
                           self._describe_mapping(corpus, settings), build)

    def _describe_mapping(self, corpus: IndexedDataset, settings: MappingSettings) -> dict[str, object]:
        return {"array": "sample mapping", "version": ALGORITHM_VERSION, "index": corpus.fingerprint,
                "documents": list(self._documents(corpus)), **asdict(settings)}

    def _describe_blend(self) -> dict[str, object]:
        return {"array": "blend", "version": 1, "weights": list(self._weights), "size": self._size}

    def _array(self, corpus: IndexedDataset, name: str, description: Mapping[str, object],
               build: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        return load_or_build(self._folder(corpus), name, description, build) if self.cached else build()

    def _documents(self, corpus: IndexedDataset) -> tuple[int, int]:
        if self.settings.data.has_data_of_splits:
            return 0, corpus.num_documents
        return document_range(self.settings.data.split, self.split, corpus.num_documents, source=corpus.prefix)

    def _num_tokens(self, corpus: IndexedDataset) -> int:
        """Tokens of this split, at least 1."""
        first, end = (int(corpus.document_indices[document]) for document in self._documents(corpus))
        pointers = corpus.sequence_pointers
        ends = corpus.tokens.nbytes if end >= len(corpus) else int(pointers[end])
        begins = corpus.tokens.nbytes if first >= len(corpus) else int(pointers[first])
        return max(1, (ends - begins) // corpus.dtype.itemsize)

    def _folder(self, corpus: IndexedDataset) -> Path:
        folder = self.settings.data.data_cache_path
        if folder is not None:
            return Path(folder)
        return Path(corpus.prefix).parent / "cache"
