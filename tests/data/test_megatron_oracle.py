"""Our files and samples beside those of megatron-core 0.16.1 itself: `pip install --no-deps megatron-core==0.16.1`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bert_ds.config.data import DataConfig
from bert_ds.data.bert_dataset import BertDataset, Datasets, build_datasets
from bert_ds.data.blending import BlendedDataset
from bert_ds.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from bert_ds.data.samples import UNUSED_LABEL
from bert_ds.data.splits import SPLITS
from bert_ds.data.vocabulary import SPECIAL_TOKENS, Vocabulary

pytestmark = pytest.mark.long

SAMPLES = {"train": 700, "valid": 60, "test": 20}
SPLIT = "90,7,3"
COMPARED = 150
"""Samples of each dataset that are compared field by field; the mapping is compared as a whole."""


@pytest.fixture(scope="module")
def megatron() -> Iterator[SimpleNamespace]:
    """The parts of megatron-core that make data, for a single process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = "needs megatron-core 0.16.1: pip install --no-deps megatron-core==0.16.1"
        bert = pytest.importorskip("megatron.core.datasets.bert_dataset", reason=reason)
        pytest.importorskip("megatron.core.datasets.helpers_cpp",
                            reason="megatron-core came without its compiled helpers: install a wheel that has them")
        from megatron.core.datasets import indexed_dataset, masked_dataset  # noqa: PLC0415
        from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: PLC0415
            BlendedMegatronDatasetBuilder,
        )
        from megatron.core.datasets.utils import get_blend_from_list  # noqa: PLC0415
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "get_rank", lambda: 0)
        yield SimpleNamespace(bert=bert, files=indexed_dataset, masked=masked_dataset, blend=get_blend_from_list,
                              builder=BlendedMegatronDatasetBuilder)


@pytest.fixture(scope="module")
def vocab_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Special tokens in the places of bert-base-uncased's order of kinds: whole words, then continuations."""
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    words = [f"w{i}" for i in range(600)]
    path.write_text("".join(f"{token}\n" for token in (*SPECIAL_TOKENS, *words, *(f"##{i}" for i in range(250)))))
    return str(path)


