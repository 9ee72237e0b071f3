"""The documents of one input: how each format is cut into records, and how a record is decoded.

A record is not decoded where it is read, so that the process which reads the files does little.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

from bert_ds.data.input_files import INPUT_SETTING, InputFile, missing_package
from bert_ds.errors import DataError

RecordFormat = Literal["jsonl", "text", "parquet"]

_SKIPPED_AT_ONCE = 1 << 20
_ROWS_AT_ONCE = 256
_START_BYTES = 256
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HALF_SURROGATE = re.compile("[\ud800-\udfff]")
_ONE_OBJECT_A_LINE = 'write one JSON object a line, such as {"text": "..."}'
_NAME_THE_KEYS = "name the keys that hold text with --json-keys"


@dataclass(frozen=True)
class Record:
    """The bytes of one document as they stand in the file."""

    line: int
    """Number of its first line, or of its row in a table, from 1."""
    size: int
    """Bytes; beyond the largest document, nothing of the content is kept."""
    content: bytes = b""
    """Lines of the file."""
    cells: tuple[bytes | None, ...] = ()
    """For a row of a table, the text of each key instead."""


class UnusableError(Exception):
    """A record that cannot be used as it is."""

    def __init__(self, reason: str, repair: str, *, lines_below: int = 0, is_replaceable: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.repair = repair
        self.lines_below = lines_below
        """Lines between the record's first and the one that is meant."""
        self.is_replaceable = is_replaceable
        """Whether a replacement character in place of what is wrong would make it usable."""


@dataclass(frozen=True)
class Line:
    """One line with its number, from 1; without content beyond the largest document."""

    number: int
    size: int
    content: bytes
    start: bytes
    """The first bytes that are not blank, of any line."""


def numbered_lines(opened: InputFile, longest: int) -> Iterator[Line]:
    """Lines of an input in memory bounded by `longest` bytes; raises DataError where it cannot be read further."""
    number = 0
    try:
        while content := opened.stream.readline(longest + 1):
            number += 1
            if number == 1:
                content = content.removeprefix(_BYTE_ORDER_MARK)
            size, start = len(content), content[:_START_BYTES].lstrip()
            if size > longest:
                while content and not content.endswith(b"\n"):
                    content = opened.stream.readline(_SKIPPED_AT_ONCE)
                    size += len(content)
                content = b""
            yield Line(number, size, content, start)
    except opened.read_errors as error:
        raise DataError.of(INPUT_SETTING, f"{opened.path}:{number + 1}", f"cannot be read further ({error})",
                           "copy or compress the file again") from None


def first_line_and_all(lines: Iterator[Line]) -> tuple[Line | None, Iterator[Line]]:
    """The first line that is not blank, and all lines from there on."""
    first = next((line for line in lines if not line.content.isspace()), None)
    return first, chain([] if first is None else [first], lines)


def json_records(lines: Iterable[Line]) -> Iterator[Record]:
    """A record for every line that is not blank."""
    for line in lines:
        if not line.content.isspace():
            yield Record(line.number, line.size, line.content)


def text_records(lines: Iterable[Line], longest: int) -> Iterator[Record]:
    """A record for what stands between blank lines."""
    first, size, content = 0, 0, list[bytes]()
    for line in lines:
        if line.content.isspace():
            if size:
                yield Record(first, size, b"".join(content))
            size, content = 0, []
            continue
        first = first if size else line.number
        size += line.size
        content.append(line.content)
        if size > longest:
            content = []
    if size:
        yield Record(first, size, b"".join(content))


def parquet_records(path: str, keys: Sequence[str], longest: int) -> Iterator[tuple[Record, float]]:
    """A record for every row, with the columns `keys`, and the share of the file read with it. Raises DataError."""
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise missing_package(path, "parquet", "pyarrow") from None
    row = 0
    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_SKIPPED_AT_ONCE) as table:
            _check_columns(path, table.schema_arrow, keys, pa)
            for batch in table.iter_batches(_ROWS_AT_ONCE, columns=list(keys)):
                columns = [batch.column(key).cast(pa.large_binary()).to_pylist() for key in keys]
                for cells in zip(*columns, strict=True):
                    row += 1
                    size = sum(len(cell) for cell in cells if cell is not None)
                    yield Record(row, size, cells=cells if size <= longest else ()), row / table.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise DataError.of(INPUT_SETTING, f"{path}:{row + 1}", f"cannot be read further ({error})",
                           "copy the file again") from None


