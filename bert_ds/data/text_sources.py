"""Reading corpora: JSON lines and plain text, gzipped or not, as a stream of chunks.

A chunk holds undecoded records, so that the process which reads the files does little and those that receive the
chunks decode them. Another format is another way to cut a file into records (`_RECORDS`) and to decode one (`_TEXTS`).
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal, cast

from bert_ds.errors import DataError, Problem, raise_if_any

INPUT_FORMATS = ("auto", "jsonl", "text")
ON_ERROR = ("stop", "skip")

InputFormat = Literal["jsonl", "text"]

_SETTING = "--input"
_CHUNK_BYTES = 512 * 1024
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_REPORTED_RECORDS = 10
_ONE_OBJECT_A_LINE = 'write one JSON object a line, such as {"text": "..."}'
_NAME_THE_KEYS = "name the keys that hold text with --json-keys"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """One document, decoded."""

    location: str
    """`file:line` where it starts."""
    texts: tuple[str, ...]
    """One text for each requested key."""


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used, and why."""

    location: str
    reason: str
    repair: str


@dataclass(frozen=True)
class Record:
    """The bytes of one document as they stand in the file."""

    line: int
    """Line number of its first line, from 1."""
    content: bytes


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of one file; picklable."""

    path: str
    format: InputFormat
    records: tuple[Record, ...]
    size: int
    """Bytes of the records."""
    bytes_read: int
    """Bytes of all files, as stored, that were read up to the end of this chunk."""

    @property
    def location(self) -> str:
        return f"{self.path}:{self.records[0].line}"

    def documents(self, keys: Sequence[str]) -> Iterator[Document | BadRecord]:
        """Decodes the records; `keys` select the texts of a JSON object, plain text is the same for every key."""
        texts_of = _TEXTS[self.format]
        for record in self.records:
            try:
                yield Document(f"{self.path}:{record.line}", texts_of(record, keys))
            except _UnusableError as error:
                yield BadRecord(f"{self.path}:{record.line + error.lines_below}", error.reason, error.repair)


class TextSources:
    """Several files as one stream, in the given order. Raises DataError at once for files that cannot be opened."""

    def __init__(self, paths: Sequence[str], input_format: str = "auto") -> None:
        raise_if_any(DataError, (problem for path in paths for problem in _file_problems(path)))
        self.paths = tuple(paths)
        self.total_bytes = sum(Path(path).stat().st_size for path in paths)
        """Bytes of all files, as stored."""
        self._format = input_format

    def chunks(self) -> Iterator[Chunk]:
        """The records of all files. Raises DataError where a file cannot be read to its end."""
        bytes_before = 0
        for path in self.paths:
            with _opened(path) as stored:
                text_format = self._format_of(path)
                for records, size in _grouped(_RECORDS[text_format](_lines(path, stored))):
                    yield Chunk(path, text_format, records, size, bytes_before + stored.tell())
                bytes_before += stored.tell()

    def documents(self, keys: Sequence[str], bad_records: BadRecords) -> Iterator[Document]:
        """The decoded documents of all files; what cannot be used goes to `bad_records`."""
        for chunk in self.chunks():
            for document in chunk.documents(keys):
                if isinstance(document, BadRecord):
                    bad_records.add(document)
                else:
                    yield document

    def _format_of(self, path: str) -> InputFormat:
        if self._format != "auto":
            return cast(InputFormat, self._format)
        if Path(path.removesuffix(".gz")).suffix in _JSON_SUFFIXES:
            return "jsonl"
        with _opened(path) as stored:
            first = next((content for _, content in _lines(path, stored) if content.strip()), b"")
        return "jsonl" if first.lstrip().startswith(b"{") else "text"


class BadRecords:
    """What happens to records that cannot be used: the first one stops the work, or all are counted and left out."""

    def __init__(self, on_error: str, *, report: bool = True) -> None:
        self._on_error = on_error
        self._reported = _REPORTED_RECORDS if report else 0
        self.count = 0

    def add(self, record: BadRecord) -> None:
        """Raises DataError when `on_error` is "stop"."""
        if self._on_error == "stop":
            raise DataError.of(_SETTING, record.location, record.reason,
                               f"{record.repair}, or leave such records out with --on-error skip")
        self.count += 1
        if self.count <= self._reported:
            logger.warning("skipped %s: %s", record.location, record.reason)
        if self.count == self._reported:
            logger.warning("further skipped records are only counted")


class _UnusableError(Exception):
    def __init__(self, reason: str, repair: str, lines_below: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.repair = repair
        self.lines_below = lines_below


def _file_problems(path: str) -> Iterator[Problem]:
    if Path(path).is_dir():
        yield Problem(_SETTING, path, "is a folder", f"name its files, such as {path.rstrip('/')}/*.jsonl")
        return
    try:
        _opened(path).close()
    except DataError as error:
        yield from error.problems


def _opened(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError.of(_SETTING, path, f"cannot be read ({error.strerror})",
                           "give the path of a text or JSONL file") from None


def _lines(path: str, stored: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of a file that may be gzipped."""
    is_gzip = stored.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    stored.seek(0)
    number = 0
    try:
        for number, line in enumerate(gzip.open(stored) if is_gzip else stored, start=1):
            yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError.of(_SETTING, f"{path}:{number + 1}", f"cannot be read further ({error})",
                           "copy or compress the file again") from None


