"""Where Megatron-LM keeps what: the folder of an iteration, one file for each tensor- and pipeline-parallel rank.

Layout (megatron/training/checkpointing.py, get_checkpoint_name):

    SAVE/latest_checkpointed_iteration.txt                            an iteration, or `release`
    SAVE/iter_0010000/mp_rank_{tensor:02d}/model_optim_rng.pt         one pipeline stage
    SAVE/iter_0010000/mp_rank_{tensor:02d}_{stage:03d}/model_optim_rng.pt
    SAVE/iter_0010000/.metadata, common.pt, __0_0.distcp ...          the format torch_dist
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bert_ds.checkpoint import files
from bert_ds.errors import CheckpointError, Problem, raise_if_any

TRACKER_FILE = "latest_checkpointed_iteration.txt"
RELEASE = "release"
DIST_METADATA_FILE = ".metadata"
MODEL_FILE = "model_optim_rng.pt"
_MODEL_FILES = (MODEL_FILE, "model_rng.pt")
"""The second is what 2022's distributed optimizer left beside its own files."""
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_GIVE = "give the folder that Megatron's --save named, or one iter_... folder in it"


def iteration_folder(iteration: int) -> str:
    """Name of the folder of an iteration."""
    return f"iter_{iteration:07d}"


def rank_folder(tensor_rank: int, stage: int, stages: int) -> str:
    """Name of the folder of one rank."""
    return f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")


def find_iteration(path: Path) -> Path:
    """The iteration's folder that `path` means: itself, or the latest in a folder of checkpoints.

    Raises:
        CheckpointError: there is no checkpoint of Megatron-LM at `path`.
    """
    with files.os_errors_reported("checkpoint", path):
        if not path.is_dir():
            raise CheckpointError.of("checkpoint", path, "is no folder", _GIVE)
        if _is_iteration(path):
            return path
        tracker = path / TRACKER_FILE
        if not tracker.is_file():
            raise CheckpointError.of("checkpoint", path, f"holds neither {TRACKER_FILE} nor mp_rank_... folders", _GIVE)
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if text != RELEASE and not text.isdecimal():
            raise CheckpointError.of("checkpoint", tracker, f"says {text!r}, not an iteration or {RELEASE!r}",
                                     "give the iter_... folder itself")
        folder = path / (RELEASE if text == RELEASE else iteration_folder(int(text)))
        if not folder.is_dir() or not _is_iteration(folder):
            raise CheckpointError.of("checkpoint", folder, f"is what {TRACKER_FILE} names, and is no checkpoint",
                                     "give another iter_... folder")
        return folder


def _is_iteration(folder: Path) -> bool:
    return (folder / DIST_METADATA_FILE).is_file() or any(
        path.is_dir() and _RANK_FOLDER.fullmatch(path.name) for path in folder.iterdir())


@dataclass(frozen=True)
class RankFiles:
    """One file for each model-parallel rank."""

    tensor_parallel: int
    pipeline_parallel: int
    paths: Mapping[tuple[int, int], Path]
    """(tensor-parallel rank, stage) -> file."""

    @classmethod
    def find(cls, folder: Path) -> RankFiles:
        """The files in the folder of an iteration.

        Raises:
            CheckpointError: files are missing, or belong to expert parallelism.
        """
        with files.os_errors_reported("checkpoint", folder):
            paths = dict(_rank_files(folder))
        if not paths:
            raise CheckpointError.of("checkpoint", folder, f"has no {MODEL_FILE} in its mp_rank_... folders",
                                     "copy the checkpoint again")
        sizes = [1 + max(ranks) for ranks in zip(*paths, strict=True)]
        found = cls(sizes[0], sizes[1], paths)
        raise_if_any(CheckpointError, found._missing(folder))
        return found

    def _missing(self, folder: Path) -> Iterator[Problem]:
        for tensor_rank in range(self.tensor_parallel):
            for stage in range(self.pipeline_parallel):
                if (tensor_rank, stage) not in self.paths:
                    path = folder / rank_folder(tensor_rank, stage, self.pipeline_parallel) / MODEL_FILE
                    yield Problem("checkpoint", path, f"is missing among {self.tensor_parallel} tensor-parallel ranks "
                                  f"x {self.pipeline_parallel} stages", "copy the files of all nodes together")


def _rank_files(folder: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    for path in sorted(folder.iterdir()):
        match = _RANK_FOLDER.fullmatch(path.name)
        model = next((path / name for name in _MODEL_FILES if (path / name).is_file()), None)
        if match is None or model is None:
            continue
        if match[3]:
            raise CheckpointError.of("checkpoint", path, "is a rank of expert parallelism, which no BERT has",
                                     "use the checkpoint of a BERT")
        yield (int(match[1]), int(match[2] or 0)), model
