"""A sample as a reader sees it: its words, which of them are hidden and how, and where the segments part."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import numpy as np

from bert_ds.data.samples import UNUSED_LABEL, SampleBatch
from bert_ds.data.vocabulary import CONTINUATION_PREFIX, Vocabulary

_ORDER = {0: "in order", 1: "segments swapped", UNUSED_LABEL: "no sentence label"}


def sample_text(batch: SampleBatch, row: int, vocabulary: Vocabulary) -> tuple[str, list[str]]:
    """A headline and one text for each segment of a row that holds one sample.

    A word that has to be predicted stands in brackets: [cat→MASK], [cat→dog] with a random word in its place, [cat=]
    where it was kept.
    """
    length = int(np.count_nonzero(batch.segment_ids[row]))
    shown = batch.input_ids[row, :length].tolist()
    labels = {position: label for position, label in zip(batch.masked_positions[row].tolist(),
                                                         batch.masked_labels[row].tolist(), strict=True)
              if label != UNUSED_LABEL}
    originals = [labels.get(position, token) for position, token in enumerate(shown)]
    types = batch.token_type_ids[row, :length].tolist()
    segments = []
    for segment in sorted(set(types)):
        places = [place for place in range(length) if types[place] == segment]
        segments.append(" ".join(_word(word, shown, originals, labels.keys(), vocabulary)
                                 for word in _words(places, originals, vocabulary)))
    task = _ORDER[int(batch.sentence_order_labels[row, 0])]
    headline = (f"{length} tokens and {batch.input_ids.shape[1] - length} of padding, {len(labels)} to predict, {task}"
                + (", cut short" if batch.truncated[row] else ""))
    return headline, segments


def _words(places: Sequence[int], originals: Sequence[int], vocabulary: Vocabulary) -> Iterator[list[int]]:
    """The places grouped to words of the original text."""
    word = list[int]()
    for place in places:
        if word and not vocabulary.is_continuation[originals[place]]:
            yield word
            word = []
        word.append(place)
    if word:
        yield word


def _word(word: Sequence[int], shown: Sequence[int], originals: Sequence[int], masked: Container[int],
          vocabulary: Vocabulary) -> str:
    original = _spelled([vocabulary.tokens[originals[place]] for place in word])
    if not any(place in masked for place in word):
        return original
    if all(shown[place] == originals[place] for place in word):
        return f"[{original}=]"
    if all(shown[place] == vocabulary.mask_id for place in word):
        return f"[{original}→MASK]"
    pieces = ["MASK" if shown[place] == vocabulary.mask_id else vocabulary.tokens[shown[place]] for place in word]
    return f"[{original}→{' '.join(pieces)}]"


def _spelled(pieces: Sequence[str]) -> str:
    return pieces[0] + "".join(piece.removeprefix(CONTINUATION_PREFIX) for piece in pieces[1:])
