"""Flags that name a file with the values of other flags: long blends do not fit a command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bert_ds.errors import ConfigError

ONE_LIST, LIST_OF_SPLITS = "--data-args-path", "--per-split-data-args-path"
ARGUMENT_FILES = {
    ONE_LIST: "File with the words of --data-path.",
    LIST_OF_SPLITS: 'JSON file {"train": [...], "valid": [...], "test": [...]} with the words of --train-data-path and '
                    "its like, as lists or as one text.",
}
_SPLITS = ("train", "valid", "test")


def with_argument_files(argv: Sequence[str]) -> list[str]:
    """`argv` with these flags replaced by those that they stand for.

    Raises ConfigError when a file cannot be used, or when what it gives is given by a flag too.
    """
    words = list(argv)
    for name, read in ((ONE_LIST, _one_list), (LIST_OF_SPLITS, _lists_of_splits)):
        while (place := _place_of(name, words)) is not None:
            flag, equals, path = words[place].partition("=")
            used = 1 if equals else 2
            if not equals:
                path = words[place + 1] if place + 1 < len(words) else ""
            given = read(flag, path)
            for other in given:
                if _place_of(other, words) is not None:
                    raise ConfigError.of(flag, path, f"contradicts {other}", "give one of the two")
            words[place:place + used] = [word for other, values in given.items() for word in (other, *values)]
    return words


def _place_of(flag: str, words: Sequence[str]) -> int | None:
    return next((i for i, word in enumerate(words) if word.partition("=")[0] == flag), None)


def _one_list(flag: str, path: str) -> dict[str, list[str]]:
    return {"--data-path": _words(_text(flag, path), flag, path)}


def _lists_of_splits(flag: str, path: str) -> dict[str, list[str]]:
    try:
        lists = json.loads(_text(flag, path))
    except ValueError as error:
        raise ConfigError.of(flag, path, f"is not JSON ({error})", "repair the file") from None
    if not isinstance(lists, dict) or not lists or not set(lists) <= set(_SPLITS):
        raise ConfigError.of(flag, path, "is not an object with the keys train, valid and test", "repair the file")
    return {f"--{split}-data-path": _words(value, flag, path) for split, value in lists.items() if value is not None}


def _words(value: object, flag: str, path: str) -> list[str]:
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not words or not all(isinstance(word, str | int | float) for word in words):
        raise ConfigError.of(flag, path, "holds something other than prefixes and weights",
                             "write PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...")
    return [str(word) for word in words]


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError.of(flag, path, f"cannot be read ({reason})", "name a file") from None
