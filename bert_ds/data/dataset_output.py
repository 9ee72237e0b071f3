"""Datasets of several files that appear together, complete or not at all.

Everything is written under names that end in `.partial`. What a killed run left of these is removed when the next one
starts; two runs cannot write the same dataset at once.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np

from bert_ds.data.dataset_metadata import DatasetMetadata, metadata_path
from bert_ds.data.indexed_dataset import IndexedDatasetWriter
from bert_ds.errors import DataError

_SETTING = "--output-prefix"


@contextmanager
def dataset_writers(prefixes: Sequence[str],
                    dtype: np.dtype[np.generic]) -> Iterator[tuple[IndexedDatasetWriter, ...]]:
    """Writers for one dataset a prefix; what `publish` has not given its name is removed at the end.

    Raises DataError when a dataset cannot be written, or when another process is writing it.
    """
    try:
        with ExitStack() as stack:
            for prefix in prefixes:
                stack.enter_context(_only_writer(prefix))
                _partial_metadata(prefix).unlink(missing_ok=True)
                stack.callback(_partial_metadata(prefix).unlink, missing_ok=True)
            writers = list[IndexedDatasetWriter]()
            for prefix in prefixes:
                writers.append(IndexedDatasetWriter(prefix, dtype))
                stack.callback(writers[-1].discard)
            yield tuple(writers)
    except OSError as error:
        raise DataError.of(_SETTING, " ".join(prefixes), f"cannot be written ({error.strerror or error})",
                           "choose a folder that you may write to, on a disk with enough space") from error


def publish(writers: Sequence[IndexedDatasetWriter], metadata: Sequence[DatasetMetadata | None]) -> None:
    """Completes all datasets, then gives the files their names, `.idx` last: a failure leaves whole datasets only.

    Datasets of the same names are replaced.
    """
    for writer, of_writer in zip(writers, metadata, strict=True):
        writer.complete()
        if of_writer is not None:
            _write_synced(_partial_metadata(writer.prefix), of_writer.text())
    for writer, of_writer in zip(writers, metadata, strict=True):
        Path(f"{writer.prefix}.idx").unlink(missing_ok=True)
        if of_writer is None:
            metadata_path(writer.prefix).unlink(missing_ok=True)
        else:
            _partial_metadata(writer.prefix).replace(metadata_path(writer.prefix))
        writer.finalize()


def _partial_metadata(prefix: str) -> Path:
    return Path(f"{metadata_path(prefix)}.partial")


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _only_writer(prefix: str) -> Iterator[None]:
    """Holds a lock that ends with this process, however that ends."""
    path = Path(f"{prefix}.lock.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, prefix):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path, prefix: str) -> TextIO:
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError.of(_SETTING, prefix, "another process is writing it", "wait for that process, or choose "
                               "another name") from None
        # The one that held it before may have removed the file in between.
        if path.exists() and os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            return file
        file.close()
