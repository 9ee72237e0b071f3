"""Exact match and F1 as SQuAD's official evaluations define them.

Answers are compared in lower case, without punctuation and the articles a, an and the, blanks made single. A
prediction counts as the best of its agreements with the marked answers.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetuning.squad_files import Question

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class AnswerScores:
    """Means in per cent over some questions."""

    exact: float
    f1: float
    questions: int


def normalize(answer: str) -> str:
    """The form in which answers are compared."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(prediction: str, truth: str) -> bool:
    """Whether both are the same after normalisation."""
    return normalize(prediction) == normalize(truth)


def f1(prediction: str, truth: str, *, version_2: bool) -> float:
    """Harmonic mean of the precision and recall of words.

    version_2: by the rule of SQuAD 2.0, two answers without a word agree; by that of 1.1 they have nothing in common.
    """
    predicted, true = normalize(prediction).split(), normalize(truth).split()
    if version_2 and not (predicted and true):
        return float(predicted == true)
    common = sum((Counter(predicted) & Counter(true)).values())
    return 2 * common / (len(predicted) + len(true)) if common else 0.0


def score_answers(questions: Sequence[Question], predictions: Mapping[str, str],
                  *, version_2: bool) -> dict[str, AnswerScores]:
    """Scores of `all` questions and, by the rules of 2.0, of those that are `answered` and `unanswered`.

    Args:
        questions: with the marked answers.
        predictions: an answer for each id, empty for none.
        version_2: whether the rules of SQuAD 2.0 hold, or those of 1.1.
    """
    groups: dict[str, list[tuple[float, float]]] = {"all": []}
    for question in questions:
        truths = [answer.text for answer in question.answers]
        if version_2:
            truths = [truth for truth in truths if normalize(truth)] or [""]
        prediction = predictions[question.id]
        pair = (float(max(exact_match(prediction, truth) for truth in truths)),
                max(f1(prediction, truth, version_2=version_2) for truth in truths))
        groups["all"].append(pair)
        if version_2:
            groups.setdefault("answered" if question.answers else "unanswered", []).append(pair)
    return {name: AnswerScores(exact=100 * sum(exact for exact, _ in pairs) / len(pairs),
                               f1=100 * sum(overlap for _, overlap in pairs) / len(pairs), questions=len(pairs))
            for name, pairs in groups.items()}
