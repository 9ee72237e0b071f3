"""Fine-tunes an exported model to answer questions about a text, on files in the format of SQuAD 1.1 or 2.0.

    python recipes/finetune_squad.py exports/110m answers/110m --train train-v1.1.json --valid dev-v1.1.json

MODEL comes from `python -m bert_ds.convert to-hf`. OUT becomes the model, which transformers'
AutoModelForQuestionAnswering opens, with predictions.json (answer by id, as the official evaluation reads it),
nbest.json, results.json and, where questions may have no answer, null_odds.json. With --epochs 0 a model that was
fine-tuned before only answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # For a checkout that is not installed.
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from bert_ds.cli.command_parser import CommandParser
from bert_ds.convert.exported_model import open_export
from bert_ds.data.atomic_file import atomic_text_file
from bert_ds.errors import EXIT_DONE, ConfigError, Problem, raise_if_any, run_command
from finetuning.model_folders import add_model_folders, check_model_folders, save_model
from finetuning.progress import Progress
from finetuning.squad_files import Question, read_questions
from finetuning.squad_scores import AnswerScores, score_answers
from finetuning.squad_windows import (
    Candidate,
    Window,
    WindowSettings,
    best_of,
    cut_windows,
    find_candidates,
    no_answer_score,
)
from finetuning.training import TrainingSettings, add_training_flags, predict, train

_LABELS = ("start_positions", "end_positions")


@dataclass(frozen=True)
class AnsweredQuestion:
    """What the model says to one question."""

    candidates: Sequence[Candidate]
    """The best first; `no answer` is among them where questions may have none."""
    prediction: str
    null_odds: float
    """Score of `no answer` less that of the best answer."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    options = _parser().parse_command(argv)
    raise_if_any(ConfigError, _problems(options))
    settings = TrainingSettings.from_options(options)
    check_model_folders(options)
    train_questions = read_questions(options.train) if options.epochs else []
    questions = read_questions(options.valid)
    version_2 = any(not question.answers for question in (*train_questions, *questions))
    torch.manual_seed(options.seed)
    tokenizer, model = open_export(options.model, "AutoModelForQuestionAnswering", new_head=options.epochs > 0)
    lengths = _window_settings(options, int(model.config.max_position_embeddings))
    model.to(settings.device)
    if train_questions:
        _train(model, tokenizer, cut_windows(tokenizer, train_questions, lengths), settings, options)
    else:
        save_model(model, tokenizer, options, is_first=True)
    windows = cut_windows(tokenizer, questions, lengths)
    print(f"{len(questions):,} questions to answer in {len(windows):,} windows", flush=True)
    answers = answer(model, tokenizer, questions, windows, settings, options, version_2=version_2)
    found = score_answers(questions, {question: answered.prediction for question, answered in answers.items()},
                          version_2=version_2)
    _write_answers(answers, found, options, version_2=version_2)
    print(describe(found))
    return EXIT_DONE


def answer(model: Any, tokenizer: Any, questions: Sequence[Question], windows: Sequence[Window],
           settings: TrainingSettings, options: argparse.Namespace, *,
           version_2: bool) -> dict[str, AnsweredQuestion]:
    """Answers all questions from the scores of their windows, by id.

    version_2: whether a question may have no answer, as in SQuAD 2.0; then it has none where the least score of
    `no answer` in a window exceeds that of the best answer by more than --null-threshold.
    """
    candidates: list[list[Candidate]] = [[] for _ in questions]
    nulls = [float("inf")] * len(questions)
    rows = [{name: value for name, value in window.row.items() if name not in _LABELS} for window in windows]
    for numbers, output in predict(model, tokenizer, rows, settings):
        starts, ends = (logits.float().cpu().numpy() for logits in (output.start_logits, output.end_logits))
        for i, number in enumerate(numbers):
            window = windows[number]
            question = window.question
            nulls[question] = min(nulls[question], no_answer_score(starts[i], ends[i]))
            candidates[question] += find_candidates(
                window, starts[i], ends[i], questions[question].context, count=options.n_best,
                max_answer_length=options.max_answer_length)
    return {question.id: _decide(candidates[i], nulls[i], options, version_2=version_2)
            for i, question in enumerate(questions)}


def _decide(candidates: Sequence[Candidate], null: float, options: argparse.Namespace, *,
            version_2: bool) -> AnsweredQuestion:
    ranked = best_of(candidates, options.n_best)
    # A context without a token has no candidates.
    odds = null - ranked[0].score if ranked else float("inf")
    prediction = ranked[0].text if ranked else ""
    if version_2:
        ranked = best_of([*ranked, Candidate("", null)], options.n_best)
        prediction = "" if odds > options.null_threshold else prediction
    return AnsweredQuestion(ranked, prediction, odds)


