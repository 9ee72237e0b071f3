"""From raw text to indexed datasets: read, split into sentences, tokenise, write.

The output is the same for any number of worker processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from bert_ds.data.dataset_metadata import DatasetMetadata
from bert_ds.data.dataset_output import dataset_writers, publish
from bert_ds.data.document_encoder import DocumentEncoder, EncodedChunk, EncodedDocuments, EncoderSettings
from bert_ds.data.duplicates import SeenDocuments
from bert_ds.data.free_space import check_free_space
from bert_ds.data.indexed_dataset import IndexedDatasetWriter
from bert_ds.data.progress import Progress
from bert_ds.data.text_sources import LARGEST_DOCUMENT_MB, BadRecords, Chunk, TextSources
from bert_ds.data.worker_pool import worker_pool
from bert_ds.errors import ConfigError, DataError, Problem, raise_if_any

_CHUNKS_PER_WORKER = 3
_TOKENS_PER_TEXT_BYTE = 0.23
_INDEX_BYTES_PER_TEXT_BYTE = 0.15


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """One run of the preprocessing."""

    inputs: tuple[str, ...]
    """Files, glob patterns, "-" for standard input."""
    output_prefix: str
    encoder: EncoderSettings
    input_format: str = "auto"
    workers: int = 1
    on_error: str = "stop"
    largest_document_mb: float = LARGEST_DOCUMENT_MB
    """Documents beyond it are refused, which bounds the memory."""
    drop_duplicates: bool = False
    """Leave out documents whose texts have all been seen in an earlier one; they are counted in any case."""
    check_free_space: bool = True
    """Refuse to start where the disk has less room than the output will take by estimate."""
    log_interval: int = 1000
    """Documents between two progress lines, of which there is at most one every five seconds."""

    def problems(self) -> Iterator[Problem]:
        if self.workers < 1:
            yield Problem("--workers", self.workers, "must be at least 1", "use the number of processor cores")
        if self.log_interval < 1:
            yield Problem("--log-interval", self.log_interval, "must be at least 1", "use 1000")
        if self.encoder.max_word_length < 1:
            yield Problem("--max-word-length", self.encoder.max_word_length, "must be at least 1", "use 100")
        if not self.largest_document_mb > 0:
            yield Problem("--max-document-mb", self.largest_document_mb, "must be above 0",
                          f"use {LARGEST_DOCUMENT_MB:g}")
        if len(set(self.encoder.json_keys)) < len(self.encoder.json_keys):
            yield Problem("--json-keys", " ".join(self.encoder.json_keys), "names a key twice", "name each key once")

    def prefix_of(self, key: str) -> str:
        """Prefix of the dataset made from the texts of `key`, named as Megatron-LM names it."""
        level = "document" if self.encoder.sentence_splitter is None else "sentence"
        return f"{self.output_prefix}_{key}_{level}"


@dataclass(frozen=True)
class PreprocessedDataset:
    """One dataset that was written."""

    prefix: str
    metadata: DatasetMetadata


def preprocess(settings: PreprocessSettings) -> list[PreprocessedDataset]:
    """Writes one dataset with its metadata for each JSON key.

    Memory does not depend on the size of the corpus, but for the hashes of its documents (see `duplicates`). An error
    anywhere (DataError, ConfigError) leaves no file that looks finished.
    """
    raise_if_any(ConfigError, settings.problems())
    encoder = DocumentEncoder(replace(settings.encoder, replace_bad_characters=settings.on_error == "replace"))
    sources = TextSources(settings.inputs, settings.input_format, largest_document_mb=settings.largest_document_mb)
    keys = settings.encoder.json_keys
    prefixes = [settings.prefix_of(key) for key in keys]
    if settings.check_free_space:
        needed = sources.estimated_text_bytes() * _bytes_per_text_byte(encoder)
        check_free_space(settings.output_prefix, needed, repair="choose another disk or make room; if the estimate "
                         "from the size of the input is wrong, add --no-space-check")
    with dataset_writers(prefixes, encoder.dtype) as writers:
        progress = Progress(sources.total_bytes, settings.log_interval)
        counts = _Counts(len(keys), encoder.vocabulary.unk_id, BadRecords(settings.on_error))
        with closing(_encoded_chunks(encoder, sources, settings.workers)) as chunks:
            for chunk in chunks:
                for writer, documents in zip(writers, counts.take(chunk, settings.drop_duplicates), strict=True):
                    writer.add_documents(documents.tokens, documents.lengths, documents.sentences_per_document)
                progress.report(writers[0].num_documents, text_bytes=chunk.size, bytes_read=chunk.bytes_read)
        _check_not_empty(writers, settings)
        metadata = [_metadata(settings, encoder, writer, number, counts) for number, writer in enumerate(writers)]
        publish(writers, metadata)
    return [PreprocessedDataset(*dataset) for dataset in zip(prefixes, metadata, strict=True)]


def _bytes_per_text_byte(encoder: DocumentEncoder) -> float:
    """Bytes written, of all files, for a byte of English prose."""
    return _TOKENS_PER_TEXT_BYTE * encoder.dtype.itemsize + _INDEX_BYTES_PER_TEXT_BYTE


class _Counts:
    """What is counted while chunks pass by."""

    def __init__(self, num_keys: int, unk_id: int, bad_records: BadRecords) -> None:
        self.bad_records = bad_records
        self._unk_id = unk_id
        self.documents_of_two_sentences = [0] * num_keys
        self.unknown_tokens = [0] * num_keys
        self.duplicates = 0
        self._seen = SeenDocuments()

    def take(self, chunk: EncodedChunk, drop_duplicates: bool) -> list[EncodedDocuments]:
        """The documents to write for each key; raises DataError at a record that stops the work."""
        for record in chunk.bad_records:
            self.bad_records.add(record)
        is_duplicate = self._seen.add(chunk.hashes)
        self.duplicates += int(np.count_nonzero(is_duplicate))
        kept = list(chunk.of_keys)
        if drop_duplicates and is_duplicate.any():
            kept = [documents.only(~is_duplicate) for documents in kept]
        for number, documents in enumerate(kept):
            self.documents_of_two_sentences[number] += int(np.count_nonzero(documents.sentences_per_document >= 2))
            self.unknown_tokens[number] += int(np.count_nonzero(documents.tokens == self._unk_id))
        return kept


def _encoded_chunks(encoder: DocumentEncoder, sources: TextSources,
                    workers: int) -> Generator[EncodedChunk, None, None]:
    """The encoded chunks in the order of the input."""
    source_chunks = sources.chunks(encoder.settings.json_keys)
    if workers == 1:
        yield from map(encoder.encode, source_chunks)
        return
    in_flight = deque[tuple[Chunk, Future[EncodedChunk]]]()
    try:
        with worker_pool(workers) as pool:
            for chunk in source_chunks:
                in_flight.append((chunk, pool.submit(_encode_in_worker, encoder.settings, chunk)))
                if len(in_flight) == workers * _CHUNKS_PER_WORKER:
                    yield in_flight[0][1].result()
                    in_flight.popleft()
            while in_flight:
                yield in_flight[0][1].result()
                in_flight.popleft()
    except BrokenProcessPool:
        place = in_flight[0][0].location if in_flight else " ".join(sources.paths)
        raise DataError.of("--input", place, "a worker process died while it worked on this place "
                           "or on what follows (killed, perhaps for want of memory)", "use fewer --workers") from None


def _encode_in_worker(settings: EncoderSettings, chunk: Chunk) -> EncodedChunk:
    return _worker_encoder(settings).encode(chunk)


@cache
def _worker_encoder(settings: EncoderSettings) -> DocumentEncoder:
    """One encoder for the life of the process, since it remembers words."""
    return DocumentEncoder(settings)


def _check_not_empty(writers: Sequence[IndexedDatasetWriter], settings: PreprocessSettings) -> None:
    for writer, key in zip(writers, settings.encoder.json_keys, strict=True):
        if not writer.num_sentences:
            raise DataError.of("--input", " ".join(settings.inputs), f'no text in "{key}" of {writer.num_documents} '
                               "documents", "give a text that is not empty")


def _metadata(settings: PreprocessSettings, encoder: DocumentEncoder, writer: IndexedDatasetWriter, number: int,
              counts: _Counts) -> DatasetMetadata:
    """Metadata of the dataset of JSON key `number`."""
    return DatasetMetadata(
        vocab_file=settings.encoder.vocab_file,
        vocab_size=len(encoder.vocabulary),
        vocab_sha256=encoder.vocabulary.sha256,
        tokenizer_type=settings.encoder.tokenizer_type,
        max_word_length=settings.encoder.max_word_length,
        sentence_splitter=encoder.splitter.name if encoder.splitter else None,
        sentence_splitter_version=encoder.splitter.version if encoder.splitter else "",
        document_end_token=encoder.vocabulary.document_end if settings.encoder.append_eod else None,
        inputs=settings.inputs,
        json_key=settings.encoder.json_keys[number],
        documents=writer.num_documents,
        documents_of_two_sentences=counts.documents_of_two_sentences[number],
        sentences=writer.num_sentences,
        tokens=writer.num_tokens,
        unknown_tokens=counts.unknown_tokens[number],
        skipped_records=counts.bad_records.count,
        replaced_records=counts.bad_records.replaced,
        duplicate_documents=counts.duplicates,
        duplicates_dropped=settings.drop_duplicates,
    )
