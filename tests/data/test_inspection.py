from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bert_ds import inspect_data
from bert_ds.config.data import DataConfig
from bert_ds.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from bert_ds.data.inspection import (
    Lengths,
    corpus_statistics,
    sample_statistics,
    samples_of_an_epoch,
)
from bert_ds.data.sample_text import sample_text
from bert_ds.data.samples import SampleBatch
from bert_ds.data.vocabulary import SPECIAL_TOKENS, Vocabulary

WORDS = [f"w{number}" for number in range(200)]


@pytest.fixture
def vocab_file(tmp_path: Path) -> str:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join([*SPECIAL_TOKENS, *WORDS, "un", "##aff", "##able", "is"]) + "\n")
    return str(path)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """600 documents of 2 to 8 sentences of words; also one empty, two of one sentence, one with a long sentence."""
    generator = np.random.default_rng(3)
    path = f"{tmp_path}/corpus"
    with IndexedDatasetWriter(path, np.uint16) as writer:
        for lengths in ([], [7], [600], [5, 513, 4]):
            writer.add_document(np.full(sum(lengths), 1), lengths)
        for _ in range(600):
            sizes = generator.integers(4, 60, generator.integers(2, 9))
            writer.add_document(generator.integers(5, 205, sizes.sum()), sizes)
    return path


def test_lengths_equal_numpys() -> None:
    values = np.random.default_rng(1).integers(0, 300, 10_001).astype(np.int32)
    lengths = Lengths.of(values)
    assert lengths.mean == pytest.approx(values.mean())
    for percent in (0, 10, 50, 90, 99, 100):
        assert lengths.percentile(percent) == np.percentile(values, percent, method="inverted_cdf")
    assert lengths.summary()["max"] == values.max()


@pytest.mark.parametrize("binary_head", [True, False])
def test_corpus_counts_agree_with_the_mapping(prefix: str, vocab_file: str, binary_head: bool) -> None:
    corpus, vocabulary = IndexedDataset(prefix), Vocabulary.from_file(vocab_file)
    statistics = corpus_statistics(corpus, vocabulary, binary_head=binary_head)
    assert (statistics.documents, statistics.empty_documents, statistics.too_long_sentence) == (604, 1, 1)
    assert statistics.too_few_sentences == (2 if binary_head else 0)
    assert statistics.unknown_tokens == 7 + 600 + 522
    samples = samples_of_an_epoch(corpus, vocabulary, DataConfig(), seq_length=128, binary_head=binary_head, seed=1)
    used = np.unique(np.searchsorted(corpus.document_indices, samples.mapping[:, 0].astype(np.int64), "right"))
    assert len(used) == statistics.documents - statistics.unserving_documents
    assert statistics.document_lengths.histogram @ np.arange(len(statistics.document_lengths.histogram)) \
        == statistics.tokens


def test_masking_is_what_it_should_be(prefix: str, vocab_file: str) -> None:
    vocabulary = Vocabulary.from_file(vocab_file)
    data = DataConfig(short_seq_prob=0.0, mask_prob=0.2)
    samples = samples_of_an_epoch(IndexedDataset(prefix), vocabulary, data, seq_length=64, binary_head=True, seed=1)
    seen = sample_statistics(samples, vocabulary, seq_length=64, most_samples=10**6)
    assert seen.samples_seen == seen.samples_of_an_epoch == len(samples) > 1000
    assert seen.masked_share == pytest.approx(0.2, abs=0.015)
    assert seen.replaced_by_mask == pytest.approx(0.8, abs=0.02)
    assert seen.replaced_at_random == pytest.approx(0.1, abs=0.02)
    assert seen.kept == pytest.approx(0.1, abs=0.02)
    assert seen.swapped_share == pytest.approx(0.5, abs=0.05)
    batch = samples.build_batch(np.arange(len(samples)))
    assert seen.padding_share == pytest.approx(np.mean(batch.segment_ids == 0))
    assert 0 < seen.truncated_share == pytest.approx(batch.truncated.mean())


def test_a_sample_as_text(vocab_file: str) -> None:
    vocabulary = Vocabulary.from_file(vocab_file)
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    shown = ["[CLS]", "w1", "[MASK]", "[MASK]", "[MASK]", "is", "w2", "[SEP]", "w3", "un", "[MASK]", "##able", "[SEP]"]
    labels = {2: "un", 3: "##aff", 4: "##able", 5: "is", 6: "w9", 9: "un", 10: "##aff"}
    batch = SampleBatch.empty(1, 16, 8)
    for field, fill in zip(batch, (0, 0, 0, 0, -100, 1, True), strict=True):
        field[:] = fill
    batch.input_ids[0, :13] = [ids[token] for token in shown]
    batch.token_type_ids[0, 8:13] = 1
    batch.segment_ids[0, :13] = 1
    batch.masked_positions[0, :7] = list(labels)
    batch.masked_labels[0, :7] = [ids[token] for token in labels.values()]
    headline, segments = sample_text(batch, 0, vocabulary)
    assert headline == "13 tokens and 3 of padding, 7 to predict, segments swapped, cut short"
    assert segments == ["[CLS] w1 [unaffable→MASK] [is=] [w9→w2] [SEP]", "w3 [unaffable→un MASK ##able] [SEP]"]


def test_the_command_prints_plots_and_gives_json(tmp_path: Path, prefix: str, vocab_file: str,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [prefix, "--vocab-file", vocab_file, "--seq-length", "128", "--plot", f"{tmp_path}/plots"]
    assert inspect_data.main(arguments) == 0
    out = capsys.readouterr().out
    assert "604 documents" in out and "documents that cannot serve: 0.66%" in out
    assert "sample 2: " in out and "→MASK]" in out and max(map(len, out.split("\n"))) <= 130
    for name in ("lengths", "padding"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert inspect_data.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["corpus"]["documents"] == 604 and report["samples"]["row_lengths"]["max"] == 128
    assert inspect_data.main([prefix]) == 0
    assert "no samples: give --vocab-file" in capsys.readouterr().out
    assert inspect_data.main([prefix, "--mask-prob", "2", "--seq-length", "2"]) == 2
    assert "mask_prob=2.0" in (err := capsys.readouterr().err) and "--seq-length=2" in err


def test_checksums_tell_what_has_changed(tmp_path: Path, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_data.main([prefix, "--verify"]) == 2
    assert "--checksum" in capsys.readouterr().err
    assert inspect_data.main([prefix, "--checksum"]) == 0
    assert inspect_data.main([prefix, "--verify"]) == 0
    assert "corpus.bin, corpus.idx: as they were" in capsys.readouterr().out
    assert subprocess.run(["sha256sum", "--check", "--strict", "corpus.sha256"], cwd=tmp_path, check=False,
                          capture_output=True).returncode == 0
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[1000] ^= 1
    Path(f"{prefix}.bin").write_bytes(content)
    Path(f"{prefix}.idx").unlink()
    assert inspect_data.main([prefix, "--verify"]) == 2
    err = capsys.readouterr().err
    assert "corpus.bin: has changed" in err and "corpus.idx: cannot be read" in err
