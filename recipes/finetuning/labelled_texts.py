"""Reads labelled texts from tab-separated, CSV and JSON-lines files."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bert_ds.errors import DataError

FORMATS = {".tsv": "tsv", ".txt": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
HEADERS = ("auto", "yes", "no")
USUAL_TEXTS = (("sentence1", "sentence2"), ("question1", "question2"), ("premise", "hypothesis"),
               ("question", "sentence"), ("#1 String", "#2 String"), ("sentence",), ("text",))
"""Columns that are looked for when none are named, GLUE's among them."""
USUAL_LABELS = ("label", "gold_label", "is_duplicate", "Quality")

_MANY_LABELS = 50


@dataclass(frozen=True)
class Example:
    """One or two texts and what is to be predicted from them."""

    texts: tuple[str, ...]
    label: str


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where texts and label stand in a file: names of its header (keys in JSON), or numbers counted from 1."""

    texts: tuple[str, ...] = ()
    """One or two; empty means the usual names."""
    label: str | None = None
    """None means the usual names."""
    header: Literal["auto", "yes", "no"] = "auto"
    """Whether the first row names the columns. auto: it does where a column is chosen by name, and where columns are
    chosen by number and the first row's label is none of the known labels or, without these, of the other rows'."""


def read_examples(path: Path, columns: Columns, file_format: str = "auto",
                  known_labels: Collection[str] = ()) -> list[Example]:
    """The examples of a file in its order; prints a line where it guesses that the first row is a header.

    Tab-separated files know no quotes, as GLUE's do not; CSV files know double ones. Blank lines are left out.
    known_labels: those of the training file.

    Raises:
        DataError: the file cannot be read, lacks a column, or has a row without a text or a label.
    """
    kind = FORMATS.get(path.suffix.lower()) if file_format == "auto" else file_format
    if kind is None:
        raise DataError.of("file", path, "does not tell by its name what it holds", "give --format tsv, csv or jsonl")
    try:
        rows = list(_READERS[kind](path))
    except OSError as error:
        raise DataError.of("file", path, f"cannot be read ({error.strerror})", "check the path") from error
    except UnicodeDecodeError as error:
        raise DataError.of("file", path, f"is not UTF-8 ({error.reason} at byte {error.start})",
                           "convert it to UTF-8") from error
    if not rows:
        raise DataError.of("file", path, "holds no rows", "give a file with examples")
    examples = list(_examples_of_json(path, rows, columns) if kind == "jsonl" else
                    _examples_of_table(path, rows, columns, known_labels))
    if not examples:
        raise DataError.of("file", path, "holds a header and no rows", "give a file with examples")
    return examples


def labels_of(examples: Sequence[Example], source: Path) -> list[str]:
    """The distinct labels in order: as numbers where all are whole numbers, else as text.

    Raises:
        DataError: there are not at least two, or so many that they look like scores.
    """
    labels = {example.label for example in examples}
    if len(labels) < 2:
        raise DataError.of("file", source, f"has one label only, {min(labels)!r}", "give examples of two or more")
    if len(labels) > max(_MANY_LABELS, len(examples) // 2):
        raise DataError.of("file", source, f"has {len(labels)} labels for {len(examples)} rows: scores, not classes",
                           "choose the column of the classes with --label-column")
    are_numbers = all(label.removeprefix("-").isdecimal() for label in labels)
    return sorted(labels, key=int) if are_numbers else sorted(labels)


def require_known_labels(examples: Sequence[Example], labels: Sequence[str], source: Path) -> None:
    """Raises DataError when an example has a label that is not among `labels`."""
    unknown = sorted({example.label for example in examples} - set(labels))
    if unknown:
        raise DataError.of("file", source, f"has the label {unknown[0]!r}, which the training file lacks (it has "
                           f"{_shown(labels)})", "give files with the same labels; the hidden ones of a benchmark's "
                           "test file cannot be scored")


def _tab_separated(path: Path) -> Iterator[tuple[int, list[str]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line.rstrip("\n").split("\t")


def _comma_separated(path: Path) -> Iterator[tuple[int, list[str]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            for row in reader:
                if row:
                    yield reader.line_num, row
        except csv.Error as error:
            raise DataError.of("file", f"{path}, line {reader.line_num}", f"is no CSV ({error})",
                               "correct the line, or give --format tsv") from error


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise DataError.of("file", f"{path}, line {number}", "is no JSON object",
                                   "write one object a line, such as {\"sentence\": \"...\", \"label\": \"...\"}")
            yield number, record


_READERS: Mapping[str, Any] = {"tsv": _tab_separated, "csv": _comma_separated, "jsonl": _json_lines}


def _examples_of_json(path: Path, rows: Sequence[tuple[int, dict[str, Any]]], columns: Columns) -> Iterator[Example]:
    texts, label = _chosen_names(path, list(rows[0][1]), columns)
    for number, record in rows:
        place = f"{path}, line {number}"
        missing = [name for name in (*texts, label) if record.get(name) is None]
        if missing:
            raise DataError.of("file", place, f"has no {missing[0]!r}", "add it, or remove the line")
        wrong = [name for name in texts if not isinstance(record[name], str)]
        if wrong or isinstance(record[label], (list, dict)):
            raise DataError.of("file", place, f"has no plain value under {[*wrong, label][0]!r}",
                               "give texts as strings and the label as a string or a number")
        yield _example(place, [record[name] for name in texts], str(record[label]))


def _examples_of_table(path: Path, rows: Sequence[tuple[int, list[str]]], columns: Columns,
                       known_labels: Collection[str]) -> Iterator[Example]:
    first_row = rows[0][1]
    chosen = [*columns.texts, *([] if columns.label is None else [columns.label])]
    if columns.texts and columns.label and all(name.isdecimal() for name in chosen) and columns.header != "yes":
        *texts, label = (int(name) - 1 for name in chosen)
        has_header = columns.header == "auto" and _looks_like_header(rows, label, known_labels)
        if has_header:
            print(f"{path}: the first row is taken for a header, since no other has its label {first_row[label]!r}; "
                  "--header no takes it for data", flush=True)
    elif columns.header == "no":
        raise DataError.of("--header", "no", "leaves the columns without names",
                           "give --text-columns and --label-column as numbers, counted from 1")
    else:
        names = [name.strip() for name in first_row]
        text_names, label_name = _chosen_names(path, names, columns)
        *texts, label = (_place(name, names) for name in (*text_names, label_name))
        has_header = True
    for number, row in rows[1:] if has_header else rows:
        place = f"{path}, line {number}"
        if not 0 <= min(*texts, label) <= max(*texts, label) < len(row):
            raise DataError.of("file", place, f"has {len(row)} columns; number {max(*texts, label) + 1} is needed",
                               "correct or remove the line, or choose other columns; they count from 1")
        yield _example(place, [row[text] for text in texts], row[label].strip())


def _looks_like_header(rows: Sequence[tuple[int, list[str]]], label: int, known_labels: Collection[str]) -> bool:
    first, *others = (row[label].strip() if 0 <= label < len(row) else "" for _, row in rows)
    return len(others) > 1 and bool(first) and first not in (known_labels or others)


def _chosen_names(path: Path, names: Sequence[str], columns: Columns) -> tuple[tuple[str, ...], str]:
    texts = columns.texts or next((usual for usual in USUAL_TEXTS if set(usual) <= set(names)), ())
    label = columns.label or next((usual for usual in USUAL_LABELS if usual in names), None)
    for flag, wanted in (("--text-columns", texts), ("--label-column", (label,) if label else ())):
        unknown = [name for name in wanted if name not in names and not _is_number(name, names)]
        if unknown:
            raise DataError.of(flag, unknown[0], f"is no column of {path}; its first row holds {_shown(names)}",
                               "give one of these names, or for a file without a header numbers, counted from 1, for "
                               "all columns")
        if not wanted:
            raise DataError.of(flag, "none", f"{path} has none of the usual columns; its first row holds "
                               f"{_shown(names)}", "name the column, or give its number where there is no header")
    assert label is not None
    return texts, label


def _is_number(name: str, names: Sequence[str]) -> bool:
    return name.isdecimal() and 1 <= int(name) <= len(names)


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else int(name) - 1


def _example(place: str, texts: Sequence[str], label: str) -> Example:
    if not label:
        raise DataError.of("file", place, "has an empty label", "add it, or remove the line")
    return Example(tuple(texts), label)


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name if len(name) <= 40 else name[:37] + "...") for name in names[:10])
    return shown + (f" and {len(names) - 10} more" if len(names) > 10 else "")
