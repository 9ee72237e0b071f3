"""Reading a checkpoint: finding a whole one, and any range of any cut of any parameter, whichever layout saved it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import (
    FP8_STATE,
    LATEST_FILE,
    MANIFEST_FILE,
    REPLACED,
    VOCABULARY_FILE,
    FileRecord,
    Manifest,
    SliceRecord,
    rank_file,
    step_of,
)
from bert_ds.errors import CheckpointError, Problem, SoundCheckpointError, raise_if_any

logger = logging.getLogger(__name__)

_ANOTHER = "use another checkpoint of the run, or save again"


def find_latest(load_dir: Path, *, verify_hashes: bool = False) -> Path | None:
    """The checkpoint to resume from in `load_dir`, or None where no save was ever completed.

    That is the one `latest` names; where it is not whole, the newest whole one is taken and the log says why.

    Raises:
        CheckpointError: there are checkpoints, and none of them is whole; or the newest one cannot be read for another
            reason than damage.
    """
    with files.os_errors_reported("output.load", load_dir):
        tags, latest = tags_in(load_dir), latest_tag(load_dir)
    broken: list[Problem] = []
    order = in_order(tags, latest)
    for tag in order:
        for folder in folders_of(load_dir, tag):
            try:
                Checkpoint.open(folder, verify_hashes=verify_hashes)
            except SoundCheckpointError:
                raise
            except CheckpointError as error:
                broken.extend(error.problems)
                logger.warning("checkpoint %s cannot be used, looking for an earlier one: %s", folder,
                               "; ".join(map(str, error.problems)))
                continue
            if tag != latest or folder.name != tag:
                logger.warning("resuming from %s, the newest complete checkpoint in %s", folder.name, load_dir)
            return folder
    raise_if_any(CheckpointError, broken)
    return None


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` is a checkpoint itself, not a folder of checkpoints."""
    return (folder / MANIFEST_FILE).is_file()


def tags_in(save_dir: Path) -> list[str]:
    """Tags of the folders in `save_dir` that may be checkpoints, the newest first."""
    if not save_dir.is_dir():
        return []
    tags = {path.name.removesuffix(REPLACED) for path in save_dir.iterdir() if path.is_dir()}
    return sorted((tag for tag in tags if step_of(tag) is not None), key=lambda tag: -int(step_of(tag) or 0))


def latest_tag(save_dir: Path) -> str | None:
    """What the file `latest` names."""
    path = save_dir / LATEST_FILE
    tag = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    return tag if step_of(tag) is not None else None


def in_order(tags: Iterable[str], latest: str | None) -> list[str]:
    """The tags in which to look for a whole checkpoint, best first: the one that `latest` names, then the newest."""
    return list(dict.fromkeys([*([latest] if latest else []), *tags]))


def folders_of(save_dir: Path, tag: str) -> list[Path]:
    """Where the checkpoint `tag` may lie: its folder, and one that a killed save of the same step has set aside."""
    aside = save_dir / (tag + REPLACED)
    return [save_dir / tag, *([aside] if aside.is_dir() else [])]


def no_such_step(step: int, load_dir: Path, tags: Iterable[str]) -> CheckpointError:
    """The error that `load_dir`, which holds `tags`, has no checkpoint of iteration `step`."""
    if not load_dir.is_dir():
        return CheckpointError.of("output.load", load_dir, "is no folder", "name the folder of an earlier run")
    steps = sorted(found for tag in tags if (found := step_of(tag)) is not None)
    there = f"{load_dir} holds those of iterations {', '.join(map(str, steps))}" if steps else f"{load_dir} holds none"
    return CheckpointError.of("output.ckpt_step", step, f"no checkpoint was saved then: {there}",
                              "name one of them, or leave --ckpt-step out to take the newest")


