"""Reading corpora as a stream of chunks: JSON lines, plain text and parquet, from files, patterns or standard input.

A chunk holds undecoded records; those that receive the chunks decode them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_ds.data.input_files import (
    INPUT_SETTING,
    estimated_text_bytes,
    expand,
    is_parquet,
    markup_problem,
    open_input,
    stored_bytes,
)
from bert_ds.data.records import (
    Line,
    Record,
    RecordFormat,
    UnusableError,
    first_line_and_all,
    json_records,
    numbered_lines,
    parquet_records,
    text_records,
    texts_of,
)
from bert_ds.errors import DataError

INPUT_FORMATS = ("auto", "jsonl", "text")
ON_ERROR = ("stop", "skip", "replace")
LARGEST_DOCUMENT_MB = 64.0

_CHUNK_BYTES = 512 * 1024
_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_REPORTED_RECORDS = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used as it is, and why."""

    location: str
    reason: str
    repair: str
    is_replaced: bool = False
    """Whether it was used with replacement characters."""


@dataclass(frozen=True)
class Document:
    """One document, decoded."""

    location: str
    """`file:line` where it starts."""
    texts: tuple[str, ...]
    """One text for each requested key."""
    flaw: BadRecord | None = None
    """What was replaced in it, if anything."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of one file; picklable."""

    path: str
    format: RecordFormat
    records: tuple[Record, ...]
    longest: int
    """Bytes beyond which a document is refused."""
    size: int
    """Bytes of the records."""
    bytes_read: int
    """Bytes of all files, as stored, that were read up to the end of this chunk."""

    @property
    def location(self) -> str:
        return f"{self.path}:{self.records[0].line}"

    def documents(self, keys: Sequence[str], *, replace: bool = False) -> Iterator[Document | BadRecord]:
        """Decodes the records; `keys` select the texts of a JSON object or the columns of a table.

        replace: uses documents with characters that cannot be decoded, these replaced by U+FFFD.
        """
        for record in self.records:
            try:
                yield Document(f"{self.path}:{record.line}", texts_of(record, self.format, keys, self.longest))
            except UnusableError as error:
                bad = self._bad_record(record, error)
                yield self._replaced(record, keys, bad) if replace and error.is_replaceable else bad

    def _replaced(self, record: Record, keys: Sequence[str], bad: BadRecord) -> Document | BadRecord:
        try:
            texts = texts_of(record, self.format, keys, self.longest, replace=True)
        except UnusableError as error:
            return self._bad_record(record, error)
        return Document(f"{self.path}:{record.line}", texts,
                        BadRecord(bad.location, bad.reason, bad.repair, is_replaced=True))

    def _bad_record(self, record: Record, error: UnusableError) -> BadRecord:
        return BadRecord(f"{self.path}:{record.line + error.lines_below}", error.reason, error.repair)


