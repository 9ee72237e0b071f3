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


def commands_that_make_missing(data: DataConfig) -> list[str]:
    """The commands that make the vocabulary and the data that are not there from one's own text."""
    return [command for _, command in _missing(data)]


def missing_data(data: DataConfig) -> Iterator[Problem]:
    """A problem for the vocabulary and for each data file that is missing or empty."""
    for problem, _ in _missing(data):
        yield problem


def _missing(data: DataConfig) -> Iterator[tuple[Problem, str]]:
    """What is missing, with the command that makes it."""
    if not _holds_something(data.vocab_file):
        command = _command_for_vocabulary(data)
        yield Problem("data.vocab_file", data.vocab_file, "is missing or empty", _made_by(command)), command
    for prefix, setting in _settings_of_prefixes(data).items():
        missing = [prefix + suffix for suffix in SUFFIXES if not _holds_something(prefix + suffix)]
        if missing:
            command = _command_for_data(data, prefix)
            yield Problem(setting, prefix, f"{' and '.join(missing)} missing or empty",
                          _other_prefix(prefix) or _made_by(command)), command


def _made_by(command: str) -> str:
    return f"make it with\n      {command}"


def _command_for_vocabulary(data: DataConfig) -> str:
    return (f"python -m bert_ds.build_vocab --input corpus.jsonl --output {data.vocab_file}"
            + (" --cased" if data.tokenizer_type == "BertWordPieceCase" else ""))


def _command_for_data(data: DataConfig, prefix: str) -> str:
    for ending in ("_text_sentence", "_text_document"):
        prefix = prefix.removesuffix(ending)
    return (f"python -m bert_ds.preprocess_data --input corpus.jsonl --vocab-file {data.vocab_file} "
            f"--output-prefix {prefix} --split-sentences"
            + (f" --tokenizer-type {data.tokenizer_type}" if data.tokenizer_type == "BertWordPieceCase" else ""))


def unusable_folders(output: OutputConfig) -> Iterator[Problem]:
    """A problem for each folder that cannot be what the run takes it for: told now, not at the first checkpoint."""
    folders = {name: getattr(output, name) for name in ("save", "load", "tensorboard_dir")}
    for name, folder in folders.items():
        if folder is None or (name == "load" and folder == output.save):
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
