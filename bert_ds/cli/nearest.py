"""What somebody who misspelt a name probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name most like `word`, or None when none is like it."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """A repair for the unknown name `word`: the nearest known one, or all of them."""
    names = sorted(known)
    match = nearest(word, names)
    return f"did you mean {match}" if match else f"use one of {', '.join(names)}"