def _check_columns(path: str, schema: Any, keys: Sequence[str], pa: Any) -> None:
    for key in keys:
        if key not in schema.names:
            raise DataError.of(INPUT_SETTING, path, f'has no column "{key}" (its columns: {", ".join(schema.names)})',
                               "name the columns that hold text with --json-keys")
        kind = schema.field(key).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError.of(INPUT_SETTING, path, f'its column "{key}" is of type {kind}, not string',
                               "name the columns that hold text with --json-keys")


def texts_of(record: Record, record_format: RecordFormat, keys: Sequence[str], longest: int, *,
             replace: bool = False) -> tuple[str, ...]:
    """One text for each key; plain text is the same for every key. Raises UnusableError.

    replace: puts the replacement character U+FFFD where bytes are no UTF-8 or half a surrogate pair stands.
    """
    if record.size > longest:
        raise UnusableError(f"is a document of {record.size / 1e6:.1f} MB, more than the {longest / 1e6:g} MB that "
                            "are allowed", "cut it into several documents, or raise --max-document-mb (a process takes "
                            "up to 10 times the size of a document)")
    return _TEXTS[record_format](record, keys, replace)


def _json_texts(record: Record, keys: Sequence[str], replace: bool) -> tuple[str, ...]:
    try:
        content = json.loads(_decoded(record.content, replace).rstrip())
    except json.JSONDecodeError as error:
        raise UnusableError(f"is not a JSON object ({error.msg}: character {error.pos + 1})",
                            _ONE_OBJECT_A_LINE) from None
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"is not a usable JSON object ({error})", _ONE_OBJECT_A_LINE) from None
    if not isinstance(content, dict):
        raise UnusableError(f"is a JSON {type(content).__name__}, not an object", _ONE_OBJECT_A_LINE)
    return tuple(_json_text(content, key, replace) for key in keys)


def _json_text(content: dict[str, object], key: str, replace: bool) -> str:
    if key not in content:
        others = ", ".join(map(json.dumps, islice(content, 8))) or "none"
        raise UnusableError(f'has no key "{key}" (its keys: {others})', _NAME_THE_KEYS)
    text = content[key]
    if not isinstance(text, str):
        raise UnusableError(f'the value of "{key}" is of type {type(text).__name__}, not a string', _NAME_THE_KEYS)
    if replace:
        return _HALF_SURROGATE.sub("\ufffd", text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableError(f'"{key}" holds half a surrogate pair ({text[error.start]!r}), which is no character',
                            "write the character itself, or both halves", is_replaceable=True) from None
    return text


def _plain_texts(record: Record, keys: Sequence[str], replace: bool) -> tuple[str, ...]:
    return (_decoded(record.content, replace),) * len(keys)


def _table_texts(record: Record, keys: Sequence[str], replace: bool) -> tuple[str, ...]:
    for key, cell in zip(keys, record.cells, strict=True):
        if cell is None:
            raise UnusableError(f'has no value in the column "{key}"', "leave such rows out of the file")
    return tuple(_decoded(cell, replace) for cell in record.cells if cell is not None)


def _decoded(content: bytes, replace: bool) -> str:
    try:
        return content.decode("utf-8", "replace" if replace else "strict")
    except UnicodeDecodeError as error:
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise UnusableError(
            f"is not UTF-8 (byte {content[error.start]:#04x} at position {column} of the line)",
            "convert the file to UTF-8, or use --on-error replace",
            lines_below=content.count(b"\n", 0, error.start), is_replaceable=True) from None


_TEXTS: dict[RecordFormat, Callable[[Record, Sequence[str], bool], tuple[str, ...]]] = {
    "jsonl": _json_texts,
    "text": _plain_texts,
    "parquet": _table_texts,
}
