"""How fast the data layer works, beside megatron-core and `tokenizers` where they are installed.

Each measurement is a pair of calls that do the same work on the same data, one after the other in every round, so that
both meet the same load of the machine. CPU seconds are those of all threads of this process.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bert_ds.config.data import DataConfig
from bert_ds.data.bert_dataset import BertDataset, build_datasets
from bert_ds.data.document_encoder import EncoderSettings
from bert_ds.data.indexed_dataset import IndexedDatasetWriter, dtype_for_vocab
from bert_ds.data.loader import WindowLoader
from bert_ds.data.preprocess import PreprocessSettings, preprocess
from bert_ds.data.sample_mapping import MappingSettings, build_mapping
from bert_ds.data.sentences import sentence_splitter
from bert_ds.data.text_sources import BadRecords, TextSources
from bert_ds.data.tokenizer import WordPieceTokenizer, word_piece
from bert_ds.data.vocabulary import SPECIAL_TOKENS, Vocabulary

_SEED = 1234
_SYNTHETIC = "synthetic"
_ROWS_AT_ONCE = 64
_SENTENCES_A_DOCUMENT = 20
_MEAN_TOKENS = 25
_CONSUMED_ROWS_A_SECOND = 500
_WINDOW_ROWS = 50
_LOADER_THREADS = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is measured, and how often."""

    text: str
    """JSON lines or plain text."""
    vocab_file: str
    folder: Path
    """Scratch files."""
    rounds: int
    mapping_sentences: int
    written_sentences: int
    consumed_seconds: float
    """How long the loader is watched."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One rate, of us and of a peer; [rounds] each, empty where the peer is not installed."""

    name: str
    unit: str
    ours: tuple[float, ...]
    peer_name: str = ""
    peer: tuple[float, ...] = ()
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return median(self.ours) / median(self.peer) if self.peer else None


Work = Callable[[], float]
"""Does some work and returns how much."""


def measure_all(settings: BenchSettings) -> Iterator[Measurement]:
    """All measurements, one after the other."""
    vocabulary = Vocabulary.from_file(settings.vocab_file)
    prefix = _preprocessed(settings, workers=1)
    megatron = _megatron()
    for corpus, seq_length in ((prefix, 128), (prefix, 512), (_synthetic_corpus(settings, vocabulary), 512)):
        yield _samples(settings, corpus, vocabulary, megatron, seq_length)
    yield _mapping(settings, megatron)
    yield _index_writing(settings, megatron)
    yield from _tokenising(settings, vocabulary)
    yield _text_to_data(settings)
    yield _loader_wait(settings, prefix, vocabulary)


def _rate(work: Work, clock: Callable[[], float]) -> float:
    start = clock()
    amount = work()
    return amount / (clock() - start)


def _side_by_side(settings: BenchSettings, ours: Work, peer: Work | None, *,
                  clock: Callable[[], float] = time.process_time) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Rates of both in alternation, after a round that is not counted (compilation, caches of the disk)."""
    ours()
    rates = [(_rate(ours, clock), _rate(peer, clock) if peer else 0.0) for _ in range(settings.rounds)]
    return tuple(rate for rate, _ in rates), tuple(rate for _, rate in rates) if peer else ()


def _preprocessed(settings: BenchSettings, *, workers: int) -> str:
    (dataset,) = preprocess(PreprocessSettings(
        inputs=(settings.text,), output_prefix=str(settings.folder / f"corpus{workers}"), workers=workers,
        encoder=EncoderSettings(vocab_file=settings.vocab_file)))
    return dataset.prefix


def _dataset(settings: BenchSettings, prefix: str, vocabulary: Vocabulary, seq_length: int, rows: int) -> BertDataset:
    data = DataConfig(data_path=(prefix,), split="100", data_cache_path=str(settings.folder / "cache"))
    dataset = build_datasets(data, seq_length=seq_length, binary_head=True, seed=_SEED, vocabulary=vocabulary,
                             num_samples={"train": rows}).train
    assert isinstance(dataset, BertDataset), "one corpus, not packed"
    return dataset


def _samples(settings: BenchSettings, prefix: str, vocabulary: Vocabulary, megatron: SimpleNamespace | None,
             seq_length: int) -> Measurement:
    dataset = _dataset(settings, prefix, vocabulary, seq_length, 1)

    def ours() -> float:
        rows = 32 * _ROWS_AT_ONCE
        for first in range(0, rows, _ROWS_AT_ONCE):
            dataset.build_batch(np.arange(first, first + _ROWS_AT_ONCE) % len(dataset))
        return rows

    peer = None
    if megatron is not None:
        theirs = _megatron_dataset(megatron, settings, prefix, vocabulary, seq_length)

        def peer() -> float:
            rows = 200
            for index in range(rows):
                theirs[index % len(theirs)]
            return rows

    rates, peers = _side_by_side(settings, ours, peer)
    tokens = np.count_nonzero(dataset.build_batch(np.arange(min(len(dataset), 1000))).segment_ids, axis=1).mean()
    kind = "synthetic documents" if Path(prefix).name == _SYNTHETIC else "the text"
    return Measurement(name=f"samples built, sequence length {seq_length}, {kind}", unit="samples / CPU-second",
                       ours=rates, peer_name="megatron-core", peer=peers, note=f"rows hold {tokens:.0f} tokens on "
                       f"average; batches of {_ROWS_AT_ONCE}, megatron-core sample by sample")


def _corpus_like_wikipedia(sentences: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Document boundaries and sentence lengths."""
    lengths = np.random.default_rng(_SEED).integers(1, 2 * _MEAN_TOKENS, sentences, np.int32)
    return np.arange(0, sentences + 1, _SENTENCES_A_DOCUMENT, dtype=np.int64), lengths


