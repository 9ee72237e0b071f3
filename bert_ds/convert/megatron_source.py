"""A checkpoint of Megatron-LM as full tensors under our names, whichever ranks and formats they lie in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bert_ds.checkpoint.format import ParameterRecord
from bert_ds.config.model import ModelConfig
from bert_ds.convert.megatron_layout import RankFiles
from bert_ds.convert.megatron_names import (
    QKV,
    in_layer,
    is_legacy,
    is_weightless,
    layer_of,
    logical_name,
    qkv_in_our_order,
)
from bert_ds.convert.megatron_pickle import Inert, StoredTensor, load_torch_file
from bert_ds.errors import CheckpointError, Problem, raise_if_any

NEWEST_VERSION = 3.0
_NO_BERT = "is no parameter of a BERT"
_ANOTHER = "use the checkpoint of a BERT that Megatron-LM's pretrain_bert.py trained"


class MegatronSource(Protocol):
    """What is read of a checkpoint, whatever its format."""

    folder: Path
    args: Mapping[str, Any] | None
    """Megatron's arguments; None where the checkpoint has none."""
    iteration: int
    version: float
    legacy: bool
    """Whether it is the legacy model, not core's."""
    layout: tuple[int, int] | None
    """Tensor- and pipeline-parallel size that the files are cut for; None where they are cut anyhow."""

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], int]]:
        """Our name -> shape of one piece, number of tensor-parallel pieces."""

    def read(self, name: str, parameter: ParameterRecord, config: ModelConfig) -> Tensor:
        """The full tensor in fp32.

        Raises:
            CheckpointError: the pieces do not make it, or copies of it differ.
        """


class RankFilesSource:
    """Files of ranks, of core's format `torch` or of the legacy model."""

    def __init__(self, folder: Path) -> None:
        """Opens the files of all ranks; no tensor is read.

        Raises:
            CheckpointError: a file is missing, damaged or no BERT's.
        """
        self.folder = folder
        found = RankFiles.find(folder)
        self._sizes = (found.tensor_parallel, found.pipeline_parallel)
        self.layout: tuple[int, int] | None = self._sizes
        self._paths = found.paths
        contents = {rank: load_rank_file(path) for rank, path in found.paths.items()}
        first = contents[0, 0]
        self.args = arguments_of(first)
        self.iteration = int(number_in(first, "iteration", found.paths[0, 0]))
        self.version = number_in(first, "checkpoint_version", found.paths[0, 0])
        raise_if_any(CheckpointError, self._strangers(contents))
        self.legacy = False
        self._pieces: dict[str, dict[int, tuple[StoredTensor, Path]]] = {}
        self._gather(contents)

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], int]]:
        return {name: (next(iter(pieces.values()))[0].shape, self._sizes[0]) for name, pieces in self._pieces.items()}

    def read(self, name: str, parameter: ParameterRecord, config: ModelConfig) -> Tensor:
        wanted = piece_shape(parameter, self._sizes[0])
        parts = []
        for rank in range(self._sizes[0]):
            if rank not in self._pieces[name]:
                raise CheckpointError.of("checkpoint", self.folder, f"lacks {name} of tensor-parallel rank {rank}",
                                         "copy the checkpoint again")
            stored, path = self._pieces[name][rank]
            if stored.shape != wanted or not stored.dtype.is_floating_point:
                raise CheckpointError.of(f"{path}: {name}", list(stored.shape),
                                         f"should be {list(wanted)} floating-point numbers", _ANOTHER)
            part = stored.read().float()
            parts.append(qkv_in_our_order(part, self.version, config) if QKV in name else part)
        if parameter.cut_dim is not None:
            return torch.cat(parts, parameter.cut_dim)
        for rank, part in enumerate(parts):
            if not torch.equal(part, parts[0]):
                raise copies_differ(self.folder, name, f"tensor-parallel ranks 0 and {rank}", part, parts[0])
        return parts[0]

    def _strangers(self, contents: Mapping[tuple[int, int], dict[str, Any]]) -> Iterator[Problem]:
        """Files that another save has left."""
        for rank, path in self._paths.items():
            if (iteration := number_in(contents[rank], "iteration", path)) != self.iteration:
                yield Problem("checkpoint", path, f"is of iteration {iteration:g}, that of the first rank of "
                              f"{self.iteration}", "copy all files of one checkpoint")

    def _gather(self, contents: Mapping[tuple[int, int], dict[str, Any]]) -> None:
        """Fills `_pieces`. Layers are counted on from chunk to chunk: all stages of the first virtual stage, all of the
        second and so on."""
        tensor_parallel, stages = self._sizes
        chunks = _chunk_names(contents[0, 0])
        before = 0
        for chunk in chunks:
            for stage in range(stages):
                layers = 0
                for rank in range(tensor_parallel):
                    content = contents[rank, stage]
                    if chunk not in content:
                        raise CheckpointError.of("checkpoint", self._paths[rank, stage], f"has no {chunk!r}",
                                                 "copy the checkpoint again")
                    own = self._add(flatten(content[chunk]), rank, stage, before)
                    layers = max(layers, own)
                before += layers

    def _add(self, entries: Iterator[tuple[str, Any]], rank: int, stage: int, layers_before: int) -> int:
        """Takes the tensors of one rank's chunk over; returns its number of layers."""
        path, layers = self._paths[rank, stage], 0
        weights = {name: value for name, value in entries if not is_weightless(name)}
        raise_if_any(CheckpointError, unknown_names(path, weights))
        for theirs, stored in weights.items():
            self.legacy = self.legacy or is_legacy(theirs)
            name = logical_name(theirs)
            assert name is not None
            if (local := layer_of(name)) is not None:
                layers = max(layers, local + 1)
                name = in_layer(name, layers_before + local)
            pieces = self._pieces.setdefault(name, {})
            if rank in pieces:
                raise CheckpointError.of("checkpoint", path, f"holds {name}, which {pieces[rank][1]} holds too",
                                         "copy the checkpoint again")
            pieces[rank] = (stored, path)
        return layers