def _json_records(lines: Iterable[tuple[int, bytes]]) -> Iterator[Record]:
    for number, line in lines:
        if not line.isspace():
            yield Record(number, line)


def _text_records(lines: Iterable[tuple[int, bytes]]) -> Iterator[Record]:
    """Documents of plain text: what stands between blank lines."""
    first, document = 0, list[bytes]()
    for number, line in lines:
        if not line.isspace():
            first = first if document else number
            document.append(line)
        elif document:
            yield Record(first, b"".join(document))
            document = []
    if document:
        yield Record(first, b"".join(document))


def _grouped(records: Iterable[Record]) -> Iterator[tuple[tuple[Record, ...], int]]:
    """Groups of records with their size in bytes."""
    group, size = list[Record](), 0
    for record in records:
        group.append(record)
        size += len(record.content)
        if size >= _CHUNK_BYTES:
            yield tuple(group), size
            group, size = [], 0
    if group:
        yield tuple(group), size


def _json_texts(record: Record, keys: Sequence[str]) -> tuple[str, ...]:
    try:
        content = json.loads(_decoded(record.content).rstrip())
    except json.JSONDecodeError as error:
        raise _UnusableError(f"is not a JSON object ({error.msg}: character {error.pos + 1})",
                             _ONE_OBJECT_A_LINE) from None
    except (ValueError, RecursionError) as error:
        raise _UnusableError(f"is not a usable JSON object ({error})", _ONE_OBJECT_A_LINE) from None
    if not isinstance(content, dict):
        raise _UnusableError(f"is a JSON {type(content).__name__}, not an object", _ONE_OBJECT_A_LINE)
    return tuple(_json_text(content, key) for key in keys)


def _json_text(content: dict[str, object], key: str) -> str:
    if key not in content:
        others = ", ".join(map(json.dumps, islice(content, 8))) or "none"
        raise _UnusableError(f'has no key "{key}" (its keys: {others})', _NAME_THE_KEYS)
    text = content[key]
    if not isinstance(text, str):
        raise _UnusableError(f'the value of "{key}" is of type {type(text).__name__}, not a string', _NAME_THE_KEYS)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _UnusableError(f'"{key}" holds half a surrogate pair ({text[error.start]!r}), which is no character',
                             "write the character itself, or both halves") from None
    return text


def _plain_texts(record: Record, keys: Sequence[str]) -> tuple[str, ...]:
    return (_decoded(record.content),) * len(keys)


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise _UnusableError(f"is not UTF-8 (byte {content[error.start]:#04x} at position {column} of the line)",
                             "convert the file to UTF-8", lines_below=content.count(b"\n", 0, error.start)) from None


_RECORDS: dict[InputFormat, Callable[[Iterable[tuple[int, bytes]]], Iterator[Record]]] = {
    "jsonl": _json_records,
    "text": _text_records,
}
_TEXTS: dict[InputFormat, Callable[[Record, Sequence[str]], tuple[str, ...]]] = {
    "jsonl": _json_texts,
    "text": _plain_texts,
}