def _synthetic_corpus(settings: BenchSettings, vocabulary: Vocabulary) -> str:
    """Prefix of a dataset of random tokens in documents about as long as Wikipedia's."""
    boundaries, lengths = _corpus_like_wikipedia(50_000)
    prefix = str(settings.folder / _SYNTHETIC)
    with IndexedDatasetWriter(prefix, dtype_for_vocab(len(vocabulary))) as writer:
        tokens = np.random.default_rng(_SEED).integers(len(SPECIAL_TOKENS), len(vocabulary), lengths.sum())
        writer.add_documents(tokens, lengths, np.diff(boundaries))
    return prefix


def _mapping(settings: BenchSettings, megatron: SimpleNamespace | None) -> Measurement:
    boundaries, lengths = _corpus_like_wikipedia(settings.mapping_sentences)
    mapping = MappingSettings(num_samples=1, max_tokens=509, short_seq_prob=0.1, seed=_SEED, min_sentences=2)

    def ours() -> float:
        build_mapping(boundaries, lengths, mapping, source="synthetic")
        return len(lengths) / 1e6

    peer = None
    if megatron is not None:
        def peer() -> float:
            megatron.helpers.build_mapping(boundaries, lengths, 1, np.iinfo(np.int64).max - 1, mapping.max_tokens,
                                           mapping.short_seq_prob, _SEED, False, mapping.min_sentences)
            return len(lengths) / 1e6

    rates, peers = _side_by_side(settings, ours, peer)
    return Measurement(
        name="sample mapping of one epoch, shuffled", unit="million sentences / CPU-second", ours=rates,
        peer_name="megatron-core (C++)", peer=peers,
        note=f"{settings.mapping_sentences / 1e6:g} million sentences, {_SENTENCES_A_DOCUMENT} a document, mean "
             f"{_MEAN_TOKENS} tokens")


def _index_writing(settings: BenchSettings, megatron: SimpleNamespace | None) -> Measurement:
    boundaries, lengths = _corpus_like_wikipedia(settings.written_sentences)
    tokens = np.zeros(int(lengths.sum(dtype=np.int64)), np.uint16)
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[boundaries].tolist()
    documents = np.diff(boundaries)

    def ours() -> float:
        with IndexedDatasetWriter(str(settings.folder / "ours"), np.uint16) as writer:
            step = 1000
            for first in range(0, len(documents), step):
                end = min(first + step, len(documents))
                writer.add_documents(tokens[starts[first]:starts[end]], lengths[boundaries[first]:boundaries[end]],
                                     documents[first:end])
        return len(lengths) / 1e6

    peer = None
    if megatron is not None:
        def peer() -> float:
            few = min(len(documents), 5000)
            builder = megatron.files.IndexedDatasetBuilder(str(settings.folder / "theirs.bin"), dtype=np.uint16)
            for document in range(few):
                sizes = lengths[boundaries[document]:boundaries[document + 1]].tolist()
                builder.add_document(torch.from_numpy(tokens[starts[document]:starts[document + 1]]), sizes)
            builder.finalize(str(settings.folder / "theirs.idx"))
            return float(boundaries[few]) / 1e6

    rates, peers = _side_by_side(settings, ours, peer)
    return Measurement(name="writing .bin and .idx", unit="million sentences / CPU-second", ours=rates,
                       peer_name="megatron-core", peer=peers,
                       note=f"{settings.written_sentences / 1e6:g} million sentences of mean {_MEAN_TOKENS} tokens, "
                            "chunks of 1,000 documents, synced to disk; megatron-core document by document, the "
                            "first 5,000")


def _tokenising(settings: BenchSettings, vocabulary: Vocabulary) -> Iterator[Measurement]:
    split = sentence_splitter("sentencex")
    documents = TextSources([settings.text]).documents(["text"], BadRecords("stop"))
    sentences = [sentence for document in documents for sentence in split(document.texts[0])]
    megabytes = sum(len(sentence.encode()) for sentence in sentences) / 1e6
    warm = WordPieceTokenizer(vocabulary)
    library = word_piece(vocabulary, "BertWordPieceLowerCase", 100)

    def encode_all(tokenizer: WordPieceTokenizer) -> float:
        for sentence in sentences:
            tokenizer.encode_bytes(sentence)
        return megabytes

    def cold() -> float:
        return encode_all(WordPieceTokenizer(vocabulary))

    def peer() -> float:
        return _encode_in_batches(library, sentences, megabytes)

    for name, ours, note in (("cold", cold, "a new tokenizer, loaded within the time"),
                             ("warm", lambda: encode_all(warm), "words are remembered from a first pass")):
        rates, peers = _side_by_side(settings, ours, peer)
        yield Measurement(name=f"tokenising sentences, {name}", unit="MB / CPU-second", ours=rates,
                          peer_name="tokenizers.encode_batch_fast", peer=peers,
                          note=f"{megabytes:.1f} MB of sentences; {note}")


