"""Questions are answered by a model that learnt to, from windows that cover the whole context."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import finetune_squad
from bert_ds.errors import DataError
from finetuning.squad_files import Answer, Question, read_questions
from finetuning.squad_windows import Window, WindowSettings, best_of, cut_windows, find_candidates
from tests.recipes.tiny_exports import write_export

transformers = pytest.importorskip("transformers")

SHADES, COLOURS = ["deep", "pale", "dark"], ["red", "green", "blue"]
FILLERS = ["the", "house", "was", "and", "a", "door", "near", "then", "old"]
WORDS = [*SHADES, *COLOURS, *FILLERS, "which", "colour", "?", ",", "##s"]
SMALL = ["--max-length", "24", "--doc-stride", "6", "--max-question-length", "8", "--batch-size", "16",
         "--device", "cpu"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(tmp_path_factory.mktemp("model") / "exported", WORDS)


def write_squad(path: Path, count: int, seed: int, *, share_without: float) -> str:
    """Contexts of 8 to 40 words with one shade and its colour, or without any; asked is which."""
    draw = random.Random(seed)
    paragraphs = []
    for number in range(count):
        before, after = (" ".join(draw.choices(FILLERS, k=draw.randrange(3, 20))) for _ in range(2))
        text = "" if draw.random() < share_without else f"{draw.choice(SHADES)} {draw.choice(COLOURS)}"
        context = f"{before.capitalize()} {text} {after}" if text else f"{before} {after}"
        answers = [{"text": text, "answer_start": len(before) + 1}] if text else []
        entry: dict[str, Any] = {"id": f"q{number}", "question": "Which colour?", "answers": answers}
        if share_without:
            entry["is_impossible"] = not text
        paragraphs.append({"context": context, "qas": [entry]})
    path.write_text(json.dumps({"version": "any", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return str(path)


@pytest.mark.parametrize("share_without", [0.0, 0.4], ids=["1.1", "2.0"])
def test_it_learns_to_answer_and_to_say_that_there_is_no_answer(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], share_without: float
) -> None:
    out = tmp_path / "out"
    valid = write_squad(tmp_path / "dev.json", 60, 2, share_without=share_without)
    assert finetune_squad.main([
        str(exported), str(out), "--train", write_squad(tmp_path / "train.json", 240, 1, share_without=share_without),
        "--valid", valid, "--epochs", "4", "--learning-rate", "3e-3", *SMALL]) == 0
    scores = json.loads((out / "results.json").read_text())["scores"]
    assert scores["all"]["exact"] > 80 and scores["all"]["f1"] > 85
    assert scores["all"]["questions"] == 60
    predictions = json.loads((out / "predictions.json").read_text())
    assert predictions.keys() == {question.id for question in read_questions(Path(valid))}
    nbest = json.loads((out / "nbest.json").read_text())
    for name, candidates in nbest.items():
        assert sum(candidate["probability"] for candidate in candidates) == pytest.approx(1)
        assert predictions[name] in {candidate["text"] for candidate in candidates}
    if share_without:
        odds = json.loads((out / "null_odds.json").read_text())
        assert {name for name, value in odds.items() if value > 0} == {n for n, text in predictions.items() if not text}
        assert scores["answered"]["exact"] > 60 and scores["unanswered"]["exact"] > 60
    else:
        assert not (out / "null_odds.json").exists() and all(predictions.values())
    table = capsys.readouterr().out.splitlines()
    assert f"{scores['all']['exact']:.2f}" in table[-1 if not share_without else -3]

    # The saved model answers the same without training.
    again = tmp_path / "again"
    assert finetune_squad.main([str(out), str(again), "--valid", valid, "--epochs", "0", *SMALL]) == 0
    assert json.loads((again / "predictions.json").read_text()) == predictions


def windows_of(exported: Path, question: Question, **changes: int) -> list[Window]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    settings = WindowSettings(**{"max_length": 12, "overlap": 2, "max_question_length": 3, **changes})
    return cut_windows(tokenizer, [question], settings)


def test_windows_cover_the_context_and_know_where_the_answer_stands(exported: Path) -> None:
    context = "The old house, was near a  door and then deep RED doors near the old house"
    start = context.index("deep")
    question = Question("q", "which colour was the house ?", context, (Answer("deep RED doors", start),))
    windows = windows_of(exported, question)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    seen = []
    holding = 0
    for window in windows:
        ids = window.row["input_ids"]
        assert len(ids) <= 12
        assert tokenizer.convert_ids_to_tokens(ids[:5]) == ["[CLS]", "which", "colour", "was", "[SEP]"]
        places = np.flatnonzero(window.offsets[:, 0] >= 0)
        assert places[0] == 5 and places[-1] == len(ids) - 2
        texts = [context[begin:end] for begin, end in window.offsets[places]]
        assert [text.lower() for text in texts] == [
            token.removeprefix("##") for token in tokenizer.convert_ids_to_tokens([ids[i] for i in places])]
        seen.append([tuple(pair) for pair in window.offsets[places].tolist()])
        first, last = window.row["start_positions"], window.row["end_positions"]
        if first:
            holding += 1
            assert context[window.offsets[first, 0]:window.offsets[last, 1]] == "deep RED doors"
        else:
            assert last == 0
    assert all(left[-2:] == right[:2] for left, right in pairwise(seen))
    assert len({pair for window in seen for pair in window}) == len(context.replace(",", " ,").split()) + 1
    assert 0 < holding < len(windows)


def test_candidates_are_the_best_of_all_stretches(exported: Path) -> None:
    """Against every pair of tokens, tried one by one."""
    context = "near the old house was a door"
    question = Question("q", "which ?", context, ())
    (window,) = windows_of(exported, question, overlap=0)
    length = len(window.row["input_ids"]) + 3
    start, end = torch.randn(2, length, generator=torch.Generator().manual_seed(3)).numpy()
    offset = 4
    expected = sorted(((float(start[offset + i] + end[offset + j]), i, j)
                       for i in range(7) for j in range(i, min(7, i + 3))), reverse=True)
    found = find_candidates(window, start, end, context, count=100, max_answer_length=3)
    words = context.split()
    assert [candidate.text for candidate in found] == [" ".join(words[i:j + 1]) for _, i, j in expected]
    assert [candidate.score for candidate in found] == pytest.approx([score for score, _, _ in expected])
    assert find_candidates(window, start, end, context, count=2, max_answer_length=3) == found[:2]
    assert best_of([*found, *found], 5) == found[:5]


ENTRY = {"id": "1", "question": "Which?", "answers": [{"text": "red", "answer_start": 2}]}


@pytest.mark.parametrize(("content", "message"), [
    ("no json", "is no JSON"),
    ({"data": []}, "holds no questions"),
    ([1], r"is not in SQuAD's format \(TypeError"),
    ({"data": [{"paragraphs": [{"context": "a red door"}]}]}, r"is not in SQuAD's format \(KeyError: 'qas'"),
    ({"data": [{"paragraphs": [{"context": "a red door", "qas": [ENTRY, ENTRY]}]}]}, "holds the id '1' twice"),
    ({"data": [{"paragraphs": [{"context": "one red door", "qas": [ENTRY]}]}]},
     "question '1' is answered by 'red' at character 2, where 'e r' stands"),
    ({"data": [{"paragraphs": [{"context": " ", "qas": [ENTRY]}]}]}, "stands where a text is needed"),
])
def test_files_in_another_format(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "squad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError, match=message):
        read_questions(path)


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "--train=none: is needed to train"),
    (["--train", "dev.json", "--doc-stride", "20"], "windows of 13 tokens beside a question cannot overlap that far"),
    (["--train", "dev.json", "--max-length", "99"], "is more than the model's 64 positions"),
    (["--epochs", "0"], "lacks 2 weights of MegatronBertForQuestionAnswering, qa_outputs.bias for one"),
    (["--train", "dev.json", "--n-best", "0"], "--n-best=0: must be at least 1"),
])
def test_bad_input_is_told_and_leaves_nothing(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_squad(tmp_path / "dev.json", 5, 1, share_without=0)
    assert finetune_squad.main([str(exported), "out", "--valid", "dev.json", *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()