def describe(found: Mapping[str, AnswerScores]) -> str:
    """A table of the scores."""
    lines = ["             questions  exact match     F1"]
    lines += [f"{name:<11}{scores.questions:>11,}{scores.exact:>13.2f}{scores.f1:>7.2f}"
              for name, scores in found.items()]
    return "\n".join(lines)


def _train(model: Any, tokenizer: Any, windows: Sequence[Window], settings: TrainingSettings,
           options: argparse.Namespace) -> None:
    """Trains, and saves after each epoch."""
    print(f"{len({window.question for window in windows}):,} questions to train in {len(windows):,} windows; "
          f"{settings.precision} on {settings.device}", flush=True)
    progress = Progress("training", rows=len(windows), epochs=settings.epochs)
    rows = [window.row for window in windows]
    for epoch in train(model, tokenizer, rows, settings, seed=options.seed, progress=progress):
        print(f"epoch {epoch}/{settings.epochs} done | loss {progress.mean_loss_of_epoch():.4f}", flush=True)
        save_model(model, tokenizer, options, is_first=epoch == 1)


def _window_settings(options: argparse.Namespace, positions: int) -> WindowSettings:
    settings = WindowSettings(max_length=options.max_length, overlap=options.doc_stride,
                              max_question_length=options.max_question_length)
    settings.require_fitting(positions)
    return settings


def _write_answers(answers: Mapping[str, AnsweredQuestion], found: Mapping[str, AnswerScores],
                   options: argparse.Namespace, *, version_2: bool) -> None:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    content: dict[str, Any] = {
        "predictions.json": {question: answered.prediction for question, answered in answers.items()},
        "nbest.json": {question: _with_probabilities(answered.candidates) for question, answered in answers.items()},
        "results.json": {"settings": settings, "scores": {name: asdict(scores) for name, scores in found.items()}},
    }
    if version_2:
        content["null_odds.json"] = {question: answered.null_odds for question, answered in answers.items()}
    for name, values in content.items():
        with atomic_text_file(options.out / name) as file:
            json.dump(values, file, indent=2, ensure_ascii=False)


def _with_probabilities(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    scores = np.array([candidate.score for candidate in candidates])
    weights = np.exp(scores - scores.max(initial=-np.inf))
    return [{"text": candidate.text, "score": candidate.score, "probability": probability}
            for candidate, probability in zip(candidates, (weights / weights.sum()).tolist(), strict=True)]


def _problems(options: argparse.Namespace) -> list[Problem]:
    problems = []
    if options.epochs and options.train is None:
        problems.append(Problem("--train", "none", "is needed to train", "give it, or --epochs 0 to answer only"))
    for flag in ("--n-best", "--max-answer-length", "--max-question-length"):
        value = getattr(options, flag[2:].replace("-", "_"))
        if value < 1:
            problems.append(Problem(flag, value, "must be at least 1", "leave it out for the default"))
    if options.doc_stride < 0:
        problems.append(Problem("--doc-stride", options.doc_stride, "is negative", "use 128"))
    return problems


def _parser() -> CommandParser:
    parser = CommandParser(prog="finetune_squad.py",
                           description="Fine-tunes an exported model to answer questions about a text.")
    add_model_folders(parser, makes="the model, its answers and their scores")
    files = parser.add_argument_group("data")
    files.add_argument("--train", type=Path, metavar="FILE", help="JSON in the format of SQuAD 1.1 or 2.0")
    files.add_argument("--valid", type=Path, required=True, metavar="FILE",
                       help="in the same format; answered and scored after training")
    files.add_argument("--max-length", type=int, default=384, metavar="N",
                       help="tokens of a row: question, window of the text, special ones (default: %(default)s)")
    files.add_argument("--doc-stride", type=int, default=128, metavar="N",
                       help="tokens that windows next to each other share (default: %(default)s)")
    files.add_argument("--max-question-length", type=int, default=64, metavar="N",
                       help="longer questions are cut (default: %(default)s tokens)")
    add_training_flags(parser, epochs=2, batch_size=16, learning_rate=3e-5)
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: %(default)s")
    answers = parser.add_argument_group("answers")
    answers.add_argument("--n-best", type=int, default=20, metavar="N",
                         help="candidates kept for each question (default: %(default)s)")
    answers.add_argument("--max-answer-length", type=int, default=30, metavar="N",
                         help="tokens of the longest answer (default: %(default)s)")
    answers.add_argument("--null-threshold", type=float, default=0.0, metavar="X",
                         help="a question has no answer where that scores so much more than the best one "
                              "(SQuAD 2.0; default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
