"""Exact match and F1 of answers against values computed by hand from the rules of the official evaluations."""

from __future__ import annotations

import pytest

from finetuning.squad_files import Answer, Question
from finetuning.squad_scores import AnswerScores, exact_match, f1, normalize, score_answers


@pytest.mark.parametrize(("answer", "normal"), [
    ("The  Cat's an\tanimal.", "cats animal"), ("U.S.A.", "usa"), ("Theatre, a-an", "theatre aan"), ("a", ""),
    ("An ANT", "ant"), ("it—the", "it—"), ("(the) 1,000", "1000"),
])
def test_normalisation(answer: str, normal: str) -> None:
    assert normalize(answer) == normal


def test_two_answers() -> None:
    assert exact_match("the Eiffel tower!", "Eiffel Tower") and not exact_match("tower", "Eiffel tower")
    # 2 common words of 3 and 4; a word counts as often as both have it.
    assert f1("in the old Paris town", "Paris town by night", version_2=True) == pytest.approx(2 * 2 / (4 + 4))
    assert f1("red red", "red", version_2=False) == pytest.approx(2 / 3)
    assert f1("blue", "red", version_2=True) == 0
    assert [f1("the", "a", version_2=rule) for rule in (True, False)] == [1, 0]
    assert f1("", "red", version_2=True) == 0


def test_questions_with_and_without_answers() -> None:
    def question(name: str, *answers: str) -> Question:
        return Question(name, "?", " ".join(answers), tuple(Answer(text, 0) for text in answers))

    questions = [question("best of two", "grey cat", "the cat"), question("half", "old grey cat"), question("none"),
                 question("missed none"), question("missed", "dog")]
    predictions = {"best of two": "Cat", "half": "cat", "none": "", "missed none": "cat", "missed": ""}
    assert score_answers(questions, predictions, version_2=True) == {
        "all": AnswerScores(40.0, pytest.approx(100 * (1 + 0.5 + 1) / 5), 5),  # type: ignore[arg-type]
        "answered": AnswerScores(pytest.approx(100 / 3), pytest.approx(50), 3),  # type: ignore[arg-type]
        "unanswered": AnswerScores(50.0, 50.0, 2),
    }
    # Marked answers without a word count in 1.1 and are passed over in 2.0.
    article = [question("article", "the", "cat")]
    assert score_answers(article, {"article": "a"}, version_2=False) == {"all": AnswerScores(100.0, 0.0, 1)}
    assert score_answers(article, {"article": "a"}, version_2=True)["all"] == AnswerScores(0.0, 0.0, 1)
