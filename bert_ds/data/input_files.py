"""Opening what a corpus comes in: files by name or pattern, compressed or not, and standard input."""

from __future__ import annotations

import glob
import gzip
import io
import os
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, cast

from bert_ds.errors import DataError, Problem, UserError, raise_if_any

STANDARD_INPUT = "-"
INPUT_SETTING = "--input"
PARQUET_MAGIC = b"PAR1"

_BUFFER_BYTES = 1 << 17
_LARGEST_ZSTD_WINDOW = 1 << 31
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_NOT_READ = {b"BZh": ("bzip2", "bzcat"), b"\xfd7zXZ": ("xz", "xzcat"), b"PK\x03\x04": ("zip", "unzip -p")}
_TEXT_PER_STORED_BYTE = {_GZIP_MAGIC: 3.0, _ZSTD_MAGIC: 3.5, PARQUET_MAGIC: 2.0}
_EXTRACT = ("extract its text first, for example with WikiExtractor (python -m wikiextractor.WikiExtractor DUMP --json "
            "-o extracted) and --input 'extracted/*/wiki_*' --json-keys text")


@dataclass(frozen=True)
class InputFile:
    """One opened input."""

    path: str
    stream: io.BufferedIOBase
    """Its bytes, decompressed."""
    stored: _CountedReader
    read_errors: tuple[type[Exception], ...]
    """What the stream raises where the file is damaged."""

    @property
    def bytes_read(self) -> int:
        """Bytes as stored, that have been read so far."""
        return self.stored.count


def expand(patterns: Sequence[str]) -> tuple[str, ...]:
    """The files that paths and glob patterns name, those of a pattern sorted. Raises DataError for all that is wrong.

    A path that exists is taken as it stands; "**" in a pattern matches folders of any depth.
    """
    paths = list[str]()
    problems = list[Problem]()
    for pattern in patterns:
        found = [pattern]
        if pattern != STANDARD_INPUT and not os.path.lexists(pattern) and glob.has_magic(pattern):
            found = sorted(path for path in glob.glob(pattern, recursive=True) if not Path(path).is_dir())
            if not found:
                problems.append(Problem(INPUT_SETTING, pattern, "matches no file", "check folder and pattern"))
        paths += found
    problems += [problem for path in paths for problem in _path_problems(path)]
    if paths.count(STANDARD_INPUT) > 1:
        problems.append(Problem(INPUT_SETTING, STANDARD_INPUT, "is given twice", "name standard input once"))
    raise_if_any(DataError, problems)
    return tuple(paths)


def stored_bytes(path: str) -> int | None:
    """Size of a file; None for standard input and pipes. Raises DataError when there is none."""
    if path == STANDARD_INPUT:
        return None
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(_cannot_be_read(path, error)) from None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def estimated_text_bytes(path: str) -> float:
    """About how many bytes of text an input holds, by usual compression rates; 0 where its size is unknown."""
    size = stored_bytes(path)
    if size is None:
        return 0.0
    with _opened(path) as file:
        return size * _TEXT_PER_STORED_BYTE.get(_known_magic(file.read(4)), 1.0)


def is_parquet(path: str) -> bool:
    """Whether the input is a parquet file; raises DataError when it comes through a pipe, where none can be read."""
    if stored_bytes(path) is None:
        return False
    with _opened(path) as file:
        return file.read(4) == PARQUET_MAGIC


@contextmanager
def open_input(path: str) -> Iterator[InputFile]:
    """Opens an input for reading its decompressed bytes; raises DataError when it cannot be."""
    with _opened(path) as file:
        stored = _CountedReader(file)
        source = io.BufferedReader(stored, _BUFFER_BYTES)
        start = source.peek(8)
        magic = _known_magic(start)
        raise_if_any(DataError, _unreadable(path, start))
        errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
        stream: io.BufferedIOBase = source
        if magic == _GZIP_MAGIC:
            stream = gzip.GzipFile(fileobj=source)
        elif magic == _ZSTD_MAGIC:
            library = _zstandard(path)
            errors = (*errors, library.ZstdError)
            stream = io.BufferedReader(cast(io.RawIOBase, _ZstdReader(source, library)), _BUFFER_BYTES)
        yield InputFile(path, stream, stored, errors)


