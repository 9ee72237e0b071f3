import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_ds.config.data import DataConfig
from bert_ds.data.bert_dataset import BertDataset, Datasets, build_datasets
from bert_ds.data.blending import BlendedDataset
from bert_ds.data.dataset_metadata import DatasetMetadata
from bert_ds.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import DataError
from tests.data.reference_samples import random_corpus, word_piece_vocabulary

VOCABULARY = word_piece_vocabulary(100, 40)


def write_corpus(prefix: str, *, seed: int = 0, dtype: type[np.generic] = np.uint16, num_documents: int = 60,
                 max_sentences: int = 9) -> str:
    boundaries, lengths, tokens = random_corpus(seed, len(VOCABULARY), num_documents=num_documents,
                                                max_sentences=max_sentences, max_length=20)
    with IndexedDatasetWriter(prefix, dtype) as writer:
        writer.add_documents(tokens, lengths, np.diff(boundaries))
    return prefix


def datasets_of(*data_path: str, cache: Path | None = None, split: str = "8,1,1", seed: int = 1234,
                binary_head: bool = True, vocabulary=VOCABULARY, settings: dict[str, Any] | None = None,
                **num_samples: int) -> Datasets:
    config = DataConfig(data_path=data_path, split=split, data_cache_path=None if cache is None else str(cache),
                        **settings or {})
    return build_datasets(config, seq_length=64, binary_head=binary_head, seed=seed, vocabulary=vocabulary,
                          num_samples=num_samples or {"train": 100})


def test_each_split_draws_from_its_own_documents(tmp_path: Path) -> None:
    datasets = datasets_of(write_corpus(str(tmp_path / "a")), train=200, valid=30)
    assert datasets.test is None
    assert isinstance(datasets.train, BertDataset)
    assert isinstance(datasets.valid, BertDataset)
    assert len(datasets.train) >= 200
    assert len(datasets.valid) >= 30
    boundary = datasets.train.corpus.document_indices[48]
    assert datasets.train.mapping[:, 1].max() <= boundary <= datasets.valid.mapping[:, 0].min()
    batch = datasets.train.build_batch(np.array([199, 0]))
    assert batch.input_ids.shape == (2, 64)
    again = datasets.train.build_batch(np.array([0]))
    assert all((one[1] == other[0]).all() for one, other in zip(batch, again, strict=True))
    with pytest.raises(IndexError, match="sample -1"):
        datasets.train.build_batch(np.array([-1]))


def test_token_type_of_the_file_does_not_matter(tmp_path: Path) -> None:
    batches = [datasets_of(write_corpus(str(tmp_path / dtype.__name__), dtype=dtype)).train.build_batch(np.arange(100))
               for dtype in (np.uint16, np.int32)]
    assert all((one == other).all() for one, other in zip(*batches, strict=True))


def test_the_cache_follows_all_that_the_mapping_depends_on(tmp_path: Path) -> None:
    prefix, cache = write_corpus(str(tmp_path / "a")), tmp_path / "cache"

    def files() -> set[str]:
        return {path.name for path in cache.glob("*.npy")}

    reference = datasets_of(prefix).train.build_batch(np.arange(100))
    assert len(files()) == 1
    before = files()
    for change in ({"train": 101}, {"seed": 1}, {"binary_head": False}, {"split": "1"}):
        datasets_of(prefix, **change)
        assert len(files() - before) == 1, change
        before = files()
    datasets_of(prefix)
    assert files() == before
    write_corpus(prefix, seed=1)
    changed = datasets_of(prefix).train.build_batch(np.arange(100))
    assert len(files()) == len(before) + 1
    assert (changed.input_ids != reference.input_ids).any()
    datasets_of(prefix, cache=tmp_path / "elsewhere")
    assert list((tmp_path / "elsewhere").glob("*.npy"))


@pytest.mark.parametrize("weights", [None, (3, 1)])
def test_blends_have_the_wanted_size(tmp_path: Path, weights: tuple[int, int] | None) -> None:
    prefixes = [write_corpus(str(tmp_path / "a")), write_corpus(str(tmp_path / "b"), seed=1, num_documents=180)]
    words = prefixes if weights is None else [str(weights[0]), prefixes[0], str(weights[1]), prefixes[1]]
    blend = datasets_of(*words, train=400).train
    assert isinstance(blend, BlendedDataset)
    assert 400 <= len(blend) <= 402
    shares = np.bincount(blend.order["dataset"]) / len(blend)
    # Without weights each corpus gives in proportion to its tokens.
    tokens = [dataset.corpus.sequence_lengths[:dataset.mapping[:, 1].max()].sum() for dataset in blend.datasets]
    expected = np.array(weights or tokens) / sum(weights or tokens)
    assert np.allclose(shares, expected, atol=0.01)
    batch = blend.build_batch(np.arange(8))
    inner = blend.datasets[1].build_batch(np.array([0]))
    assert (batch.input_ids[blend.order["dataset"][:8].argmax()] == inner.input_ids[0]).all()


