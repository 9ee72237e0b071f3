"""Reading a checkpoint: finding a whole one, and any range of any cut of any parameter, whichever layout saved it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import (
    LATEST_FILE,
    MANIFEST_FILE,
    REPLACED,
    VOCABULARY_FILE,
    FileRecord,
    Manifest,
    SliceRecord,
    step_of,
)
from bert_ds.errors import CheckpointError, Problem, raise_if_any

logger = logging.getLogger(__name__)

_ANOTHER = "use another checkpoint of the run, or save again"


def find_latest(load_dir: Path, *, verify_hashes: bool = False) -> Path | None:
    """The checkpoint to resume from in `load_dir`, or None where no save was ever completed.

    That is the one `latest` names; where it is not whole, the newest whole one is taken and the log says why.

    Raises:
        CheckpointError: there are checkpoints, and none of them is whole.
    """
    with files.os_errors_reported("output.load", load_dir):
        candidates = _candidates(load_dir)
    broken: list[Problem] = []
    for folder in candidates:
        try:
            Checkpoint.open(folder, verify_hashes=verify_hashes)
        except CheckpointError as error:
            broken.extend(error.problems)
            logger.warning("checkpoint %s cannot be used, looking for an earlier one: %s", folder,
                           "; ".join(map(str, error.problems)))
            continue
        if folder != candidates[0] or folder.name != _latest_tag(load_dir):
            logger.warning("resuming from %s, the newest complete checkpoint in %s", folder.name, load_dir)
        return folder
    raise_if_any(CheckpointError, broken)
    return None


def locate(path: Path) -> Path:
    """The checkpoint that `path` means: a checkpoint's own folder, or the latest one in a folder of checkpoints.

    Raises:
        CheckpointError: there is no checkpoint at `path`.
    """
    if (path / MANIFEST_FILE).is_file():
        return path
    found = find_latest(path) if path.is_dir() else None
    if found is None:
        reason = "holds no checkpoint" if path.is_dir() else "is no folder"
        raise CheckpointError.of("checkpoint", path, reason,
                                 "give the folder that output.save named, or one iter_... folder in it")
    return found


class Checkpoint:
    """An opened checkpoint. Holds no file open; every read copies what it needs into memory of its own."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._slices = manifest.slices()

    @classmethod
    def open(cls, folder: Path, *, verify_hashes: bool = False) -> Checkpoint:
        """Opens the checkpoint in `folder` after checking that it is whole: the manifest, all sizes, all ranges.

        `verify_hashes` reads every file as well; to share that work among ranks, call `verify` with the files of each.

        Raises:
            CheckpointError: there is no checkpoint, or one that is damaged, incomplete or of a newer format.
        """
        path = folder / MANIFEST_FILE
        with files.os_errors_reported("checkpoint", folder):
            if not path.is_file():
                reason = f"has no {MANIFEST_FILE}; saving it was never finished" if folder.is_dir() else "is no folder"
                raise CheckpointError.of("checkpoint", folder, reason, _ANOTHER)
            manifest = Manifest.from_json(path.read_bytes(), path)
        raise_if_any(CheckpointError, manifest.problems())
        checkpoint = cls(folder, manifest)
        checkpoint.verify(hashes=verify_hashes)
        return checkpoint

    @property
    def vocabulary(self) -> Path:
        """The run's vocabulary file."""
        return self.folder / VOCABULARY_FILE

    def verify(self, records: Iterable[FileRecord] | None = None, *, hashes: bool) -> None:
        """Compares `records` (default: all files) and the vocabulary with the disk, by size or by size and hash.

        Raises:
            CheckpointError: every file that is missing, has another size or other content.
        """
        with files.os_errors_reported("checkpoint", self.folder):
            chosen = self.manifest.files if records is None else records
            raise_if_any(CheckpointError, self._file_problems(chosen, hashes=hashes))

    def read(
        self, kind: str, name: str, *, tp_index: int = 0, tp_count: int = 1, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Elements [start, stop) of piece `tp_index` of `tp_count` of a parameter, [stop - start] fp32 on the CPU.

        The piece may be cut otherwise than it was saved; only what overlaps is read.

        Raises:
            CheckpointError: the checkpoint lacks the parameter or the kind, or a file is damaged.
        """
        if f"{kind}/{name}" not in self._slices:
            raise CheckpointError.of(str(self.folder), f"{kind}/{name}", "is not in the checkpoint",
                                     "use a checkpoint of the same model with its optimizer state")
        parameter = self.manifest.parameters[name]
        pieces = parameter.pieces(tp_count)
        assert parameter.cut_dim is None or parameter.shape[parameter.cut_dim] % pieces == 0
        index = tp_index if pieces > 1 else 0
        numel = parameter.numel // pieces
        stop = numel if stop is None else stop
        assert 0 <= index < pieces and 0 <= start <= stop <= numel
        if parameter.cut_dim != 1:
            return self._read_rows(kind, name, index * numel + start, index * numel + stop)
        width = parameter.shape[1] // pieces
        first, last = start // width, -(-stop // width)
        block = self._read_columns(kind, name, range(index * width, (index + 1) * width), range(first, last))
        return block.flatten()[start - first * width : stop - first * width]

    def read_full(self, kind: str, name: str) -> Tensor:
        """The whole parameter in its own shape, fp32 on the CPU."""
        return self.read(kind, name).view(self.manifest.parameters[name].shape)

    def _read_rows(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """A flat range of the full tensor; pieces cut along dimension 0 lie one after another in it."""
        segments = []
        for file, record in self._slices[f"{kind}/{name}"]:
            offset = record.tp_index * (self.manifest.parameters[name].numel // record.tp_count)
            segments.append((offset + record.start, file, record))
        return self._assemble(f"{kind}/{name}", segments, start, stop)

    def _read_columns(self, kind: str, name: str, columns: range, rows: range) -> Tensor:
        """[rows, columns] of a parameter that was saved in pieces along dimension 1."""
        saved = self._slices[f"{kind}/{name}"]
        tp_count = saved[0][1].tp_count
        width = self.manifest.parameters[name].shape[1] // tp_count
        block = torch.empty(len(rows), len(columns))
        for index in range(columns.start // width, -(-columns.stop // width)):
            segments = [(record.start, file, record) for file, record in saved if record.tp_index == index]
            piece = self._assemble(f"{kind}/{name}", segments, rows.start * width, rows.stop * width)
            left, right = max(columns.start, index * width), min(columns.stop, (index + 1) * width)
            block[:, left - columns.start : right - columns.start] = (
                piece.view(len(rows), width)[:, left - index * width : right - index * width]
            )
        return block

    def _assemble(self, key: str, segments: list[tuple[int, str, SliceRecord]], start: int, stop: int) -> Tensor:
        """[start, stop) of a line that `segments` (position of the first element, file, range) cover without a gap."""
        result = torch.empty(stop - start)
        done = start
        for position, file, record in sorted(segments, key=lambda segment: segment[0]):
            end = min(position + record.stop - record.start, stop)
            if end > done:
                assert position <= done, "Manifest.problems admits no gap"
                result[done - start : end - start] = self._stored(key, file, record, done - position, end - position)
                done = end
        assert done == stop
        return result

    def _stored(self, key: str, file: str, record: SliceRecord, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the tensor `key` in `file`, still backed by the file."""
        path = self.folder / file
        try:
            with safe_open(path, framework="pt") as opened:
                stored = opened.get_slice(key)
                if stored.get_shape() != [record.stop - record.start] or stored.get_dtype() != "F32":
                    raise ValueError(f"{key} has shape {stored.get_shape()} and type {stored.get_dtype()}")
                tensor: Tensor = stored[start:stop]
                return tensor
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError.of("checkpoint", path, f"cannot be read ({error})", _ANOTHER) from error

    def _file_problems(self, records: Iterable[FileRecord], *, hashes: bool) -> Iterator[Problem]:
        for record in records:
            path = self.folder / record.name
            if not path.is_file():
                yield Problem("checkpoint", path, "is missing", _ANOTHER)
            elif (size := path.stat().st_size) != record.bytes:
                yield Problem("checkpoint", path, f"has {size} bytes and should have {record.bytes}", _ANOTHER)
            elif hashes and files.digest(path).sha256 != record.sha256:
                yield Problem("checkpoint", path, "has other content than was written (SHA-256)", _ANOTHER)
        if not self.vocabulary.is_file():
            yield Problem("checkpoint", self.vocabulary, "is missing", _ANOTHER)
        elif files.digest(self.vocabulary).sha256 != self.manifest.vocabulary.sha256:
            yield Problem("checkpoint", self.vocabulary, "is not the vocabulary that was saved (SHA-256)", _ANOTHER)


def _candidates(load_dir: Path) -> list[Path]:
    """Folders that may be checkpoints: the one `latest` names, then all by step, the newest first."""
    if not load_dir.is_dir():
        return []
    found = [path for path in load_dir.iterdir() if path.is_dir() and _age(path)[0] is not None]
    newest_first = sorted(found, key=_age, reverse=True)
    tag = _latest_tag(load_dir)
    if tag is None:
        return newest_first
    named = load_dir / tag
    return [named, *(path for path in newest_first if path != named)]


def _age(folder: Path) -> tuple[int | None, bool]:
    """Sorts by step; a folder that was about to be replaced comes before its successor."""
    return step_of(folder.name.removesuffix(REPLACED)), not folder.name.endswith(REPLACED)


def _latest_tag(load_dir: Path) -> str | None:
    path = load_dir / LATEST_FILE
    tag = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    return tag or None
