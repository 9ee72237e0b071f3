"""Writing a checkpoint. Which rank calls what, and the barriers between, are the caller's:

1. one rank a folder: `prepare_folder`, `write_vocabulary`;
2. every rank: `write_rank_file`, into `incomplete_folder`;
3. one rank a folder, with the file records of all ranks: `commit`.

Until `commit` has renamed the folder nobody takes it for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import (
    INCOMPLETE,
    LATEST_FILE,
    MANIFEST_FILE,
    REPLACED,
    VOCABULARY_FILE,
    FileRecord,
    Manifest,
    SliceRecord,
    VocabularyRecord,
    rank_file,
    step_of,
)
from bert_ds.checkpoint.tensor_file import TensorSpec, write_tensor_file
from bert_ds.errors import CheckpointError, raise_if_any

_SETTING = "output.save"


@dataclass(frozen=True)
class TensorSlice:
    """What one rank saves of one parameter: elements [start, stop) of its flattened tensor-parallel piece.

    A parameter that is not cut is piece 0 of 1 and is saved by one tensor-parallel rank only.
    """

    kind: str
    """One of format.KINDS."""
    name: str
    """Logical name of the parameter."""
    tp_index: int
    tp_count: int
    start: int
    stop: int
    tensor: Tensor
    """[stop - start], fp32, on any device."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def record(self) -> SliceRecord:
        return SliceRecord(self.tp_index, self.tp_count, self.start, self.stop)


def incomplete_folder(save_dir: Path, tag: str) -> Path:
    """Where checkpoint `tag` lies until it is committed."""
    return save_dir / (tag + INCOMPLETE)


def prepare_folder(save_dir: Path, tag: str) -> Path:
    """Makes an empty folder for checkpoint `tag` and returns it; what killed saves have left in `save_dir` goes."""
    with files.os_errors_reported(_SETTING, save_dir):
        save_dir.mkdir(parents=True, exist_ok=True)
        for stale in save_dir.glob(f"iter_*{INCOMPLETE}"):
            if step_of(stale.name.removesuffix(INCOMPLETE)) is not None:
                files.remove_folder(stale)
        folder = incomplete_folder(save_dir, tag)
        folder.mkdir()
    return folder


def write_vocabulary(folder: Path, vocab_file: Path, *, size: int, tokenizer_type: str) -> VocabularyRecord:
    """Copies the vocabulary of the run, of `size` entries, into the prepared `folder`."""
    with files.os_errors_reported(_SETTING, folder):
        copied = files.copy_durably(vocab_file, folder / VOCABULARY_FILE)
    return VocabularyRecord(copied.sha256, size, tokenizer_type)


def write_rank_file(folder: Path, rank: int, slices: Iterable[TensorSlice]) -> FileRecord:
    """Writes and syncs the tensors of `rank` into the prepared `folder`; at most one range a kind and parameter.

    Tensors come to the CPU one at a time; empty ranges are left out.
    """
    kept = [piece for piece in slices if piece.stop > piece.start]
    records = {piece.key: piece.record for piece in kept}
    assert len(records) == len(kept), "two ranges of one parameter in one file"
    specs = [TensorSpec(piece.key, (piece.stop - piece.start,), torch.float32) for piece in kept]
    name = rank_file(rank)
    with files.os_errors_reported(_SETTING, folder):
        written = write_tensor_file(folder / name, specs, (piece.tensor for piece in kept), {"format": "pt"})
    return FileRecord(name, written.bytes, written.sha256, records)


def commit(save_dir: Path, tag: str, manifest: Manifest) -> Path:
    """Makes the prepared folder of `tag` a checkpoint, then lets `latest` point to it; returns its final path.

    A checkpoint of the same tag is replaced, and deleted only after `latest` has moved.

    Raises:
        CheckpointError: the files in `manifest` do not cover every parameter, or the disk refuses.
    """
    raise_if_any(CheckpointError, manifest.problems())
    folder, final, former = incomplete_folder(save_dir, tag), save_dir / tag, save_dir / (tag + REPLACED)
    with files.os_errors_reported(_SETTING, save_dir):
        files.write_durably(folder / MANIFEST_FILE, [manifest.to_json()])
        files.sync_folder(folder)
        if final.exists():
            files.remove_folder(former)
            files.rename_durably(final, former)
        files.rename_durably(folder, final)
        files.replace_durably(save_dir / LATEST_FILE, f"{tag}\n".encode())
        files.remove_folder(former)
    return final
