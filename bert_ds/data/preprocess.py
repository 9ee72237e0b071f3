"""From raw text to indexed datasets: read, split into sentences, tokenise, write.

The output is the same for any number of worker processes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bert_ds.data.dataset_metadata import DatasetMetadata, metadata_path
from bert_ds.data.indexed_dataset import IndexedDatasetWriter
from bert_ds.data.sentences import SentenceSplitter, SplittingError, sentence_splitter
from bert_ds.data.text_sources import BadRecord, BadRecords, Chunk, Document, TextSources
from bert_ds.data.tokenizer import MAX_WORD_LENGTH, WordPieceTokenizer
from bert_ds.data.vocabulary import SEP, Vocabulary
from bert_ds.data.worker_pool import worker_pool
from bert_ds.errors import ConfigError, DataError, Problem, raise_if_any

_CHUNKS_PER_WORKER = 3
_SECONDS_BETWEEN_REPORTS = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """What determines the tokens of a document."""

    vocab_file: str
    tokenizer_type: str = "BertWordPieceLowerCase"
    max_word_length: int = MAX_WORD_LENGTH
    sentence_splitter: str | None = "sentencex"
    """None keeps each document as one sequence."""
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    """Close every document with [SEP], as a part of its last sentence."""


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """One run of the preprocessing."""

    inputs: tuple[str, ...]
    output_prefix: str
    encoder: EncoderSettings
    input_format: str = "auto"
    workers: int = 1
    on_error: str = "stop"
    log_interval: int = 1000
    """Documents between two progress lines, of which there is at most one every five seconds."""

    def problems(self) -> Iterator[Problem]:
        if self.workers < 1:
            yield Problem("--workers", self.workers, "must be at least 1", "use the number of processor cores")
        if self.log_interval < 1:
            yield Problem("--log-interval", self.log_interval, "must be at least 1", "use 1000")
        if self.encoder.max_word_length < 1:
            yield Problem("--max-word-length", self.encoder.max_word_length, "must be at least 1", "use 100")
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


@dataclass(frozen=True)
class EncodedDocuments:
    """The documents of one chunk and key, as the writer takes them."""

    tokens: NDArray[np.integer]
    """[tokens], all sentences back to back."""
    lengths: NDArray[np.int32]
    """[sentences], tokens of each."""
    sentences_per_document: NDArray[np.int32]
    """[documents]"""
    unknown_tokens: int


@dataclass(frozen=True)
class EncodedChunk:
    """What a worker hands back for one chunk."""

    of_keys: tuple[EncodedDocuments, ...]
    bad_records: tuple[BadRecord, ...]
    size: int
    """Bytes of text."""
    bytes_read: int
    """Bytes of all files, as stored, up to the end of the chunk."""


def preprocess(settings: PreprocessSettings) -> list[PreprocessedDataset]:
    """Writes one dataset with its metadata for each JSON key.

    Memory does not depend on the size of the corpus. An error anywhere (DataError, ConfigError) leaves no file that
    looks finished.
    """
    raise_if_any(ConfigError, settings.problems())
    encoder = DocumentEncoder(settings.encoder)
    sources = TextSources(settings.inputs, settings.input_format)
    bad_records = BadRecords(settings.on_error)
    progress = _Progress(sources.total_bytes, settings.log_interval)
    counts = [_Counts() for _ in settings.encoder.json_keys]
    prefixes = [settings.prefix_of(key) for key in settings.encoder.json_keys]
    try:
        with ExitStack() as stack:
            writers = [stack.enter_context(IndexedDatasetWriter(prefix, encoder.dtype)) for prefix in prefixes]
            for chunk in stack.enter_context(closing(_encoded_chunks(encoder, sources, settings.workers))):
                for record in chunk.bad_records:
                    bad_records.add(record)
                for writer, documents, count in zip(writers, chunk.of_keys, counts, strict=True):
                    writer.add_documents(documents.tokens, documents.lengths, documents.sentences_per_document)
                    count.add(documents)
                progress.report(writers[0].num_documents, chunk)
            _check_not_empty(writers, settings)
            for prefix in prefixes:
                metadata_path(prefix).unlink(missing_ok=True)
        datasets = [
            PreprocessedDataset(writer.prefix, _metadata(settings, encoder, key, writer, count, bad_records.count))
            for writer, key, count in zip(writers, settings.encoder.json_keys, counts, strict=True)
        ]
        for dataset in datasets:
            dataset.metadata.write(dataset.prefix)
    except OSError as error:
        raise DataError.of("--output-prefix", settings.output_prefix, f"cannot be written ({error.strerror or error})",
                           "choose a folder that you may write to, on a disk with enough space") from error
    return datasets


class DocumentEncoder:
    """Turns chunks of text into tokens."""

    def __init__(self, settings: EncoderSettings) -> None:
        self.settings = settings
        self.vocabulary = Vocabulary.from_file(settings.vocab_file)
        self.splitter: SentenceSplitter | None = None
        if settings.sentence_splitter is not None:
            self.splitter = sentence_splitter(settings.sentence_splitter)
        self._tokenizer = WordPieceTokenizer(self.vocabulary, settings.tokenizer_type,
                                             max_word_length=settings.max_word_length)
        self.dtype = self._tokenizer.dtype
        self._document_end = np.array([self.vocabulary.sep_id], self.dtype).tobytes()

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """Tokens of all documents of the chunk, and the records that cannot be used."""
        bad_records = list[BadRecord]()
        of_keys = [list[list[bytes]]() for _ in self.settings.json_keys]
        for document in chunk.documents(self.settings.json_keys):
            encoded = document if isinstance(document, BadRecord) else self._encoded_texts(document)
            if isinstance(encoded, BadRecord):
                bad_records.append(encoded)
                continue
            for documents, sentences in zip(of_keys, encoded, strict=True):
                documents.append(sentences)
        return EncodedChunk(tuple(map(self._joined, of_keys)), tuple(bad_records), chunk.size, chunk.bytes_read)

    def _encoded_texts(self, document: Document) -> list[list[bytes]] | BadRecord:
        try:
            return [self._encoded_sentences(text) for text in document.texts]
        except SplittingError as error:
            return BadRecord(document.location, str(error), "use another --sentence-splitter")

    def _encoded_sentences(self, text: str) -> list[bytes]:
        """Tokens of each sentence; sentences without a token are left out."""
        sentences = self.splitter(text) if self.splitter else [text]
        encoded = [tokens for tokens in map(self._tokenizer.encode_bytes, sentences) if tokens]
        if self.settings.append_eod and encoded:
            encoded[-1] += self._document_end
        return encoded

    def _joined(self, documents: Sequence[list[bytes]]) -> EncodedDocuments:
        sentences = [tokens for document in documents for tokens in document]
        tokens = np.frombuffer(b"".join(sentences), self.dtype)
        return EncodedDocuments(
            tokens=tokens,
            lengths=np.array(list(map(len, sentences)), np.int32) // self.dtype.itemsize,
            sentences_per_document=np.array(list(map(len, documents)), np.int32),
            unknown_tokens=int(np.count_nonzero(tokens == self.vocabulary.unk_id)),
        )


@dataclass
class _Counts:
    documents_of_two_sentences: int = 0
    unknown_tokens: int = 0

    def add(self, documents: EncodedDocuments) -> None:
        self.documents_of_two_sentences += int(np.count_nonzero(documents.sentences_per_document >= 2))
        self.unknown_tokens += documents.unknown_tokens


def _encoded_chunks(encoder: DocumentEncoder, sources: TextSources,
                    workers: int) -> Generator[EncodedChunk, None, None]:
    """The encoded chunks in the order of the input."""
    if workers == 1:
        yield from map(encoder.encode, sources.chunks())
        return
    in_flight = deque[tuple[Chunk, Future[EncodedChunk]]]()
    try:
        with worker_pool(workers) as pool:
            for chunk in sources.chunks():
                in_flight.append((chunk, pool.submit(_encode_in_worker, encoder.settings, chunk)))
                if len(in_flight) == workers * _CHUNKS_PER_WORKER:
                    yield in_flight[0][1].result()
                    in_flight.popleft()
            while in_flight:
                yield in_flight[0][1].result()
                in_flight.popleft()
    except BrokenProcessPool:
        raise DataError.of("--input", in_flight[0][0].location, "a worker process died while it worked on this place "
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


def _metadata(settings: PreprocessSettings, encoder: DocumentEncoder, key: str, writer: IndexedDatasetWriter,
              counts: _Counts, skipped_records: int) -> DatasetMetadata:
    return DatasetMetadata(
        vocab_file=settings.encoder.vocab_file,
        vocab_size=len(encoder.vocabulary),
        vocab_sha256=encoder.vocabulary.sha256,
        tokenizer_type=settings.encoder.tokenizer_type,
        max_word_length=settings.encoder.max_word_length,
        sentence_splitter=encoder.splitter.name if encoder.splitter else None,
        sentence_splitter_version=encoder.splitter.version if encoder.splitter else "",
        document_end_token=SEP if settings.encoder.append_eod else None,
        inputs=settings.inputs,
        json_key=key,
        documents=writer.num_documents,
        documents_of_two_sentences=counts.documents_of_two_sentences,
        sentences=writer.num_sentences,
        tokens=writer.num_tokens,
        unknown_tokens=counts.unknown_tokens,
        skipped_records=skipped_records,
    )


class _Progress:
    """Lines that tell how fast the work goes and how long it will take."""

    def __init__(self, total_bytes: int, log_interval: int) -> None:
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._start = self._reported_at = time.monotonic()
        self._text_bytes = 0
        self._reported_documents = 0

    def report(self, documents: int, chunk: EncodedChunk) -> None:
        """Takes note of a chunk; logs when enough documents and seconds have passed since the last line."""
        self._text_bytes += chunk.size
        moment = time.monotonic()
        if (documents - self._reported_documents < self._log_interval
                or moment - self._reported_at < _SECONDS_BETWEEN_REPORTS):
            return
        seconds = moment - self._start
        seconds_left = seconds * (self._total_bytes - chunk.bytes_read) / max(chunk.bytes_read, 1)
        logger.info("%s documents, %.0f MB of text, %.1f MB/s, %.0f %% read, %s left", f"{documents:,}",
                    self._text_bytes / 1e6, self._text_bytes / 1e6 / seconds,
                    100 * chunk.bytes_read / max(self._total_bytes, 1), _duration(seconds_left))
        self._reported_at, self._reported_documents = moment, documents


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
