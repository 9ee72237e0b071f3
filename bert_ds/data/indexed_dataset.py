"""Tokenised text in Megatron's indexed format: `<prefix>.bin` and `<prefix>.idx`, byte for byte.

`.bin` holds the tokens of all sentences back to back, without a header. `.idx`, all integers little-endian:

    offset        size  type      content
    0             9     bytes     MMIDIDX NUL NUL
    9             8     uint64    version, 1
    17            1     uint8     code of the tokens' type, see DTYPES
    18            8     uint64    S, sentences ("sequences")
    26            8     uint64    M, documents + 1
    34            4 S   int32     tokens of each sentence
    34+4S         8 S   int64     offset of each sentence in .bin, in bytes
    34+12S        8 M   int64     first sentence of each document; the last entry is S

Source of the format: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from bert_ds.errors import DataError, UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16,
}
LARGEST_UINT16_VOCABULARY = 65499

_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
_HEADER = struct.Struct("<9sQBQQ")
_SUFFIXES = (".bin", ".idx", ".documents")
_BUFFER_BYTES = 1 << 20
_CHUNK_SENTENCES = 1 << 20
_FINGERPRINT_BLOCK = 1 << 18
_FINGERPRINT_BLOCKS = 256
_SETTING = "--data-path"
_REMAKE = "make the pair again with `python -m bert_ds.preprocess_data`, or copy both files again"
_HOW_TO_MAKE = (
    "make the data with\n"
    "    python -m bert_ds.build_vocab --input TEXT --output data/vocab.txt\n"
    "    python -m bert_ds.preprocess_data --input TEXT --vocab-file data/vocab.txt --output-prefix data/corpus "
    "--split-sentences\n"
    "  and give the prefix that ends in _text_sentence"
)


def dtype_for_vocab(size: int) -> np.dtype[np.generic]:
    """Type in which Megatron stores tokens of a vocabulary of `size` entries."""
    return np.dtype(np.uint16 if size <= LARGEST_UINT16_VOCABULARY else np.int32)


class IndexedDatasetWriter:
    """Writes a pair of files in memory independent of its size.

    Everything goes to `<prefix>.bin.partial` and its like; `complete` finishes and syncs them, `finalize` renames
    `.bin`, then `.idx`. A writer that is killed, or left by an exception, leaves nothing that looks finished. As a
    context manager it finalizes on a normal exit and discards otherwise. Raises DataError when the files cannot be
    written, and ValueError when lengths do not fit the tokens or a token does not fit `dtype`.
    """

    def __init__(self, prefix: str, dtype: np.dtype[np.generic] | type[np.generic]) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.num_tokens = 0
        self.num_sentences = 0
        self.num_documents = 0
        self._is_complete = False
        with self._reporting_failures():
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._tokens, self._index, self._documents = (
                self._partial(suffix).open("wb", buffering=_BUFFER_BYTES) for suffix in _SUFFIXES)
            self._index.write(bytes(_HEADER.size))
            self._documents.write(struct.pack("<q", 0))

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.finalize()
        except BaseException:
            self.discard()
            raise

    def add_document(self, tokens: NDArray[np.integer], lengths: NDArray[np.integer] | Sequence[int]) -> None:
        """Adds one document: its tokens back to back, and the length of each sentence. It may have no sentence."""
        self.add_documents(tokens, lengths, [len(lengths)])

    def add_documents(self, tokens: NDArray[np.integer], lengths: NDArray[np.integer] | Sequence[int],
                      sentences_per_document: NDArray[np.integer] | Sequence[int]) -> None:
        """Adds several documents at once: all their tokens, all sentence lengths, and how many sentences each has."""
        stored = self._stored(np.asarray(tokens))
        lengths = np.asarray(lengths, dtype="<i4")
        ends = np.cumsum(sentences_per_document, dtype="<i8")
        if int(lengths.sum(dtype=np.int64)) != len(stored):
            raise ValueError(f"sentence lengths sum to {lengths.sum(dtype=np.int64)}, not to {len(stored)} tokens")
        if (int(ends[-1]) if len(ends) else 0) != len(lengths):
            raise ValueError(f"the documents do not hold {len(lengths)} sentences: {sentences_per_document}")
        with self._reporting_failures():
            self._tokens.write(stored.data)
            self._index.write(lengths.data)
            self._documents.write((ends + self.num_sentences).data)
        self.num_tokens += len(stored)
        self.num_sentences += len(lengths)
        self.num_documents += len(ends)

    def complete(self) -> None:
        """Finishes both files under their temporary names and syncs them; only renaming is left to do."""
        with self._reporting_failures():
            self._complete_index()
            for file in (self._tokens, self._index):
                file.flush()
                os.fsync(file.fileno())
                file.close()
            self._is_complete = True

    def finalize(self) -> None:
        """Completes the pair and gives it its name. An older pair of that name is replaced."""
        if not self._is_complete:
            self.complete()
        with self._reporting_failures():
            # An older .idx must not describe the .bin that comes.
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)
            for suffix in (".bin", ".idx"):
                self._partial(suffix).replace(f"{self.prefix}{suffix}")
            self._partial(".documents").unlink()
            _sync_folder(Path(self.prefix).parent)

    def discard(self) -> None:
        """Removes what was written."""
        for suffix, file in zip(_SUFFIXES, (self._tokens, self._index, self._documents), strict=True):
            with contextlib.suppress(OSError):
                file.close()
            self._partial(suffix).unlink(missing_ok=True)

    def _complete_index(self) -> None:
        """Appends pointers and document boundaries to the lengths and fills in the header."""
        self._documents.close()
        self._write_pointers()
        with self._partial(".documents").open("rb") as documents:
            shutil.copyfileobj(documents, self._index, _BUFFER_BYTES)
        self._index.seek(0)
        self._index.write(_HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], self.num_sentences, self.num_documents + 1))

    def _write_pointers(self) -> None:
        self._index.flush()
        offset = 0
        with self._partial(".idx").open("rb") as lengths:
            lengths.seek(_HEADER.size)
            for first in range(0, self.num_sentences, _CHUNK_SENTENCES):
                count = min(_CHUNK_SENTENCES, self.num_sentences - first)
                ends = offset + np.cumsum(np.frombuffer(lengths.read(4 * count), "<i4"), dtype="<i8")
                pointers = np.concatenate(([offset], ends[:-1])) * self.dtype.itemsize
                self._index.write(pointers.astype("<i8", copy=False).data)
                offset = int(ends[-1])

    def _stored(self, tokens: NDArray[np.integer]) -> NDArray[np.generic]:
        if tokens.dtype != self.dtype and len(tokens):
            limits = np.iinfo(self.dtype)  # type: ignore[type-var]
            if tokens.min() < limits.min or tokens.max() > limits.max:
                raise ValueError(f"tokens {tokens.min()} to {tokens.max()} do not fit {self.dtype}")
        return np.ascontiguousarray(tokens, dtype=self.dtype.newbyteorder("<"))

    def _partial(self, suffix: str) -> Path:
        return Path(f"{self.prefix}{suffix}.partial")

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError.of("--output-prefix", self.prefix, f"cannot be written ({error.strerror})",
                               "name a folder that is writable and has free space") from error


class IndexedDataset:
    """A pair of files mapped into memory, read-only; `dataset[i]` are the tokens of sentence i.

    Opening checks, in constant time, that the files exist, have the announced sizes and agree on their ends; `verify`
    checks every entry. Raises DataError.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        for suffix in (".idx", ".bin"):
            if not Path(prefix + suffix).is_file():
                raise DataError.of(_SETTING, prefix, f"there is no file {prefix}{suffix}", _repair_of_missing(prefix))
        self._index = index = _map(f"{prefix}.idx")
        self.dtype, num_sentences, num_boundaries = _checked_header(prefix, index)
        lengths_end = _HEADER.size + 4 * num_sentences
        pointers_end = lengths_end + 8 * num_sentences
        self.sequence_lengths: NDArray[np.int32] = np.frombuffer(index, "<i4", num_sentences, _HEADER.size)
        """[sentences], tokens of each sentence."""
        self.sequence_pointers: NDArray[np.int64] = np.frombuffer(index, "<i8", num_sentences, lengths_end)
        """[sentences], offset of each sentence in .bin, in bytes."""
        self.document_indices: NDArray[np.int64] = np.frombuffer(index, "<i8", num_boundaries, pointers_end)
        """[documents + 1], first sentence of each document, and the number of sentences."""
        tokens = _map(f"{prefix}.bin")
        _check_ends(self, len(tokens))
        self.tokens: NDArray[Any] = np.frombuffer(tokens, self.dtype)
        """[tokens], all sentences back to back."""

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, sentence: int) -> NDArray[np.generic]:
        length, pointer = int(self.sequence_lengths[sentence]), int(self.sequence_pointers[sentence])
        first, rest = divmod(pointer, self.dtype.itemsize)
        if rest or length < 0 or first < 0 or first + length > len(self.tokens):
            raise _damaged(self.prefix, f"sentence {sentence} points outside {self.prefix}.bin")
        return self.tokens[first:first + length]

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest that tells this index from others: of all of .idx, of evenly spread blocks when it is large.

        It does not depend on where the files lie or when they were written. Since offsets add up, almost any change of
        the text moves all the later ones.
        """
        digest = hashlib.sha256(f"{len(self._index)} {self.tokens.nbytes}".encode())
        last = max(len(self._index) - _FINGERPRINT_BLOCK, 0)
        step = max(last // _FINGERPRINT_BLOCKS, _FINGERPRINT_BLOCK)
        for offset in (*range(0, last, step), last):
            digest.update(self._index[offset:offset + _FINGERPRINT_BLOCK])
        return digest.hexdigest()

    def sampled_tokens(self, blocks: int = 64, tokens_of_block: int = 4096) -> NDArray[Any]:
        """Tokens of evenly spread blocks, the end of the file among them; all tokens when there are no more."""
        count = len(self.tokens)
        if count <= blocks * tokens_of_block:
            return self.tokens
        starts = np.linspace(0, count - tokens_of_block, blocks).astype(np.int64)
        return np.concatenate([self.tokens[start:start + tokens_of_block] for start in starts])

    def verify(self) -> None:
        """Checks every entry of the index (reads all of .idx); raises DataError naming the first that is wrong."""
        sentence = _first_bad_sentence(self.sequence_lengths, self.sequence_pointers, self.dtype.itemsize)
        if sentence >= 0:
            raise _damaged(self.prefix, f"the entry of sentence {sentence} in {self.prefix}.idx is wrong: tokens "
                                        f"{self.sequence_lengths[sentence]}, offset {self.sequence_pointers[sentence]}")
        document = _first_bad_document(self.document_indices)
        if document >= 0:
            raise _damaged(self.prefix, f"document {document} in {self.prefix}.idx ends before it begins")


def _map(path: str) -> mmap.mmap | bytes:
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError.of(_SETTING, path, f"cannot be read ({error.strerror})", "make the file readable") from error


def _checked_header(prefix: str, index: mmap.mmap | bytes) -> tuple[np.dtype[np.generic], int, int]:
    """Type of the tokens, number of sentences and of document boundaries."""
    path = f"{prefix}.idx"
    if index[:len(MAGIC)] != MAGIC:
        raise _damaged(prefix, f"{path} does not start with {MAGIC!r}, so it is no index of this format")
    if len(index) < _HEADER.size:
        raise _damaged(prefix, f"{path} ends within its header ({len(index)} of {_HEADER.size} bytes)")
    _, version, code, num_sentences, num_boundaries = _HEADER.unpack(index[:_HEADER.size])
    if version != VERSION:
        raise _damaged(prefix, f"{path} has version {version}, only {VERSION} is known")
    if code not in DTYPES:
        raise _damaged(prefix, f"{path} has the token type code {code}, known are {min(DTYPES)} to {max(DTYPES)}")
    expected = _HEADER.size + 12 * num_sentences + 8 * num_boundaries
    if len(index) != expected:
        raise _damaged(prefix, f"{path} has {len(index)} bytes where its header announces {expected} "
                               f"({num_sentences} sentences, {num_boundaries - 1} documents)")
    if num_sentences == 0 or num_boundaries < 2:
        raise DataError.of(_SETTING, prefix, f"{path} holds no sentence", "preprocess a text that is not empty")
    return np.dtype(DTYPES[code]).newbyteorder("<"), num_sentences, num_boundaries


def _check_ends(dataset: IndexedDataset, bin_bytes: int) -> None:
    prefix, boundaries = dataset.prefix, dataset.document_indices
    if boundaries[0] != 0 or boundaries[-1] != len(dataset):
        raise _damaged(prefix, f"the documents in {prefix}.idx cover sentences {boundaries[0]} to {boundaries[-1]}, "
                               f"not 0 to {len(dataset)}")
    needed = int(dataset.sequence_pointers[-1]) + int(dataset.sequence_lengths[-1]) * dataset.dtype.itemsize
    if bin_bytes < needed:
        raise _damaged(prefix, f"{prefix}.bin is cut short: it has {bin_bytes} bytes, {prefix}.idx needs {needed}")
    if bin_bytes > needed:
        raise _damaged(prefix, f"{prefix}.bin has {bin_bytes} bytes where {prefix}.idx describes {needed}: the two do "
                               "not belong together")
    if bin_bytes % dataset.dtype.itemsize:
        raise _damaged(prefix, f"{prefix}.bin has {bin_bytes} bytes, not a multiple of the {dataset.dtype.itemsize} of "
                               "a token")
    if not bin_bytes:
        raise DataError.of(_SETTING, prefix, f"{prefix}.bin holds no token", "preprocess a text that is not empty")


def _damaged(prefix: str, reason: str) -> UserError:
    return DataError.of(_SETTING, prefix, reason, _REMAKE)


def _repair_of_missing(prefix: str) -> str:
    guesses = (
        prefix.removesuffix(".bin").removesuffix(".idx"),
        prefix.removesuffix("_document") + "_sentence",
        prefix + "_text_sentence",
    )
    for guess in guesses:
        if Path(f"{guess}.idx").is_file():
            return f"use {guess}, which exists"
    return _HOW_TO_MAKE


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@numba.njit(cache=True, nogil=True)
def _first_bad_sentence(lengths: NDArray[np.int32], pointers: NDArray[np.int64], itemsize: int) -> int:
    """First sentence of negative length or not following its predecessor, or -1."""
    expected = np.int64(0)
    for i in range(len(lengths)):
        if lengths[i] < 0 or pointers[i] != expected:
            return i
        expected += np.int64(lengths[i]) * itemsize
    return -1


@numba.njit(cache=True, nogil=True)
def _first_bad_document(boundaries: NDArray[np.int64]) -> int:
    """First document that ends before it begins, or -1."""
    for i in range(len(boundaries) - 1):
        if boundaries[i + 1] < boundaries[i]:
            return i
    return -1
