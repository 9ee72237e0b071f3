"""Reads questions from files in the format of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_ds.errors import DataError


@dataclass(frozen=True)
class Answer:
    """A stretch of the context."""

    text: str
    start: int
    """Its first character in the context."""


@dataclass(frozen=True)
class Question:
    """One question about one paragraph."""

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]
    """What annotators have marked; none where the context does not answer the question (SQuAD 2.0)."""


def read_questions(path: Path) -> list[Question]:
    """The questions of a file in its order.

    Raises:
        DataError: the file cannot be read, is not in SQuAD's format, repeats an id, or an answer does not stand where
            it says.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError.of("file", path, f"cannot be read ({error.strerror})", "check the path") from error
    except ValueError as error:
        raise DataError.of("file", path, f"is no JSON ({error})", "give a file in SQuAD's format") from error
    try:
        questions = list(_questions(content))
    except (KeyError, TypeError) as error:
        raise DataError.of("file", path, f"is not in SQuAD's format ({type(error).__name__}: {error})",
                           'give {"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., '
                           '"answers": [{"text": ..., "answer_start": ...}]}]}]}]}') from error
    if not questions:
        raise DataError.of("file", path, "holds no questions", "give a file with questions")
    _require_sound(questions, path)
    return questions


def _questions(content: dict[str, Any]) -> Iterator[Question]:
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                answers = () if entry.get("is_impossible") else entry["answers"]
                yield Question(str(entry["id"]), _text(entry["question"]), _text(paragraph["context"]),
                               tuple(Answer(_text(answer["text"]), answer["answer_start"]) for answer in answers))


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"{value!r} stands where a text is needed")
    return value


def _require_sound(questions: Sequence[Question], path: Path) -> None:
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise DataError.of("file", path, f"holds the id {question.id!r} twice", "give each question its own")
        seen.add(question.id)
        for answer in question.answers:
            found = question.context[answer.start:answer.start + len(answer.text)]
            if found != answer.text or answer.start < 0:
                raise DataError.of("file", path, f"says that question {question.id!r} is answered by {answer.text!r} "
                                   f"at character {answer.start}, where {found!r} stands", "correct answer_start")