class Tokenizer:
    """What megatron-core asks of a tokenizer; [BOS] and [EOS] appended as that of Megatron-LM 0.16 does."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.inv_vocab = dict(enumerate(vocabulary.tokens))
        self.vocab_size = len(vocabulary)
        self.cls, self.sep = vocabulary.cls_id, vocabulary.sep_id
        self.pad, self.mask = vocabulary.pad_id, vocabulary.mask_id
        if vocabulary.tokens[-1] == "[EOS]":
            self.eos = self.eod = len(vocabulary) - 1
        self.unique_identifiers = {"class": "Tokenizer", "size": len(vocabulary)}


def texts(kind: str, vocab_size: int, seed: int) -> list[list[NDArray[np.int64]]]:
    """Documents of sentences."""
    rng = np.random.default_rng(seed)

    def sentence(longest: int) -> NDArray[np.int64]:
        return rng.integers(len(SPECIAL_TOKENS), vocab_size, rng.integers(1, longest + 1))

    if kind == "prose":
        return [[sentence(50) for _ in range(rng.integers(1, 30))] for _ in range(150)]
    # Every third document empty, every fifth a single sentence; now and then a sentence of more than 512 tokens.
    sizes = [0 if i % 3 == 0 else 1 if i % 5 == 0 else int(rng.integers(2, 12)) for i in range(160)]
    return [[sentence(700 if rng.random() < 0.02 else 30) for _ in range(size)] for size in sizes]


def write(prefix: Path, documents: list[list[NDArray[np.int64]]], dtype: type[np.generic] = np.uint16) -> str:
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        for document in documents:
            writer.add_document(np.concatenate([*document, np.empty(0, np.int64)]), [len(text) for text in document])
    return str(prefix)


def their_datasets(megatron: SimpleNamespace, vocabulary: Vocabulary, cache: Path, data: DataConfig, *,
                   seq_length: int, binary_head: bool, seed: int) -> dict[str, Any]:
    """What Megatron-LM builds from the same settings."""
    if data.has_data_of_splits:
        paths = {"blend_per_split": [megatron.blend(list(getattr(data, f"{split}_data_path")) or None)
                                     for split in SPLITS]}
    else:
        paths = {"blend": megatron.blend(list(data.data_path)), "split": data.split}
    config = megatron.bert.BERTMaskedWordPieceDatasetConfig(
        random_seed=seed, sequence_length=seq_length, path_to_cache=str(cache / "theirs"),
        tokenizer=Tokenizer(vocabulary), masking_probability=data.mask_prob,
        short_sequence_probability=data.short_seq_prob, masking_max_ngram=data.masking_max_ngram,
        masking_do_full_word=data.masking_do_full_word, masking_do_permutation=data.masking_do_permutation,
        masking_use_longer_ngrams=data.masking_use_longer_ngrams,
        masking_use_geometric_distribution=data.masking_use_geometric_distribution, classification_head=binary_head,
        mid_level_dataset_surplus=data.mid_level_dataset_surplus, **paths)
    built = megatron.builder(megatron.bert.BERTMaskedWordPieceDataset, list(SAMPLES.values()), lambda: True,
                             config).build()
    return dict(zip(SPLITS, built, strict=True))


def compare(megatron: SimpleNamespace, vocab_file: str, cache: Path, *, seq_length: int, binary_head: bool,
            seed: int = 1234, **settings: Any) -> Datasets:
    """Compares all splits; returns ours."""
    data = DataConfig(vocab_file=vocab_file, data_cache_path=str(cache / "ours"), **settings)
    vocabulary = Vocabulary.from_file(vocab_file, extra_bos_eos=data.vocab_extra_bos_eos)
    ours = build_datasets(data, seq_length=seq_length, binary_head=binary_head, seed=seed, vocabulary=vocabulary,
                          num_samples=SAMPLES)
    theirs = their_datasets(megatron, vocabulary, cache, data, seq_length=seq_length, binary_head=binary_head,
                            seed=seed)
    compared = 0
    for split in SPLITS:
        mine, other = getattr(ours, split), theirs[split]
        assert len(mine) == len(other) >= SAMPLES[split]
        if isinstance(mine, BlendedDataset):
            assert (mine.order["dataset"] == other.dataset_index).all()
            assert (mine.order["sample"] == other.dataset_sample_index).all()
            for one, another in zip(mine.datasets, other.datasets, strict=True):
                assert (one.mapping == another.sample_index).all()
        else:
            assert isinstance(mine, BertDataset)
            assert mine.mapping.dtype == other.sample_index.dtype
            assert (mine.mapping == other.sample_index).all()
        indices = np.unique(np.linspace(0, len(mine) - 1, COMPARED).astype(np.int64))
        compare_samples(mine.build_batch(indices), [other[int(i)] for i in indices], vocabulary)
        compared += len(indices)
    assert compared > 200
    return ours


def compare_samples(batch: Any, samples: list[dict[str, Any]], vocabulary: Vocabulary) -> None:
    theirs = {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
    used = batch.masked_labels != UNUSED_LABEL
    rows, places = np.nonzero(used)[0], batch.masked_positions[used]
    labels = np.full(batch.input_ids.shape, -1)
    labels[rows, places] = batch.masked_labels[used]
    assert (batch.input_ids == theirs["text"]).all()
    assert (batch.token_type_ids == theirs["types"]).all()
    assert (labels == theirs["labels"]).all()
    assert ((labels >= 0) == theirs["loss_mask"]).all()
    assert (batch.truncated == theirs["truncated"]).all()
    assert (np.maximum(batch.sentence_order_labels[:, 0], 0) == theirs["is_random"]).all()
    # Theirs hides replacements that drew [PAD] from attention as well.
    drew_pad = (batch.input_ids == vocabulary.pad_id) & (labels >= 0)
    assert ((batch.segment_ids == 1) == (theirs["padding_mask"] == 1) | drew_pad).all()


@pytest.mark.proves("samples are those of megatron-core", "EXACT")
@pytest.mark.parametrize("binary_head", [True, False])
@pytest.mark.parametrize("seq_length", [128, 512])
@pytest.mark.parametrize("kind", ["prose", "odd"])
def test_samples_are_theirs(megatron: SimpleNamespace, vocab_file: str, tmp_path: Path, kind: str, seq_length: int,
                            binary_head: bool) -> None:
    prefix = write(tmp_path / kind, texts(kind, 855, seed=seq_length))
    seed = 1234 if binary_head else 2**31 - 2
    train = compare(megatron, vocab_file, tmp_path, seq_length=seq_length, binary_head=binary_head, seed=seed,
                    data_path=(prefix,), split=SPLIT).train
    assert isinstance(train, BertDataset)
    assert len(np.unique(train.mapping[:, 0])) < len(train), "one epoch shows too little"


@pytest.mark.parametrize("settings", [
    {"masking_max_ngram": 1, "mask_prob": 0.4, "short_seq_prob": 0.4},
    {"masking_max_ngram": 5, "masking_use_longer_ngrams": True},
    {"masking_use_geometric_distribution": True, "masking_max_ngram": 10, "short_seq_prob": 0},
    {"masking_do_full_word": False},
    {"masking_do_permutation": True},
    {"vocab_extra_bos_eos": True},
], ids=lambda settings: next(iter(settings)))
def test_options_are_theirs(megatron: SimpleNamespace, vocab_file: str, tmp_path: Path, settings: dict[str, Any],
                            monkeypatch: pytest.MonkeyPatch) -> None:
    if "masking_do_permutation" in settings:
        draw_from_the_samples_own_stream(megatron, monkeypatch)
    size = 857 if "vocab_extra_bos_eos" in settings else 855
    prefix = write(tmp_path / "corpus", texts("prose", size, seed=1))
    compare(megatron, vocab_file, tmp_path, seq_length=128, binary_head=True, data_path=(prefix,), split=SPLIT,
            **settings)


def draw_from_the_samples_own_stream(megatron: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repairs their permutation, which draws from numpy's global generator."""
    dataset = megatron.masked.MaskedWordPieceDataset
    original = dataset._create_masked_lm_predictions

    def repaired(self: Any, token_ids: Any, target: Any, random_state: np.random.RandomState) -> Any:
        monkeypatch.setattr(np.random, "choice", random_state.choice)
        return original(self, token_ids, target, random_state)

    monkeypatch.setattr(dataset, "_create_masked_lm_predictions", repaired)


