"""Whether the files that a run reads are there, and its folders usable: found out before anything is started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from bert_ds.config.data import DataConfig
from bert_ds.config.output import OutputConfig
from bert_ds.errors import Problem

SUFFIXES = (".idx", ".bin")


def data_prefixes(data: DataConfig) -> tuple[str, ...]:
    """Prefixes that any split reads, without the weights of a blend."""
    return tuple(_settings_of_prefixes(data))


def _settings_of_prefixes(data: DataConfig) -> dict[str, str]:
    """The setting that first names each prefix."""
    names = ["data_path"]
    if data.has_data_of_splits:
        names = ["train_data_path", "valid_data_path", "test_data_path"]
    found: dict[str, str] = {}
    for name in names:
        for word in getattr(data, name):
            if not _is_number(word):
                found.setdefault(word, f"data.{name}")
    return found


def commands_that_make(data: DataConfig) -> tuple[str, str]:
    """The two commands that make vocabulary and data from one's own text."""
    prefix = next(iter(data_prefixes(data)), "data/corpus_text_sentence")
    for ending in ("_text_sentence", "_text_document"):
        prefix = prefix.removesuffix(ending)
    is_cased = data.tokenizer_type == "BertWordPieceCase"
    vocabulary = f"python -m bert_ds.build_vocab --input corpus.jsonl --output {data.vocab_file}"
    dataset = (f"python -m bert_ds.preprocess_data --input corpus.jsonl --vocab-file {data.vocab_file} "
               f"--output-prefix {prefix} --split-sentences")
    if is_cased:
        return f"{vocabulary} --cased", f"{dataset} --tokenizer-type {data.tokenizer_type}"
    return vocabulary, dataset


def missing_data(data: DataConfig) -> Iterator[Problem]:
    """A problem for the vocabulary and for each data file that is missing or empty."""
    repair = "make them with\n      " + "\n      ".join(commands_that_make(data))
    if not _holds_something(data.vocab_file):
        yield Problem("data.vocab_file", data.vocab_file, "is missing or empty", repair)
    for prefix, setting in _settings_of_prefixes(data).items():
        missing = [prefix + suffix for suffix in SUFFIXES if not _holds_something(prefix + suffix)]
        if missing:
            yield Problem(setting, prefix, f"{' and '.join(missing)} missing or empty",
                          _other_prefix(prefix) or repair)


def unusable_folders(output: OutputConfig) -> Iterator[Problem]:
    """A problem for each folder that cannot be what the run takes it for: told now, not at the first checkpoint."""
    folders = {name: getattr(output, name) for name in ("save", "load", "tensorboard_dir")}
    for name, folder in folders.items():
        if folder is None:
            continue
        # The folder itself, or the one that it would be made in.
        nearest = next(path for path in (Path(folder), *Path(folder).absolute().parents) if os.path.lexists(path))
        if not nearest.is_dir():
            yield Problem(f"output.{name}", folder, f"cannot be a folder: {nearest} is none", "choose another path")
        elif name != "load" and not os.access(nearest, os.W_OK | os.X_OK):
            yield Problem(f"output.{name}", folder, f"cannot be written: {nearest} allows no writing",
                          "choose a folder that you may write to")


def count_vocabulary(data: DataConfig) -> int | None:
    """Entries of the vocabulary with what the run appends to it, or None when the file is not there."""
    path = Path(data.vocab_file)
    if not path.is_file():
        return None
    appended = {b"[BOS]", b"[EOS]"} if data.vocab_extra_bos_eos else set()
    with path.open("rb") as lines:
        found = [line.rstrip(b"\n") for line in lines]
    return len(found) + len(appended.difference(found))


def _other_prefix(prefix: str) -> str | None:
    """A repair when the data lie under a name that is easily mistaken: a suffix, documents for sentences."""
    stem = prefix
    for ending in (*SUFFIXES, "_text_document", "_text_sentence"):
        stem = stem.removesuffix(ending)
    for candidate in (stem + "_text_sentence", stem):
        if all(_holds_something(candidate + suffix) for suffix in SUFFIXES):
            return f"use {candidate}, which exists"
    return None


def _holds_something(path: str) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) > 0


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