def _encode_in_batches(library: Tokenizer, sentences: list[str], megabytes: float) -> float:
    for first in range(0, len(sentences), 1000):
        for encoding in library.encode_batch_fast(sentences[first:first + 1000], add_special_tokens=False):
            encoding.ids  # noqa: B018 - the ids are what is wanted
    return megabytes


def _text_to_data(settings: BenchSettings) -> Measurement:
    megabytes = os.stat(settings.text).st_size / 1e6

    def ours() -> float:
        _preprocessed(settings, workers=1)
        return megabytes

    rates, _ = _side_by_side(settings, ours, None)
    return Measurement(name="text to .bin/.idx, one process", unit="MB / CPU-second", ours=rates,
                       note=f"{megabytes:.1f} MB: reading, splitting into sentences, tokenising, duplicates, writing; "
                            "vocabulary and tokenizer are loaded anew every time")


def _loader_wait(settings: BenchSettings, prefix: str, vocabulary: Vocabulary) -> Measurement:
    windows = round(settings.consumed_seconds * _CONSUMED_ROWS_A_SECOND / _WINDOW_ROWS)
    dataset = _dataset(settings, prefix, vocabulary, 512, windows * _WINDOW_ROWS)
    shares = []
    for _ in range(settings.rounds):
        with WindowLoader(dataset, first_sample=0, num_samples=windows * _WINDOW_ROWS, micro_batch_size=_WINDOW_ROWS,
                          accumulation=1, dp_rank=0, dp_size=1, num_workers=_LOADER_THREADS) as loader:
            next(loader)
            waited, start = 0.0, time.perf_counter()
            while True:
                asked = time.perf_counter()
                if next(loader, None) is None:
                    break
                waited += time.perf_counter() - asked
                time.sleep(_WINDOW_ROWS / _CONSUMED_ROWS_A_SECOND)
            shares.append(100 * waited / (time.perf_counter() - start))
    return Measurement(name="waiting for data", unit="% of the time", ours=tuple(shares),
                       note=f"a consumer of {_CONSUMED_ROWS_A_SECOND} rows of 512 tokens a second, {_LOADER_THREADS} "
                            f"loader threads, {settings.consumed_seconds:g} s a round, windows of {_WINDOW_ROWS} rows")


def _megatron() -> SimpleNamespace | None:
    """The parts of megatron-core that are measured; None where it is not installed with its compiled helpers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            root = "megatron.core.datasets"
            return SimpleNamespace(
                bert=import_module(f"{root}.bert_dataset"), files=import_module(f"{root}.indexed_dataset"),
                helpers=import_module(f"{root}.helpers_cpp"), utils=import_module(f"{root}.utils"),
                builder=import_module(f"{root}.blended_megatron_dataset_builder"))
    except ImportError as error:
        logger.warning("megatron-core is not measured: %s", error)
        return None


class _TokenizerForMegatron:
    """What megatron-core asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.inv_vocab = dict(enumerate(vocabulary.tokens))
        self.vocab_size = len(vocabulary)
        self.cls, self.sep, self.pad, self.mask = (vocabulary.cls_id, vocabulary.sep_id, vocabulary.pad_id,
                                                   vocabulary.mask_id)
        self.unique_identifiers = {"class": "bert_ds", "size": len(vocabulary)}


def _megatron_dataset(megatron: SimpleNamespace, settings: BenchSettings, prefix: str, vocabulary: Vocabulary,
                      seq_length: int) -> Any:
    config = megatron.bert.BERTMaskedWordPieceDatasetConfig(
        random_seed=_SEED, sequence_length=seq_length, path_to_cache=str(settings.folder / "megatron"),
        tokenizer=_TokenizerForMegatron(vocabulary), masking_probability=0.15, short_sequence_probability=0.1,
        masking_max_ngram=3, masking_do_full_word=True, masking_do_permutation=False, masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False, classification_head=True, split="100,0,0",
        blend=megatron.utils.get_blend_from_list([prefix]))
    with _single_process():
        builder = megatron.builder.BlendedMegatronDatasetBuilder(
            megatron.bert.BERTMaskedWordPieceDataset, [1000, None, None], lambda: True, config)
        return builder.build()[0]


@contextmanager
def _single_process() -> Iterator[None]:
    """megatron-core asks for its rank even where there are no others."""
    kept = torch.distributed.get_rank
    torch.distributed.get_rank = lambda group=None: 0
    try:
        yield
    finally:
        torch.distributed.get_rank = kept
