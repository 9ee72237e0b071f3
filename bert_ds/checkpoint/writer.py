"""Writing a checkpoint. Which rank calls what, and the barriers between, are the caller's:

1. one rank a disk: `prepare_folder`, `write_vocabulary`;
2. every rank: `write_rank_file`, into `incomplete_folder`, and `prove_file` where something is to be deleted;
3. one rank a disk, with the file records of all ranks: `publish`;
4. one rank a disk, when all have published: `move_latest`, then `remove` what `superseded` named.

Until `publish` has renamed the folder nobody takes it for a checkpoint. `commit` is 3 and 4 for one disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import (
    DELETING,
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
    tag_for,
)
from bert_ds.checkpoint.reader import is_whole_here, tags_in
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


def prepare_folder(save_dir: Path, tag: str, needed_bytes: int = 0) -> Path:
    """Makes an empty folder for checkpoint `tag` and returns it; what killed saves have left in `save_dir` goes.

    Raises:
        CheckpointError: the disk has less than `needed_bytes` free, or refuses.
    """
    with files.os_errors_reported(_SETTING, save_dir):
        save_dir.mkdir(parents=True, exist_ok=True)
        remove_leftovers(save_dir)
        check_room(save_dir, needed_bytes)
        folder = incomplete_folder(save_dir, tag)
        folder.mkdir()
    return folder


def remove_leftovers(save_dir: Path) -> None:
    """Removes what killed saves and deletions have left in `save_dir`."""
    for suffix in (INCOMPLETE, DELETING):
        for stale in save_dir.glob(f"iter_*{suffix}"):
            if step_of(stale.name.removesuffix(suffix).removesuffix(REPLACED)) is not None:
                files.remove_folder(stale)


def check_room(save_dir: Path, needed_bytes: int) -> None:
    """Raises CheckpointError where the disk of `save_dir` has less than `needed_bytes` free."""
    free = files.free_bytes(save_dir)
    if needed_bytes > free:
        raise CheckpointError.of(
            _SETTING, save_dir, f"a checkpoint needs {size_text(needed_bytes)} and {size_text(free)} are free there",
            "free space, keep fewer checkpoints (--keep-last), or save to another disk")


def size_text(count: float) -> str:
    """A number of bytes as people read it."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"


def write_vocabulary(folder: Path, vocab_file: Path, *, size: int, tokenizer_type: str) -> VocabularyRecord:
    """Copies the vocabulary of the run, of `size` entries, into the prepared `folder`."""
    with files.os_errors_reported(_SETTING, folder):
        return write_vocabulary_text(folder, vocab_file.read_bytes(), size=size, tokenizer_type=tokenizer_type)


def write_vocabulary_text(folder: Path, text: bytes, *, size: int, tokenizer_type: str) -> VocabularyRecord:
    """Writes the content of a vocabulary file of `size` entries into the prepared `folder`."""
    with files.os_errors_reported(_SETTING, folder):
        written = files.write_durably(folder / VOCABULARY_FILE, [text])
    return VocabularyRecord(written.sha256, size, tokenizer_type)


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


def prove_file(folder: Path, record: FileRecord) -> None:
    """Reads a file that was written back from the disk.

    Raises:
        CheckpointError: it is not what was written.
    """
    path = folder / record.name
    with files.os_errors_reported(_SETTING, folder):
        found = files.digest(path, from_disk=True)
    if found != files.Digest(record.bytes, record.sha256):
        raise CheckpointError.of(_SETTING, path, "reads back otherwise than it was written (SHA-256)",
                                 "check the disk, or save to another one")


def publish(save_dir: Path, tag: str, manifest: bytes) -> Path:
    """Makes the prepared folder of `tag`, with the JSON text `manifest`, a checkpoint; returns its final path.

    A checkpoint of the same tag is set aside; `superseded` names it.
    """
    folder, final, former = incomplete_folder(save_dir, tag), save_dir / tag, save_dir / (tag + REPLACED)
    with files.os_errors_reported(_SETTING, save_dir):
        files.write_durably(folder / MANIFEST_FILE, [manifest])
        files.sync_folder(folder)
        if final.exists():
            files.remove_folder(former)
            files.rename_durably(final, former)
        files.rename_durably(folder, final)
    return final


def move_latest(save_dir: Path, tag: str) -> None:
    """Lets `latest` point to the checkpoint `tag`."""
    with files.os_errors_reported(_SETTING, save_dir):
        files.replace_durably(save_dir / LATEST_FILE, f"{tag}\n".encode())


def superseded(
    save_dir: Path, step: int, *, keep_last: int | None = None, keep_every: int | None = None
) -> tuple[str, ...]:
    """Names of the folders that have to go once a checkpoint of `step` is committed and proved.

    Kept are, of the checkpoints before `step`, the newest keep_last - 1 that are whole and everything in between, and
    those of iterations that keep_every divides; without keep_last all. One that is newer than `step` belongs to a
    future that the run left by starting again from an earlier checkpoint, and stays until the run arrives there.
    """
    with files.os_errors_reported(_SETTING, save_dir):
        aside = sorted({path.name for path in save_dir.glob(f"iter_*{REPLACED}")}
                       | ({tag_for(step) + REPLACED} if (save_dir / tag_for(step)).is_dir() else set()))
        earlier = [tag for tag in tags_in(save_dir) if (found := step_of(tag)) is not None and found < step]
    if keep_last is None:
        return tuple(aside)
    whole, gone = 1, []
    for tag in earlier:
        if whole >= keep_last and (keep_every is None or int(step_of(tag) or 0) % keep_every):
            gone.append(tag)
        whole += whole < keep_last and is_whole_here(save_dir / tag)
    return (*aside, *gone)


def remove(save_dir: Path, names: Iterable[str]) -> None:
    """Deletes folders of `save_dir`. They lose their names first: half a folder is never taken for a checkpoint."""
    with files.os_errors_reported(_SETTING, save_dir):
        for name in names:
            folder = save_dir / name
            if folder.exists():
                doomed = save_dir / (name + DELETING)
                files.rename_durably(folder, doomed)
                files.remove_folder(doomed)


def commit(
    save_dir: Path, tag: str, manifest: Manifest, *, keep_last: int | None = None, keep_every: int | None = None
) -> Path:
    """Makes the prepared folder of `tag`, on the one disk of all ranks, a checkpoint; returns its final path.

    Checkpoints that are replaced or no longer kept are deleted last, when this one has been read back.

    Raises:
        CheckpointError: the files in `manifest` do not cover every parameter, or the disk refuses.
    """
    raise_if_any(CheckpointError, manifest.problems())
    names = superseded(save_dir, manifest.step, keep_last=keep_last, keep_every=keep_every)
    for record in manifest.files if names else ():
        prove_file(incomplete_folder(save_dir, tag), record)
    final = publish(save_dir, tag, manifest.to_json())
    move_latest(save_dir, tag)
    remove(save_dir, names)
    return final
