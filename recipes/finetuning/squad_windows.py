"""Cuts contexts into overlapping windows that fit the model, and finds answers in the model's scores of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_ds.errors import ConfigError
from finetuning.squad_files import Question
from finetuning.training import Row

_SPECIAL_TOKENS = 3
_CLS = 0
"""Position of [CLS], which stands for `no answer`."""


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """Lengths in tokens."""

    max_length: int
    """Of a row: [CLS] question [SEP] window of the context [SEP]."""
    overlap: int
    """That two windows next to each other share."""
    max_question_length: int
    """Longer questions are cut."""

    def require_fitting(self, positions: int) -> None:
        """Raises ConfigError when no window of the context fits, or a row is longer than the model's `positions`."""
        if self.max_length > positions:
            raise ConfigError.of("--max-length", self.max_length, f"is more than the model's {positions} positions",
                                 f"use {positions} or less")
        room = self.max_length - self.max_question_length - _SPECIAL_TOKENS
        if room <= self.overlap:
            raise ConfigError.of("--doc-stride", self.overlap, f"windows of {max(room, 0)} tokens beside a question "
                                 "cannot overlap that far", "lower it or --max-question-length, or raise --max-length")


@dataclass(frozen=True)
class Window:
    """One row for the model, and where its tokens come from."""

    question: int
    """Number of its question."""
    row: Row
    """What the model reads, with the positions of the answer; both are [CLS] where the window does not hold it."""
    offsets: NDArray[np.int64]
    """[tokens, 2]: first character and end in the context of each token; -1 outside the context."""


@dataclass(frozen=True)
class Candidate:
    """A possible answer; no text means that there is none."""

    text: str
    score: float
    """Sum of the logits of its ends."""


def cut_windows(tokenizer: Any, questions: Sequence[Question], settings: WindowSettings) -> list[Window]:
    """The windows of all questions; each question has at least one."""
    texts = _shortened(tokenizer, [question.text.strip() for question in questions], settings.max_question_length)
    encoded = tokenizer(texts, [question.context for question in questions], truncation="only_second",
                        max_length=settings.max_length, stride=settings.overlap, return_overflowing_tokens=True,
                        return_offsets_mapping=True)
    question_of = encoded.pop("overflow_to_sample_mapping")
    all_offsets = encoded.pop("offset_mapping")
    windows = []
    for i, number in enumerate(question_of):
        is_context = np.array([sequence == 1 for sequence in encoded.sequence_ids(i)])
        offsets = np.where(is_context[:, None], np.array(all_offsets[i]), -1)
        start, end = _answer_positions(questions[number], offsets)
        row = {name: values[i] for name, values in encoded.items()}
        windows.append(Window(number, {**row, "start_positions": start, "end_positions": end}, offsets))
    return windows


def find_candidates(window: Window, start_logits: NDArray[np.float32], end_logits: NDArray[np.float32],
                    context: str, *, count: int, max_answer_length: int) -> list[Candidate]:
    """The `count` best answers within the window's context, of at most `max_answer_length` tokens.

    start_logits, end_logits: [tokens or more]; what goes beyond the window's tokens is padding.
    """
    tokens = np.flatnonzero(window.offsets[:, 0] >= 0)
    if not len(tokens):
        return []
    starts, ends = start_logits[tokens], end_logits[tokens]
    # scores[i, j]: from token i, with j tokens after it.
    width = min(max_answer_length, len(tokens))
    padded = np.concatenate([ends, np.full(width - 1, -np.inf, dtype=ends.dtype)])
    scores = starts[:, None] + np.lib.stride_tricks.sliding_window_view(padded, width)
    flat = scores.ravel()
    best = np.argsort(-flat, kind="stable")[:count]
    candidates = []
    for place in best[np.isfinite(flat[best])].tolist():
        first, more = divmod(place, width)
        begin, end = window.offsets[tokens[first], 0], window.offsets[tokens[first + more], 1]
        candidates.append(Candidate(context[begin:end], float(flat[place])))
    return candidates


def no_answer_score(start_logits: NDArray[np.float32], end_logits: NDArray[np.float32]) -> float:
    """What the model gives to `no answer` in one window."""
    return float(start_logits[_CLS] + end_logits[_CLS])


def best_of(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The `count` best of several windows, each text once."""
    ranked: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: -candidate.score):
        ranked.setdefault(candidate.text, candidate)
    return list(ranked.values())[:count]


def _shortened(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[str]:
    offsets = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [text if len(tokens) <= max_tokens else text[:tokens[max_tokens - 1][1]]
            for text, tokens in zip(texts, offsets, strict=True)]


def _answer_positions(question: Question, offsets: NDArray[np.int64]) -> tuple[int, int]:
    """First and last token of the first marked answer; both [CLS] where the window does not hold all of it."""
    tokens = np.flatnonzero(offsets[:, 0] >= 0)
    if not question.answers or not len(tokens):
        return _CLS, _CLS
    answer = question.answers[0]
    begin, end = answer.start, answer.start + len(answer.text)
    if not offsets[tokens[0], 0] <= begin < end <= offsets[tokens[-1], 1]:
        return _CLS, _CLS
    first = tokens[offsets[tokens, 0] <= begin][-1]
    last = tokens[offsets[tokens, 1] >= end][0]
    return int(first), int(last)