class _CountedReader(io.RawIOBase):
    """Counts the bytes that are read from a file, which need not be seekable."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        content = self._file.read1(len(buffer))  # type: ignore[attr-defined]
        buffer[:len(content)] = content
        self.count += len(content)
        return len(content)


class _ZstdReader(io.RawIOBase):
    """Decompresses frame after frame. Unlike the library's own reader it raises EOFError where a file is cut short."""

    def __init__(self, source: io.BufferedIOBase, library: ModuleType) -> None:
        self._source = source
        self._decompressor = library.ZstdDecompressor(max_window_size=_LARGEST_ZSTD_WINDOW)
        self._frame = None
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._content:
            compressed = self._source.read1(_BUFFER_BYTES)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("the file ends within a zstd frame")
                return 0
            self._content = memoryview(self._decompressed(compressed))
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def _decompressed(self, compressed: bytes) -> bytes:
        parts = []
        while compressed:
            frame = self._frame or self._decompressor.decompressobj()
            parts.append(frame.decompress(compressed))
            self._frame = None if frame.eof else frame
            compressed = frame.unused_data if frame.eof else b""
        return b"".join(parts)


def _zstandard(path: str) -> ModuleType:
    try:
        import zstandard  # noqa: PLC0415 - an extra
    except ImportError:
        raise missing_package(path, "zstd", "zstandard") from None
    return zstandard


def missing_package(path: str, extra: str, package: str) -> UserError:
    """The error for an input whose format needs a package that is not installed."""
    return DataError.of(INPUT_SETTING, path, f"needs the package {package}, which is not installed",
                        f"pip install {package}, or install bert_ds with the extra `{extra}`")


def _known_magic(start: bytes) -> bytes:
    return next((magic for magic in _TEXT_PER_STORED_BYTE if start.startswith(magic)), b"")


def _unreadable(path: str, start: bytes) -> Iterator[Problem]:
    """Formats that are recognised and not read."""
    for magic, (name, tool) in _NOT_READ.items():
        if start.startswith(magic):
            repair = f"{tool} FILE | python -m bert_ds.preprocess_data --input - ..."
            yield Problem(INPUT_SETTING, path, f"is compressed with {name}, which is not read",
                          _EXTRACT if ".xml" in path else f"decompress it: {repair}")
    if start.startswith(PARQUET_MAGIC):
        yield Problem(INPUT_SETTING, path, "is parquet that comes through a pipe", "give the name of the file")


def markup_problem(path: str, line: bytes) -> Problem | None:
    """What is wrong with an input whose first line is `line`, when it is a dump that needs another program first."""
    if line.startswith(b"<doc "):
        return Problem(INPUT_SETTING, path, "is marked-up output of WikiExtractor", "run WikiExtractor with --json")
    if line.startswith(b"<mediawiki"):
        return Problem(INPUT_SETTING, path, "is a dump in XML", _EXTRACT)
    return None


def _path_problems(path: str) -> Iterator[Problem]:
    if path == STANDARD_INPUT:
        return
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            yield Problem(INPUT_SETTING, path, "is a folder", f"name its files, such as '{path.rstrip('/')}/*.jsonl'")
        elif stat.S_ISREG(mode):  # a pipe can be opened only once
            _opened_file(path).close()
    except OSError as error:
        yield _cannot_be_read(path, error)


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == STANDARD_INPUT:
        yield sys.stdin.buffer
        return
    try:
        file = _opened_file(path)
    except OSError as error:
        raise DataError(_cannot_be_read(path, error)) from None
    with closing(file):
        yield file


def _opened_file(path: str) -> BinaryIO:
    return open(path, "rb")


def _cannot_be_read(path: str, error: OSError) -> Problem:
    return Problem(INPUT_SETTING, path, f"cannot be read ({error.strerror})",
                   "give the path of a text, JSONL or parquet file, a pattern in quotes, or - for standard input")