@pytest.mark.proves("blends are those of megatron-core", "EXACT")
def test_blends_are_theirs(megatron: SimpleNamespace, vocab_file: str, tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / f"{kind}-{seed}", texts(kind, 855, seed))
               for seed, kind in enumerate(("prose", "odd", "prose")))
    for paths in (
        {"data_path": (".1", a, ".2", b, ".3", c), "split": SPLIT},
        {"data_path": ("3", a), "split": SPLIT, "mid_level_dataset_surplus": 0.3},
        {"train_data_path": ("0.7", a, "0.3", b), "valid_data_path": ("5", c), "test_data_path": (c,)},
    ):
        compare(megatron, vocab_file, tmp_path, seq_length=128, binary_head=True, **paths)


@pytest.mark.proves(".bin and .idx files are those of megatron-core", "EXACT")
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_files_are_theirs(megatron: SimpleNamespace, tmp_path: Path, dtype: type[np.generic]) -> None:
    documents = texts("odd", 855, seed=3)
    ours, theirs = write(tmp_path / "ours", documents, dtype), str(tmp_path / "theirs")
    builder = megatron.files.IndexedDatasetBuilder(f"{theirs}.bin", dtype=dtype)
    for document in documents:
        for sentence in document:
            builder.add_item(torch.from_numpy(sentence))
        builder.end_document()
    builder.finalize(f"{theirs}.idx")
    for suffix in (".bin", ".idx"):
        assert Path(ours + suffix).read_bytes() == Path(theirs + suffix).read_bytes()
    by_them, by_us = megatron.files.IndexedDataset(ours), IndexedDataset(theirs)
    by_us.verify()
    assert (by_them.document_indices == by_us.document_indices).all()
    sentences = [sentence for document in documents for sentence in document]
    assert len(by_them) == len(by_us) == len(sentences)
    for i, sentence in enumerate(sentences):
        assert (by_them[i] == sentence).all()
        assert (by_us[i] == sentence).all()
