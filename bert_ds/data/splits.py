"""Which documents belong to training, validation and test: `--split 949,50,1`, in Megatron's arithmetic."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np

from bert_ds.errors import ConfigError, DataError

SPLITS = ("train", "valid", "test")

_SETTING = "--split"
_NUMBERS = re.compile(r"[.0-9]+")
_REPAIR = "give one to three shares such as 949,50,1"

Bookends = tuple[float, float]
"""Begin and end of a split as shares of the documents."""


def parse_split(split: str) -> tuple[Bookends | None, Bookends | None, Bookends | None]:
    """Bookends of train, valid and test; None for a split without a share. Raises ConfigError.

    Shares are normalised by their sum and added up from the left in double precision; missing ones are 0.
    """
    if re.search(r"[^.0-9,;:/\s]", split):
        raise ConfigError.of(_SETTING, split, "is not a list of plain numbers", _REPAIR)
    try:
        shares = [float(number) for number in _NUMBERS.findall(split)]
    except ValueError:
        raise ConfigError.of(_SETTING, split, "holds something that is not a number", _REPAIR) from None
    if not 1 <= len(shares) <= len(SPLITS) or sum(shares) == 0:
        raise ConfigError.of(_SETTING, split, f"gives {len(shares)} shares with the sum {sum(shares):g}", _REPAIR)
    padded = np.array(shares + [0.0] * (len(SPLITS) - len(shares)))
    ends = [0.0]
    for share in (padded / padded.sum()).tolist():
        ends.append(ends[-1] + share)
    train, valid, test = ((low, high) if high > low else None for low, high in pairwise(ends))
    return train, valid, test


def document_range(split: str, name: str, num_documents: int, *, source: str) -> tuple[int, int]:
    """First document and end of split `name` (one of SPLITS); raises DataError when it has none."""
    bookends = parse_split(split)[SPLITS.index(name)]
    # Python's round, halves to even.
    first, end = (round(share * num_documents) for share in bookends or (0.0, 0.0))
    if first >= end:
        repair = f"give {name} a larger share in {_SETTING} or use a text with more documents"
        if name != "train":
            repair += ", or train without evaluation (--eval-interval none)"
        raise DataError.of(_SETTING, split, f"leaves none of the {num_documents} documents of {source} to {name}",
                           repair)
    return first, end