def load_rank_file(path: Path) -> dict[str, Any]:
    """The object in one rank's file."""
    content = load_torch_file(path)
    if not isinstance(content, dict):
        raise CheckpointError.of("checkpoint", path, "holds no dictionary", _ANOTHER)
    return content


def arguments_of(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Megatron's arguments by name, where the object has them."""
    args = content.get("args")
    state = args.state if isinstance(args, Inert) else args
    return state if isinstance(state, dict) else None


def number_in(content: Mapping[str, Any], key: str, path: Path) -> float:
    """The number under `key`, 0 where there is none, as in checkpoints from before it was written."""
    value = content.get(key) or 0
    if not isinstance(value, int | float):
        raise CheckpointError.of(f"{path}: {key}", value, "is no number", _ANOTHER)
    if key == "checkpoint_version" and value > NEWEST_VERSION:
        raise CheckpointError.of(f"{path}: {key}", value, f"is newer than {NEWEST_VERSION}, the newest known here",
                                 "use a later bert_ds")
    return value


def unknown_names(path: Path, weights: Mapping[str, Any]) -> Iterator[Problem]:
    """The entries that BERT does not have."""
    for name, value in weights.items():
        if logical_name(name) is None:
            yield Problem("checkpoint", path, f"{name} {_NO_BERT} that is known here", _ANOTHER)
        elif not isinstance(value, StoredTensor):
            yield Problem("checkpoint", path, f"{name} is no tensor", _ANOTHER)


def flatten(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries under dotted names."""
    if not isinstance(content, dict):
        yield prefix, content
        return
    for key, value in content.items():
        yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))


def piece_shape(parameter: ParameterRecord, pieces: int) -> tuple[int, ...]:
    """Shape of one tensor-parallel piece; -1 where it cannot be cut."""
    shape = list(parameter.shape)
    if parameter.cut_dim is not None:
        whole = shape[parameter.cut_dim]
        shape[parameter.cut_dim] = -1 if whole % pieces else whole // pieces
    return tuple(shape)


def copies_differ(folder: Path, name: str, where: str, one: Tensor, other: Tensor) -> CheckpointError:
    """The error for two copies that training should have kept equal."""
    difference = (one - other).abs().max().item() if one.shape == other.shape else float("nan")
    return CheckpointError.of(
        "checkpoint", folder, f"has copies of {name} that differ, by up to {difference:.1e}: those of {where}",
        "use a checkpoint of a run whose ranks agree; training with these weights was not right")


def _chunk_names(content: Mapping[str, Any]) -> list[str]:
    """`model`, or `model0`, `model1` ... of virtual stages."""
    if "model" in content:
        return ["model"]
    numbers = sorted(int(key[5:]) for key in content if key.startswith("model") and key[5:].isdecimal())
    if not numbers:
        raise CheckpointError.of("checkpoint", ", ".join(map(str, content)), "are all entries; there is no 'model'",
                                 _ANOTHER)
    return [f"model{number}" for number in numbers]