def is_whole_here(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint, or this disk's part of one, with files of the right sizes."""
    try:
        checkpoint = Checkpoint.of_folder(folder)
        absent, problems = checkpoint.examine(checkpoint.manifest.files, hashes=False)
    except CheckpointError:
        return False
    return not problems and (not absent or len(checkpoint.manifest.disks) > 1)


def locate(path: Path) -> Path:
    """The checkpoint that `path` means: a checkpoint's own folder, or the latest one in a folder of checkpoints.

    Raises:
        CheckpointError: there is no checkpoint at `path`.
    """
    if is_checkpoint(path):
        return path
    found = find_latest(path) if path.is_dir() else None
    if found is None:
        reason = "holds no checkpoint" if path.is_dir() else "is no folder"
        raise CheckpointError.of("checkpoint", path, reason,
                                 "give the folder that output.save named, or one iter_... folder in it")
    return found


class Checkpoint:
    """An opened checkpoint. Holds no file open; every read copies what it needs into memory of its own."""

    def __init__(self, folder: Path, manifest: Manifest, identity: str = "", absent: Iterable[str] = ()) -> None:
        self.folder = folder
        self.manifest = manifest
        self.identity = identity
        """SHA-256 of the manifest's file: the same for the parts of one checkpoint on several disks."""
        without = set(absent)
        self._slices = {key: kept for key, saved in manifest.slices().items()
                        if (kept := [one for one in saved if one[0] not in without])}

    @classmethod
    def open(cls, folder: Path, *, verify_hashes: bool = False) -> Checkpoint:
        """Opens the checkpoint in `folder` after checking that it is whole: the manifest, all sizes, all ranges.

        `verify_hashes` reads every file as well; to share that work among ranks, call `verify` with the files of each.

        Raises:
            CheckpointError: there is no checkpoint, or one that is damaged, incomplete or of a newer format.
        """
        checkpoint = cls.of_folder(folder)
        checkpoint.verify(hashes=verify_hashes)
        return checkpoint

    @classmethod
    def of_folder(cls, folder: Path) -> Checkpoint:
        """The checkpoint in `folder` by its manifest alone.

        Raises:
            CheckpointError: the manifest is missing, damaged or of a newer format, or its ranges have holes.
        """
        path = folder / MANIFEST_FILE
        with files.os_errors_reported("checkpoint", folder):
            if not path.is_file():
                reason = f"has no {MANIFEST_FILE}; saving it was never finished" if folder.is_dir() else "is no folder"
                raise CheckpointError.of("checkpoint", folder, reason, _ANOTHER)
            text = path.read_bytes()
        manifest = Manifest.from_json(text, path)
        raise_if_any(CheckpointError, manifest.problems())
        return cls(folder, manifest, hashlib.sha256(text).hexdigest())

    def without(self, absent: Iterable[str]) -> Checkpoint:
        """The same checkpoint where the files `absent` lie on another machine's disk: they are not read."""
        return Checkpoint(self.folder, self.manifest, self.identity, absent)

    @property
    def vocabulary(self) -> Path:
        """The run's vocabulary file."""
        return self.folder / VOCABULARY_FILE

    def place_on_disk(self) -> list[int]:
        """Tells disks apart: inode and time of the manifest, which all who share a disk see alike."""
        with files.os_errors_reported("checkpoint", self.folder):
            status = (self.folder / MANIFEST_FILE).stat()
        return [status.st_ino, status.st_mtime_ns]

    def verify(self, records: Iterable[FileRecord] | None = None, *, hashes: bool) -> None:
        """Compares `records` (default: all files) and the vocabulary with the disk, by size or by size and hash.

        Raises:
            CheckpointError: every file that is missing, has another size or other content.
        """
        absent, problems = self.examine(self.manifest.files if records is None else records, hashes=hashes)
        raise_if_any(CheckpointError, [*map(self.missing, absent), *problems])

    def examine(self, records: Iterable[FileRecord], *, hashes: bool) -> tuple[list[str], list[Problem]]:
        """Names of `records` that are not in the folder; what is wrong with the others and with the vocabulary."""
        absent: list[str] = []
        problems: list[Problem] = []
        with files.os_errors_reported("checkpoint", self.folder):
            for record in records:
                path = self.folder / record.name
                if not path.is_file():
                    absent.append(record.name)
                elif (size := path.stat().st_size) != record.bytes:
                    problems.append(Problem("checkpoint", path, f"has {size} bytes and should have {record.bytes}",
                                            _ANOTHER))
                elif hashes and files.digest(path).sha256 != record.sha256:
                    problems.append(Problem("checkpoint", path, "has other content than was written (SHA-256)",
                                            _ANOTHER))
            if not self.vocabulary.is_file():
                problems.append(Problem("checkpoint", self.vocabulary, "is missing", _ANOTHER))
            elif files.digest(self.vocabulary).sha256 != self.manifest.vocabulary.sha256:
                problems.append(Problem("checkpoint", self.vocabulary, "is not the vocabulary that was saved (SHA-256)",
                                        _ANOTHER))
        return absent, problems

    def missing(self, name: str) -> Problem:
        """The problem that the file `name` is not here."""
        disk = self.manifest.disk_with(name)
        if disk is None:
            return Problem("checkpoint", self.folder / name, "is missing", _ANOTHER)
        return Problem("checkpoint", self.folder / name, f"is missing; it was saved on the disk of {disk.host}",
                       f"copy what lies in the folder {self.folder.name} there into this one")

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

    def fp8_state(self, rank: int) -> dict[str, Tensor]:
        """What `rank` saved of its layers' scaling factors, flat fp32 on the CPU, by name; empty where it had none.

        Raises:
            CheckpointError: its file is damaged.
        """
        file = rank_file(rank)
        return {key.removeprefix(f"{FP8_STATE}/"): self._stored(key, file, record, 0, record.stop).clone()
                for key, saved in self._slices.items() if key.startswith(f"{FP8_STATE}/")
                for name, record in saved if name == file}

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
                assert position <= done, "Manifest.problems admits no gap; absent files are not asked for"
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
