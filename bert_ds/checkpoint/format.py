"""What a checkpoint is, version 3 (version 2 did not know training_s, version 1 one disk only).

    SAVE/latest                            the tag to resume from, moved last
    SAVE/iter_0000100/checkpoint.json      the manifest: everything but the tensors, written last
    SAVE/iter_0000100/vocab.txt            the vocabulary of the run
    SAVE/iter_0000100/rank_00000.safetensors ...

A rank's file holds 1-D fp32 tensors under the key `{kind}/{logical name}`: `weight` is the fp32 master, `exp_avg` and
`exp_avg_sq` are Adam's moments. Each is a flat range [start, stop) of one tensor-parallel piece of the parameter: of
piece `tp_index` of `tp_count` equal ones along the cut dimension, flattened row by row. A replicated parameter is its
own only piece. Names and shapes do not depend on the layout, so any layout can read the ranges that it needs.

Apart from those, a run in FP8 keeps in each rank's file, under `fp8/{layer}/{tensor}`, the scaling factors of the
layers on that rank, whole and flat. They depend on the layout, and serve the same one only.

Where machines have a disk each instead of one for all, each disk holds the same checkpoint.json and vocabulary, and the
files of the ranks there. Replicated parameters are saved once a disk, so that each disk has all that its ranks need;
the folders of all disks, copied into one, are the checkpoint of a single disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bert_ds.errors import CheckpointError, Problem, SoundCheckpointError

FORMAT_VERSION = 3
"""Raised with every change of what checkpoint.json or a rank's file may hold."""
WEIGHT, EXP_AVG, EXP_AVG_SQ = KINDS = ("weight", "exp_avg", "exp_avg_sq")
FP8_STATE = "fp8"
"""Kind of what depends on the layout."""
MANIFEST_FILE = "checkpoint.json"
VOCABULARY_FILE = "vocab.txt"
LATEST_FILE = "latest"
INCOMPLETE, REPLACED, DELETING = ".incomplete", ".replaced", ".deleting"
"""Suffixes of a folder that is being written, of one that gives way to another of the same step, and of one that is
being deleted."""

_TAG = re.compile(r"iter_(\d{7,})")
_SELF_HASH = "sha256_of_the_rest"


def tag_for(step: int) -> str:
    """Name of the folder of the checkpoint after `step` iterations."""
    return f"iter_{step:07d}"


def step_of(tag: str) -> int | None:
    """The step in a tag, or None where `tag` is no tag."""
    match = _TAG.fullmatch(tag)
    return int(match[1]) if match else None


def rank_file(rank: int) -> str:
    """Name of the file with the tensors of `rank`."""
    return f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class SliceRecord:
    """A flat range of one tensor-parallel piece."""

    tp_index: int
    tp_count: int
    start: int
    stop: int


@dataclass(frozen=True)
class FileRecord:
    """One rank's file, as its writer found it, and the ranges in it by `{kind}/{name}`."""

    name: str
    bytes: int
    sha256: str
    slices: Mapping[str, SliceRecord]


@dataclass(frozen=True)
class ParameterRecord:
    """A parameter as one process would hold it; the cut dimension is 0, 1 or None, where every rank has all of it."""

    shape: tuple[int, ...]
    cut_dim: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def pieces(self, tp_count: int) -> int:
        """Different pieces among `tp_count` tensor-parallel ranks."""
        return 1 if self.cut_dim is None else tp_count


@dataclass(frozen=True)
class LayoutRecord:
    """Sizes of the process grid that saved the checkpoint."""

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


