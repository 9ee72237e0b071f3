from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bert_ds.data import free_space, text_sources
from bert_ds.data import preprocess as module
from bert_ds.data.dataset_metadata import read_metadata
from bert_ds.data.document_encoder import DocumentEncoder, EncoderSettings
from bert_ds.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from bert_ds.data.preprocess import PreprocessSettings, preprocess
from bert_ds.data.text_sources import TextSources
from bert_ds.data.tokenizer import WordPieceTokenizer
from bert_ds.data.vocabulary import SPECIAL_TOKENS, Vocabulary
from bert_ds.errors import DataError, UserError

TEXTS = ("The cat sat. The dog ran!", "", "A [SEP] b.", "\u200b", "One dog. Two cats? Three.")
SENTENCES = (["The cat sat.", "The dog ran!"], [], ["A [SEP] b."], [], ["One dog.", "Two cats?", "Three."])


@pytest.fixture
def vocabulary(tmp_path: Path) -> Vocabulary:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    tokens = [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters), *".,!?[]", "the", "cat", "dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return Vocabulary.from_file(str(tmp_path / "vocab.txt"))


def write_lines(path: Path, texts: Sequence[str]) -> str:
    path.write_text("".join(json.dumps({"text": text, "title": text[:3]}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def settings_for(tmp_path: Path, source: str, *, workers: int = 1, on_error: str = "stop", output: str = "out/corpus",
                 **encoder: Any) -> PreprocessSettings:
    return PreprocessSettings(inputs=(source,), output_prefix=str(tmp_path / output), workers=workers,
                              on_error=on_error,
                              encoder=EncoderSettings(vocab_file=str(tmp_path / "vocab.txt"), **encoder))


def documents_of(prefix: str) -> list[list[list[int]]]:
    dataset = IndexedDataset(prefix)
    starts = dataset.document_indices
    return [[dataset[sentence].tolist() for sentence in range(starts[i], starts[i + 1])]
            for i in range(dataset.num_documents)]


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_documents_sentences_and_metadata(tmp_path: Path, vocabulary: Vocabulary) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    (dataset,) = preprocess(settings_for(tmp_path, source))
    encode = WordPieceTokenizer(vocabulary).encode
    assert dataset.prefix == str(tmp_path / "out/corpus_text_sentence")
    assert documents_of(dataset.prefix) == [[encode(sentence).tolist() for sentence in document]
                                            for document in SENTENCES]
    assert files_in(tmp_path / "out") == [f"corpus_text_sentence.{suffix}" for suffix in ("bin", "idx", "json")]

    metadata = read_metadata(dataset.prefix)
    assert metadata == dataset.metadata
    assert (metadata.documents, metadata.documents_of_two_sentences, metadata.sentences) == (5, 2, 6)
    assert metadata.tokens == len(IndexedDataset(dataset.prefix).tokens)
    assert metadata.vocab_sha256 == vocabulary.sha256
    assert metadata.sentence_splitter == "sentencex" and metadata.sentence_splitter_version
    assert not list(metadata.problems(vocabulary, "vocab.txt", "BertWordPieceLowerCase"))


def test_metadata_refuse_another_vocabulary(tmp_path: Path, vocabulary: Vocabulary) -> None:
    (dataset,) = preprocess(settings_for(tmp_path, write_lines(tmp_path / "in.jsonl", TEXTS)))
    other = tmp_path / "other.txt"
    other.write_text("\n".join([*SPECIAL_TOKENS, "x"]) + "\n", encoding="utf-8")
    problems = list(dataset.metadata.problems(Vocabulary.from_file(str(other)), "other.txt", "BertWordPieceCase"))
    assert [problem.setting for problem in problems] == ["--vocab-file", "--tokenizer-type"]
    Path(f"{dataset.prefix}.json").write_text('{"tokens": 3}', encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read"):
        read_metadata(dataset.prefix)
    assert read_metadata(str(tmp_path / "nothing")) is None


def test_one_dataset_a_key_and_whole_documents(tmp_path: Path, vocabulary: Vocabulary) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    datasets = preprocess(settings_for(tmp_path, source, sentence_splitter=None, json_keys=("title", "text"),
                                       append_eod=True))
    encode = WordPieceTokenizer(vocabulary).encode
    for dataset, key in zip(datasets, ("title", "text"), strict=True):
        assert dataset.prefix.endswith(f"corpus_{key}_document")
        texts = [text[:3] if key == "title" else text for text in TEXTS]
        assert documents_of(dataset.prefix) == [
            [[*encode(text).tolist(), vocabulary.sep_id]] if len(encode(text)) else [] for text in texts
        ]


def test_document_end_belongs_to_the_last_sentence(tmp_path: Path, vocabulary: Vocabulary) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    (plain,) = preprocess(settings_for(tmp_path, source))
    (ended,) = preprocess(settings_for(tmp_path, source, output="out/ended", append_eod=True))
    for document, with_end in zip(documents_of(plain.prefix), documents_of(ended.prefix), strict=True):
        assert with_end == [*document[:-1], *([*last, vocabulary.sep_id] for last in document[-1:])]
    assert ended.metadata.document_end_token == "[SEP]"
    (extended,) = preprocess(settings_for(tmp_path, source, output="out/extended", append_eod=True,
                                          vocab_extra_bos_eos=True))
    eos_id = len(vocabulary) + 1
    for document, with_end in zip(documents_of(plain.prefix), documents_of(extended.prefix), strict=True):
        assert with_end == [*document[:-1], *([*last, eos_id] for last in document[-1:])]
    assert extended.metadata.document_end_token == "[EOS]"


def test_output_is_the_same_for_any_number_of_workers(tmp_path: Path, vocabulary: Vocabulary,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "_CHUNK_BYTES", 1000)
    source = write_lines(tmp_path / "in.jsonl", [f"Cat {number}. The dog {number % 17}." for number in range(1000)])
    alone = settings_for(tmp_path, source, output="alone")
    together = settings_for(tmp_path, source, output="together", workers=3)
    preprocess(alone)
    preprocess(together)
    for suffix in (".bin", ".idx", ".json"):
        paths = [Path(settings.prefix_of("text") + suffix) for settings in (alone, together)]
        assert paths[0].read_bytes() == paths[1].read_bytes(), suffix


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_leaves_nothing_behind(tmp_path: Path, vocabulary: Vocabulary, workers: int,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "_CHUNK_BYTES", 1000)
    source = write_lines(tmp_path / "in.jsonl", TEXTS * 100)
    with Path(source).open("a", encoding="utf-8") as file:
        file.write("broken\n" * 3)
    with pytest.raises(DataError, match=r"in.jsonl:501: is not a JSON object"):
        preprocess(settings_for(tmp_path, source, workers=workers))
    assert files_in(tmp_path / "out") == []


def test_skipped_records_are_counted(tmp_path: Path, vocabulary: Vocabulary) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    with Path(source).open("a", encoding="utf-8") as file:
        file.write("broken\n" * 3)
    (dataset,) = preprocess(settings_for(tmp_path, source, on_error="skip"))
    assert (dataset.metadata.documents, dataset.metadata.skipped_records) == (5, 3)


def test_an_older_dataset_survives_a_failed_run(tmp_path: Path, vocabulary: Vocabulary) -> None:
    preprocess(settings_for(tmp_path, write_lines(tmp_path / "in.jsonl", TEXTS)))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\nbroken\n', encoding="utf-8")
    with pytest.raises(DataError):
        preprocess(settings_for(tmp_path, str(tmp_path / "bad.jsonl")))
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n{"text": " "}\n'])
def test_an_input_without_text_is_refused(tmp_path: Path, vocabulary: Vocabulary, content: str) -> None:
    (tmp_path / "in.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match="no text"):
        preprocess(settings_for(tmp_path, str(tmp_path / "in.jsonl")))
    assert files_in(tmp_path / "out") == []


def test_a_dead_worker_is_reported_with_its_place(tmp_path: Path, vocabulary: Vocabulary,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "_CHUNK_BYTES", 1000)
    settings = settings_for(tmp_path, write_lines(tmp_path / "in.jsonl", TEXTS * 400), workers=2)
    chunks = module._encoded_chunks(DocumentEncoder(settings.encoder), TextSources(settings.inputs), 2)
    next(chunks)
    for worker in multiprocessing.active_children():
        worker.kill()
    with pytest.raises(DataError, match=r"in.jsonl:\d+: a worker process died"):
        list(chunks)


def test_a_full_disk_is_a_message(tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: IndexedDatasetWriter, *arguments: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexedDatasetWriter, "add_documents", full)
    with pytest.raises(DataError, match=r"cannot be written .No space left on device"):
        preprocess(settings_for(tmp_path, write_lines(tmp_path / "in.jsonl", TEXTS)))
    assert files_in(tmp_path / "out") == []


def test_settings_are_checked_before_work(tmp_path: Path, vocabulary: Vocabulary) -> None:
    with pytest.raises(UserError, match=r"--workers=0(.|\n)*--json-keys=text text"):
        preprocess(settings_for(tmp_path, "missing", workers=0, json_keys=("text", "text")))


def test_duplicates_are_counted_or_dropped(tmp_path: Path, vocabulary: Vocabulary,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "_CHUNK_BYTES", 200)
    once = [*TEXTS, *(f"Cat {number}. Dog." for number in range(50))]
    repeated = [text for number, text in enumerate(once) for _ in range(1 + number % 3)]
    source = write_lines(tmp_path / "in.jsonl", repeated)
    unique = write_lines(tmp_path / "unique.jsonl", once)
    (counted,) = preprocess(settings_for(tmp_path, source))
    assert counted.metadata.duplicate_documents == sum(number % 3 for number, text in enumerate(once) if text)
    assert counted.metadata.documents == len(repeated)
    settings = replace(settings_for(tmp_path, source, output="out/dropped", workers=2), drop_duplicates=True)
    (dropped,) = preprocess(settings)
    (expected,) = preprocess(settings_for(tmp_path, unique, output="out/unique"))
    # The text without any character is no duplicate of itself.
    empty = sum(number % 3 for number, text in enumerate(once) if not text)
    assert dropped.metadata.documents == expected.metadata.documents + empty
    assert [document for document in documents_of(dropped.prefix) if document] == [
        document for document in documents_of(expected.prefix) if document]
    assert dropped.metadata.tokens == expected.metadata.tokens == len(IndexedDataset(dropped.prefix).tokens)


def test_bad_characters_are_replaced_on_request(tmp_path: Path, vocabulary: Vocabulary) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "The c\xffat."}\n{"text": "The dog."}\n')
    settings = settings_for(tmp_path, str(tmp_path / "in.jsonl"), on_error="replace")
    (dataset,) = preprocess(settings)
    assert (dataset.metadata.replaced_records, dataset.metadata.skipped_records) == (1, 0)
    # BERT's cleaning drops the replacement character.
    assert documents_of(dataset.prefix)[0] == [WordPieceTokenizer(vocabulary).encode("The cat.").tolist()]


@pytest.mark.parametrize("limit", [3_000, 20_000, 40_000])
def test_a_file_that_may_not_grow_leaves_nothing(tmp_path: Path, vocabulary: Vocabulary, limit: int) -> None:
    """What a full disk does, at different places: within the first tokens, later, within the index."""
    source = write_lines(tmp_path / "in.jsonl", ["The cat sat. The dog ran!"] * 1600)
    code = (f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
            "import sys; from bert_ds.preprocess_data import main; sys.exit(main())")
    run = subprocess.run([sys.executable, "-c", code, "--input", source, "--vocab-file", str(tmp_path / "vocab.txt"),
                          "--output-prefix", str(tmp_path / "out/c"), "--json-keys", "title", "text",
                          "--split-sentences"], capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert "cannot be written (File too large)" in run.stderr and "Traceback" not in run.stderr
    assert files_in(tmp_path / "out") == []


def test_a_disk_without_room_is_refused_before_work(tmp_path: Path, vocabulary: Vocabulary,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in.jsonl", TEXTS * 1000)
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda folder: SimpleNamespace(free=20_000))
    with pytest.raises(DataError, match=r"needs about 0.13 MB where 0.02 MB are free(.|\n)*--no-space-check"):
        preprocess(settings_for(tmp_path, source))
    assert not (tmp_path / "out").exists()
    assert preprocess(replace(settings_for(tmp_path, source), check_free_space=False))


def test_the_estimate_of_the_output_is_near(tmp_path: Path, vocabulary: Vocabulary) -> None:
    """For words that are one token each, as most of English prose is."""
    source = write_lines(tmp_path / "in.jsonl", ["the cat the dog the cat the dog the cat the dog the cat the dog the "
                                                 "cat the dog the cat the dog. " * 8] * 100)
    settings = settings_for(tmp_path, source)
    estimate = TextSources([source]).estimated_text_bytes() * module._bytes_per_text_byte(
        DocumentEncoder(settings.encoder))
    (dataset,) = preprocess(settings)
    written = sum(Path(dataset.prefix + suffix).stat().st_size for suffix in (".bin", ".idx"))
    assert 0.7 < estimate / written < 1.5


def interrupted_run(tmp_path: Path, *, signal_number: int, group: bool) -> subprocess.Popen[str]:
    """A run with two workers over endless standard input, stopped in the middle."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bert_ds.preprocess_data", "--input", "-", "--vocab-file", str(tmp_path / "vocab.txt"),
         "--output-prefix", str(tmp_path / "out/c"), "--split-sentences", "--workers", "2"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # A shell that runs the tests in the background makes them, and their children, deaf to Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # noqa: PLW1509
    assert process.stdin is not None
    partial = tmp_path / "out/c_text_sentence.bin.partial"
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size):
        assert time.monotonic() < deadline, "nothing was written"
        process.stdin.write("The cat sat. The dog ran!\n\n" * 20_000)
        process.stdin.flush()
    (os.killpg if group else os.kill)(process.pid, signal_number)
    return process


def test_ctrl_c_is_one_line_and_leaves_nothing(tmp_path: Path, vocabulary: Vocabulary) -> None:
    process = interrupted_run(tmp_path, signal_number=signal.SIGINT, group=True)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert files_in(tmp_path / "out") == []


def test_a_killed_run_can_be_repeated(tmp_path: Path, vocabulary: Vocabulary) -> None:
    process = interrupted_run(tmp_path, signal_number=signal.SIGKILL, group=False)
    process.communicate(timeout=60)
    left = files_in(tmp_path / "out")
    assert left and all(name.endswith(".partial") for name in left)
    (tmp_path / "out/c_text_sentence.json.partial").write_text("stale")
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    (dataset,) = preprocess(settings_for(tmp_path, source, output="out/c"))
    (fresh,) = preprocess(settings_for(tmp_path, source, output="fresh/c"))
    for suffix in (".bin", ".idx", ".json"):
        assert Path(dataset.prefix + suffix).read_bytes() == Path(fresh.prefix + suffix).read_bytes()
    assert files_in(tmp_path / "out") == files_in(tmp_path / "fresh")
