"""The commands from text to data as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bert_ds import build_vocab, gather_text, preprocess_data
from bert_ds.data.documentation_corpus import CorpusDocument
from bert_ds.data.indexed_dataset import IndexedDataset
from bert_ds.data.vocabulary import Vocabulary


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"The cat {number} sat. A dog ran after it."}) + "\n"
                            for number in range(50)), encoding="utf-8")
    return str(path)


def test_from_text_to_data(tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    vocab, prefix = str(tmp_path / "vocab.txt"), str(tmp_path / "data" / "corpus")
    assert build_vocab.main(["--input", corpus, "--output", vocab, "--size", "5000"]) == 0
    out = capsys.readouterr().out
    size = len(Vocabulary.from_file(vocab))
    assert f"holds {size} pieces where 5,000 were asked for" in out
    assert f"wrote {vocab}: {size} tokens, sha256 {Vocabulary.from_file(vocab).sha256}" in out

    assert preprocess_data.main(["--input", corpus, "--vocab-file", vocab, "--output-prefix", prefix,
                                 "--split-sentences"]) == 0
    out = capsys.readouterr().out
    dataset = IndexedDataset(f"{prefix}_text_sentence")
    assert f"50 documents (50 of at least two sentences), 100 sentences, {len(dataset.tokens):,} tokens" in out
    assert "warning" not in out and f"--data-path {prefix}_text_sentence --vocab-file {vocab}" in out
    assert "--bert-no-binary-head" not in out


def test_a_vocabulary_is_not_overwritten_by_another(tmp_path: Path, corpus: str,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    vocab = tmp_path / "vocab.txt"
    arguments = ["--input", corpus, "--output", str(vocab), "--size"]
    assert build_vocab.main([*arguments, "60"]) == 0
    content = vocab.read_bytes()
    assert build_vocab.main([*arguments, "60"]) == 0
    assert build_vocab.main([*arguments, "70"]) == 2
    assert "exists and holds another vocabulary" in capsys.readouterr().err
    assert vocab.read_bytes() == content
    assert build_vocab.main([*arguments, "70", "--force"]) == 0
    assert vocab.read_bytes() != content


def test_single_sentences_are_warned_about(tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, vocab = tmp_path / "single.txt", str(tmp_path / "vocab.txt")
    text.write_text("The cat sat.\n\nA dog ran.\n", encoding="utf-8")
    build_vocab.main(["--input", corpus, "--output", vocab, "--size", "60"])
    arguments = ["--input", str(text), "--vocab-file", vocab, "--output-prefix", str(tmp_path / "single")]
    assert preprocess_data.main([*arguments, "--split-sentences"]) == 0
    *_, warning, _, hint = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning: no document of") and "--bert-no-binary-head" in warning
    assert hint.startswith("next: ") and hint.endswith(" --bert-no-binary-head")
    assert preprocess_data.main(arguments) == 0
    assert "without --split-sentences" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["--split-sentence"], "--split-sentence=: is not a flag of this command. Fix: did you mean --split-sentences."),
    (["--worker=4"], "--worker=4: is not a flag of this command. Fix: did you mean --workers."),
    (["--input", "missing.jsonl", "--vocab-file", "no.txt", "--output-prefix", "x"], "--vocab-file=no.txt"),
])
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess_data.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback (most" not in captured.err 


def test_gathered_text_is_split_into_training_and_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    documents = [CorpusDocument("One is here. Two is here.", f"m{number}.py", 2, is_held_out=number == 3)
                 for number in range(5)]
    monkeypatch.setattr(gather_text, "gather_documentation", lambda max_bytes, workers: documents)
    output, held_out = tmp_path / "out" / "corpus.jsonl", tmp_path / "held_out.jsonl"
    assert gather_text.main(["--output", str(output), "--held-out", str(held_out)]) == 0
    sources = [json.loads(line)["source"] for line in output.read_text().splitlines()]
    assert sources == ["m0.py", "m1.py", "m2.py", "m4.py"]
    assert json.loads(held_out.read_text()) == {"text": documents[3].text, "source": "m3.py"}
    assert "4 documents, 8 sentences" in capsys.readouterr().out
    assert gather_text.main(["--output", str(output)]) == 0
    assert len(output.read_text().splitlines()) == 5
    assert gather_text.main(["--output", str(output), "--max-mb", "0"]) == 2
