"""Several indexed datasets made one after the other into one, as if their texts had been preprocessed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from bert_ds.data.dataset_metadata import DatasetMetadata, read_metadata
from bert_ds.data.dataset_output import dataset_writers, publish
from bert_ds.data.free_space import check_free_space
from bert_ds.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from bert_ds.errors import DataError, Problem, raise_if_any

_SENTENCES_AT_ONCE = 1 << 18
_SETTING = "PREFIX"
_MUST_AGREE: dict[str, Callable[[DatasetMetadata], object]] = {
    "vocabulary (sha256)": lambda metadata: metadata.vocab_sha256,
    "tokenizer type": lambda metadata: metadata.tokenizer_type,
    "longest word": lambda metadata: metadata.max_word_length,
    "sentence splitter": lambda metadata: metadata.sentence_splitter,
    "token at the end of documents": lambda metadata: metadata.document_end_token,
}


def merge(prefixes: Sequence[str], output_prefix: str) -> DatasetMetadata | None:
    """Writes the documents of all datasets, in this order, in memory independent of their size.

    Returns the metadata of the result: None, as beside data of Megatron-LM, when any of the datasets has none.
    Raises DataError when they do not fit together, are damaged, or the result cannot be written.
    """
    if any(_is_same(prefix, output_prefix) for prefix in prefixes):
        raise DataError.of("--output-prefix", output_prefix, "is one of the datasets to be merged",
                           "choose another name")
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    metadata = [read_metadata(prefix) for prefix in prefixes]
    raise_if_any(DataError, _differences(datasets, metadata))
    for dataset in datasets:
        dataset.verify()
    needed = sum(Path(prefix + suffix).stat().st_size for prefix in prefixes for suffix in (".bin", ".idx"))
    check_free_space(output_prefix, needed, repair="choose another disk or make room")
    with dataset_writers([output_prefix], datasets[0].dtype) as (writer,):
        for dataset in datasets:
            _append(dataset, writer)
        merged = _merged([known for known in metadata if known is not None]) if None not in metadata else None
        publish([writer], [merged])
    return merged


def _is_same(prefix: str, other: str) -> bool:
    return Path(f"{prefix}.idx").resolve() == Path(f"{other}.idx").resolve()


def _differences(datasets: Sequence[IndexedDataset],
                 metadata: Sequence[DatasetMetadata | None]) -> Iterator[Problem]:
    """Where a dataset differs from the first one."""
    first = datasets[0]
    for dataset in datasets[1:]:
        if dataset.dtype != first.dtype:
            yield Problem(_SETTING, dataset.prefix, f"holds {dataset.dtype} where {first.prefix} holds {first.dtype}",
                          "preprocess both with the same vocabulary")
    known = [(dataset.prefix, of_one) for dataset, of_one in zip(datasets, metadata, strict=True) if of_one is not None]
    for prefix, of_one in known[1:]:
        for name, value_of in _MUST_AGREE.items():
            value, expected = value_of(of_one), value_of(known[0][1])
            if value != expected:
                yield Problem(_SETTING, prefix, f"{name} is {value} where that of {known[0][0]} is {expected}",
                              "preprocess both texts alike")


def _append(dataset: IndexedDataset, writer: IndexedDatasetWriter) -> None:
    boundaries = dataset.document_indices
    for first, end in pairwise(_cuts(dataset)):
        sentences = slice(int(boundaries[first]), int(boundaries[end]))
        lengths = dataset.sequence_lengths[sentences]
        start = int(dataset.sequence_pointers[sentences.start]) // dataset.dtype.itemsize if len(lengths) else 0
        tokens = dataset.tokens[start:start + int(lengths.sum(dtype=np.int64))]
        writer.add_documents(tokens, lengths, np.diff(boundaries[first:end + 1]))


def _cuts(dataset: IndexedDataset) -> Iterator[int]:
    """Documents at which the dataset is cut into parts of about as many sentences."""
    document = 0
    while document < dataset.num_documents:
        yield document
        last_sentence = dataset.document_indices[document] + _SENTENCES_AT_ONCE
        following = int(np.searchsorted(dataset.document_indices, last_sentence, "right")) - 1
        document = min(max(document + 1, following), document + _SENTENCES_AT_ONCE)
    yield dataset.num_documents


def _merged(metadata: Sequence[DatasetMetadata]) -> DatasetMetadata:
    def total(count: Callable[[DatasetMetadata], int]) -> int:
        return sum(map(count, metadata))

    return replace(
        metadata[0],
        sentence_splitter_version=", ".join(sorted({of_one.sentence_splitter_version for of_one in metadata})),
        inputs=tuple(name for of_one in metadata for name in of_one.inputs),
        json_key=", ".join(dict.fromkeys(of_one.json_key for of_one in metadata)),
        documents=total(lambda of_one: of_one.documents),
        documents_of_two_sentences=total(lambda of_one: of_one.documents_of_two_sentences),
        sentences=total(lambda of_one: of_one.sentences),
        tokens=total(lambda of_one: of_one.tokens),
        unknown_tokens=total(lambda of_one: of_one.unknown_tokens),
        skipped_records=total(lambda of_one: of_one.skipped_records),
        replaced_records=total(lambda of_one: of_one.replaced_records),
        duplicate_documents=total(lambda of_one: of_one.duplicate_documents),
        duplicates_dropped=all(of_one.duplicates_dropped for of_one in metadata),
    )