class TextSources:
    """Several inputs as one stream, in the given order, files of a pattern sorted. Raises DataError at once for all
    that cannot be opened."""

    def __init__(self, inputs: Sequence[str], input_format: str = "auto", *,
                 largest_document_mb: float = LARGEST_DOCUMENT_MB) -> None:
        self.paths = expand(inputs)
        sizes = [stored_bytes(path) for path in self.paths]
        self.total_bytes = None if None in sizes else sum(size for size in sizes if size is not None)
        """Bytes of all files, as stored; None when standard input or a pipe is among them."""
        self._format = input_format
        self._longest = int(largest_document_mb * 1e6)

    def is_repeatable(self) -> bool:
        """Whether the inputs can be read a second time."""
        return self.total_bytes is not None

    def estimated_text_bytes(self) -> float:
        """About how many bytes of text the inputs hold, those of unknown size left out."""
        return sum(map(estimated_text_bytes, self.paths))

    def chunks(self, keys: Sequence[str]) -> Iterator[Chunk]:
        """The records of all files. Raises DataError where a file cannot be read to its end.

        keys: columns that are read of a table; files of lines are read whole.
        """
        bytes_before = 0
        for path in self.paths:
            bytes_read = 0
            for chunk_format, records, size, bytes_read in self._chunks_of(path, keys):
                yield Chunk(path, chunk_format, records, self._longest, size, bytes_before + bytes_read)
            bytes_before += bytes_read

    def documents(self, keys: Sequence[str], bad_records: BadRecords) -> Iterator[Document]:
        """The decoded documents of all files; what cannot be used goes to `bad_records`."""
        for chunk in self.chunks(keys):
            for document in chunk.documents(keys, replace=bad_records.replaces):
                flaw = document if isinstance(document, BadRecord) else document.flaw
                if flaw is not None:
                    bad_records.add(flaw)
                if isinstance(document, Document):
                    yield document

    def _chunks_of(self, path: str,
                   keys: Sequence[str]) -> Iterator[tuple[RecordFormat, tuple[Record, ...], int, int]]:
        if is_parquet(path):
            size, share = stored_bytes(path) or 0, 0.0

            def rows() -> Iterator[Record]:
                nonlocal share
                for row, share in parquet_records(path, keys, self._longest):  # noqa: B007
                    yield row

            for records, text_bytes in _grouped(rows()):
                yield "parquet", records, text_bytes, int(share * size)
            return
        with open_input(path) as opened:
            first, lines = first_line_and_all(numbered_lines(opened, self._longest))
            line_format = self._format_of(path, first)
            cut = json_records(lines) if line_format == "jsonl" else text_records(lines, self._longest)
            for records, text_bytes in _grouped(cut):
                yield line_format, records, text_bytes, opened.bytes_read

    def _format_of(self, path: str, first: Line | None) -> RecordFormat:
        """Format of a file of lines, by its name or its first line that is not blank."""
        if self._format != "auto":
            return "jsonl" if self._format == "jsonl" else "text"
        if Path(path.removesuffix(".gz").removesuffix(".zst")).suffix in _JSON_SUFFIXES:
            return "jsonl"
        start = first.start if first else b""
        problem = markup_problem(path, start)
        if problem is not None:
            raise DataError(problem)
        return "jsonl" if start.startswith(b"{") else "text"


class BadRecords:
    """What happens to records that cannot be used as they are: the first one stops the work, or all are counted, and
    left out or used with replacement characters."""

    def __init__(self, on_error: str, *, report: bool = True) -> None:
        self._on_error = on_error
        self._reported = _REPORTED_RECORDS if report else 0
        self.count = 0
        """Records that were left out."""
        self.replaced = 0
        """Records in which characters were replaced."""

    @property
    def replaces(self) -> bool:
        return self._on_error == "replace"

    def add(self, record: BadRecord) -> None:
        """Raises DataError when this record stops the work."""
        if record.is_replaced:
            self.replaced += 1
            self._report("replaced characters in", record, self.replaced)
            return
        if self._on_error != "skip":
            raise DataError.of(INPUT_SETTING, record.location, record.reason,
                               f"{record.repair}, or leave such records out with --on-error skip")
        self.count += 1
        self._report("skipped", record, self.count)

    def _report(self, what: str, record: BadRecord, count: int) -> None:
        if count <= self._reported:
            logger.warning("%s %s: %s", what, record.location, record.reason)
        if count == self._reported:
            logger.warning("further such records are only counted")


def require_repeatable(sources: TextSources) -> None:
    """Raises DataError when the inputs cannot be read several times."""
    if not sources.is_repeatable():
        raise DataError.of(INPUT_SETTING, " ".join(sources.paths), "is read more than once, which a pipe does not "
                           "allow", "write it to a file first")


def _grouped(records: Iterable[Record]) -> Iterator[tuple[tuple[Record, ...], int]]:
    """Groups of records with their size in bytes."""
    group, size = list[Record](), 0
    for record in records:
        group.append(record)
        size += record.size
        if size >= _CHUNK_BYTES:
            yield tuple(group), size
            group, size = [], 0
    if group:
        yield tuple(group), size