def test_unusable_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_corpus(str(tmp_path / "a"))
    with pytest.raises(DataError, match="leaves none of the 60 documents"):
        datasets_of(prefix, split="1,0,0", valid=1)
    with pytest.raises(DataError, match=r"--data-path=.*a: holds the token id 1[0-3]\d but the vocabulary has 100 ent"):
        datasets_of(prefix, vocabulary=word_piece_vocabulary(100, 0))
    # A sample of the tokens need not hold one that is unknown.
    monkeypatch.setattr(IndexedDataset, "sampled_tokens", lambda corpus: corpus.tokens[:0])
    with pytest.raises(DataError, match=r"sample \d+ holds the token id 1[0-3]\d but the vocabulary has 100 entries"):
        datasets_of(prefix, vocabulary=word_piece_vocabulary(100, 0)).train.build_batch(np.arange(100))
    single = write_corpus(str(tmp_path / "single"), max_sentences=1)
    with pytest.raises(DataError, match="no document can serve"):
        datasets_of(single)
    assert len(datasets_of(single, binary_head=False).train) >= 100


def test_an_index_that_is_wrong_inside_is_found_when_the_mapping_is_built(tmp_path: Path) -> None:
    prefix = write_corpus(str(tmp_path / "a"))
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(34 + 4 * 20)
        file.write(np.int32(-5).tobytes())
    with pytest.raises(DataError, match="entry of sentence 20"):
        datasets_of(prefix)
    assert not list(tmp_path.glob("cache/*.npy"))


def test_splits_with_data_of_their_own_read_all_of_it(tmp_path: Path) -> None:
    a, b, c = (write_corpus(str(tmp_path / name), seed=seed) for seed, name in enumerate("abc"))
    own = {"train_data_path": ("3", a, "1", b), "valid_data_path": ("5", c)}
    datasets = datasets_of(settings=own, train=400, valid=300, test=50)
    assert isinstance(datasets.train, BlendedDataset)
    assert isinstance(datasets.valid, BertDataset), "the weight of a single prefix says nothing"
    assert datasets.valid.corpus.prefix == c
    assert datasets.valid.mapping[:, 1].max() > 0.95 * len(datasets.valid.corpus)
    assert datasets.test is None
    with pytest.raises(DataError, match=r"--valid-data-path=none: valid has no data"):
        datasets_of(settings={"train_data_path": (a,)}, train=10, valid=10)
    assert datasets_of(a, split="9,1,0", train=10, valid=10, test=10).test is None


def test_all_that_is_wrong_with_a_blend_is_told_at_once(tmp_path: Path) -> None:
    a = write_corpus(str(tmp_path / "a"))
    wide = write_corpus(str(tmp_path / "wide"), dtype=np.int32)
    with pytest.raises(DataError) as caught:
        datasets_of("1", a, "2", str(tmp_path / "gone"), "3", wide, "4", str(tmp_path / "gone"))
    told = [str(problem) for problem in caught.value.problems]
    assert len(told) == 2
    assert f"gone: there is no file {tmp_path}/gone.idx" in told[0]
    assert f"wide: holds int32 and {a} uint16: they were made with vocabularies of different sizes" in told[1]


def test_corpora_of_different_vocabularies_are_not_blended(tmp_path: Path) -> None:
    metadata = dict.fromkeys((field.name for field in fields(DatasetMetadata)), 0) | {
        "vocab_file": "other.txt", "vocab_sha256": "f" * 64, "tokenizer_type": "BertWordPieceLowerCase", "inputs": []}
    a, b = write_corpus(str(tmp_path / "a")), write_corpus(str(tmp_path / "b"), seed=1)
    Path(f"{b}.json").write_text(json.dumps(metadata))
    with pytest.raises(DataError, match=r"is not the vocabulary of the data, which were made with other\.txt"):
        datasets_of(a, b)
    Path(f"{b}.json").write_text(json.dumps(metadata | {"vocab_sha256": "", "document_end_token": "[EOS]"}))
    with pytest.raises(DataError, match=r"--vocab-extra-bos-eos=False: documents of .*b end with \[EOS\]"):
        datasets_of(a, b)


def test_documents_that_end_with_eos_are_read(tmp_path: Path) -> None:
    vocab_file = tmp_path / "vocab.txt"
    vocab_file.write_text("".join(f"{token}\n" for token in VOCABULARY.tokens))
    extended = Vocabulary.from_file(str(vocab_file), extra_bos_eos=True)
    eos = len(extended) - 1
    with IndexedDatasetWriter(str(tmp_path / "a"), np.uint16) as writer:
        for _ in range(20):
            writer.add_document(np.array([10, 11, 12, eos]), [2, 2])
    with pytest.raises(DataError, match=r"token id 141 .*or --vocab-extra-bos-eos if Megatron-LM made them"):
        datasets_of(str(tmp_path / "a"), vocabulary=VOCABULARY).train.build_batch(np.arange(100))
    batch = datasets_of(str(tmp_path / "a"), vocabulary=extended,
                        settings={"vocab_extra_bos_eos": True}).train.build_batch(np.arange(100))
    assert (batch.input_ids == eos).any()


def test_files_that_vanish_while_they_are_read_do_no_harm(tmp_path: Path) -> None:
    prefix = write_corpus(str(tmp_path / "a"))
    train = datasets_of(prefix).train
    before = train.build_batch(np.arange(100))
    for path in (*tmp_path.glob("a.*"), *tmp_path.glob("cache/*")):
        path.unlink()
    assert all((one == other).all() for one, other in zip(before, train.build_batch(np.arange(100)), strict=True))
    with pytest.raises(DataError, match="there is no file"):
        datasets_of(prefix)