@dataclass(frozen=True)
class DiskRecord:
    """A disk that holds a part of the checkpoint: a machine's name for it, and the ranks that wrote there."""

    host: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class VocabularyRecord:
    """The copied vocabulary: SHA-256 of the file, number of entries, how text becomes tokens."""

    sha256: str
    size: int
    tokenizer_type: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything in a checkpoint but the tensors."""

    step: int
    """Iterations done, skipped ones included."""
    consumed_samples: int
    """Rows of the training set that were read."""
    successful_samples: int
    """Rows whose gradient was applied; the learning rate follows them."""
    skipped_steps: int
    """Iterations that fp16 loss scaling skipped."""
    optimizer_step: int
    """Updates that the optimizer has counted (bias correction of Adam)."""
    loss_scaler: Mapping[str, Any] | None
    """State of the dynamic loss scaler; None without one."""
    config: Mapping[str, Any]
    """The resolved RunConfig, see run_config.run_config_as_dict."""
    layout: LayoutRecord
    versions: Mapping[str, str]
    """Versions of what made the checkpoint, bert_ds and torch among them."""
    vocabulary: VocabularyRecord
    metrics: Mapping[str, float]
    """The last evaluation; empty when there was none."""
    parameters: Mapping[str, ParameterRecord]
    """All parameters of the model, see parameters.parameter_shapes."""
    files: tuple[FileRecord, ...]
    disks: tuple[DiskRecord, ...] = ()
    """Empty where all ranks saved to one disk."""
    training_s: float = 0.0
    """Seconds of training until then, over all resumed runs."""

    def disk_of(self, rank: int) -> DiskRecord | None:
        """Where `rank` wrote; None where there was one disk only."""
        return next((disk for disk in self.disks if rank in disk.ranks), None)

    def disk_with(self, file: str) -> DiskRecord | None:
        """Where the file was written; None where there was one disk only."""
        return next((disk for disk in self.disks if file in map(rank_file, disk.ranks)), None)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that some file holds, in the order of KINDS."""
        present = {key.partition("/")[0] for file in self.files for key in file.slices}
        return tuple(kind for kind in KINDS if kind in present)

    def slices(self) -> dict[str, list[tuple[str, SliceRecord]]]:
        """`{kind}/{name}` -> (file name, range) of everything that was saved of it."""
        found: dict[str, list[tuple[str, SliceRecord]]] = {}
        for file in self.files:
            for key, record in file.slices.items():
                found.setdefault(key, []).append((file.name, record))
        return found

    def problems(self) -> Iterator[Problem]:
        """What the files do not cover: every kind that is present has to hold every parameter from end to end."""
        if WEIGHT not in self.kinds:
            yield Problem("files", len(self.files), "hold no weights", "use a complete checkpoint")
        slices = {key: saved for key, saved in self.slices().items() if not key.startswith(f"{FP8_STATE}/")}
        for kind in self.kinds:
            for name, parameter in self.parameters.items():
                key = f"{kind}/{name}"
                if reason := _coverage_problem(parameter, [record for _, record in slices.pop(key, [])]):
                    yield Problem(key, list(parameter.shape), reason, "save the checkpoint again from all ranks")
        for key in slices:
            yield Problem(key, "saved", "is no parameter of the model", "use the bert_ds that wrote the checkpoint")

    def to_json(self) -> bytes:
        """The content of checkpoint.json."""
        content: dict[str, Any] = {"format_version": FORMAT_VERSION, **asdict(self)}
        content["files"] = {record.pop("name"): record for record in content["files"]}
        content = json.loads(json.dumps(content))
        return json.dumps({**content, _SELF_HASH: _hash(content)}, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes, source: object = MANIFEST_FILE) -> Manifest:
        """The manifest in `text`; `source` is what messages call it.

        Raises:
            CheckpointError: a newer format, a damaged or changed file, or one that is no manifest.
        """
        try:
            content = json.loads(text)
            version = content.pop("format_version")
            if version > FORMAT_VERSION:
                raise SoundCheckpointError.of(
                    "format_version", version, f"{source} is newer than the version {FORMAT_VERSION} known here",
                    "use the bert_ds that wrote it, or a later one",
                )
            if content.pop(_SELF_HASH) != _hash({"format_version": version, **content}):
                raise ValueError("its content does not match its own hash")
            return _manifest(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError.of(
                "checkpoint", source, f"cannot be read as a manifest ({type(error).__name__}: {error})",
                "use another checkpoint; this one was damaged or changed after it was written",
            ) from error


def _manifest(content: dict[str, Any]) -> Manifest:
    content["layout"] = LayoutRecord(**content["layout"])
    content["vocabulary"] = VocabularyRecord(**content["vocabulary"])
    content["parameters"] = {
        name: ParameterRecord(tuple(record["shape"]), record["cut_dim"])
        for name, record in content["parameters"].items()
    }
    content["disks"] = tuple(DiskRecord(disk["host"], tuple(disk["ranks"])) for disk in content.get("disks", ()))
    content["files"] = tuple(
        FileRecord(name, record["bytes"], record["sha256"],
                   {key: SliceRecord(**where) for key, where in record["slices"].items()})
        for name, record in content["files"].items()
    )
    return Manifest(**content)


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _coverage_problem(parameter: ParameterRecord, records: Iterable[SliceRecord]) -> str | None:
    """What keeps `records` from holding all of `parameter`, or None."""
    pieces: dict[int, list[SliceRecord]] = {}
    counts = set()
    for record in records:
        counts.add(record.tp_count)
        pieces.setdefault(record.tp_index, []).append(record)
    if len(counts) != 1:
        return f"is cut in different ways: {sorted(counts)} pieces" if counts else "was not saved"
    (count,) = counts
    if parameter.shape[parameter.cut_dim] % count if parameter.cut_dim is not None else count > 1:
        return f"cannot be cut into {count} pieces along dimension {parameter.cut_dim}"
    for index in range(count):
        end = 0
        for record in sorted(pieces.get(index, []), key=lambda record: record.start):
            if record.start > end:
                break
            end = max(end, record.stop)
        if end != parameter.numel // count:
            return f"piece {index} of {count} is saved up to element {end} of {parameter.numel // count} only"
    return None
