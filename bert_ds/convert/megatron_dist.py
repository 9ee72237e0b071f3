"""Megatron core's format torch_dist: torch's distributed checkpoint, any range of any tensor in any file.

`.metadata` is a pickle (torch/distributed/checkpoint/metadata.py, filesystem.py), each tensor's range a file of
torch.save within a .distcp file; neither is executed. Core stacks a parameter of all layers into one tensor with the
layers as first dimension (megatron/core/transformer/transformer_block.py, sharded_state_dict), unless layers differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_ds.checkpoint.format import ParameterRecord
from bert_ds.config.model import ModelConfig
from bert_ds.convert.megatron_layout import DIST_METADATA_FILE
from bert_ds.convert.megatron_names import is_weightless, logical_name
from bert_ds.convert.megatron_pickle import Inert, Region, StoredTensor, load_plain_pickle, load_torch_file
from bert_ds.convert.megatron_source import arguments_of, load_rank_file, number_in
from bert_ds.errors import CheckpointError, Problem, raise_if_any

COMMON_FILE = "common.pt"
_NOT_THE_MODEL = ("optimizer.", "rng_state", "rerun_state_machine", "args", "opt_param_scheduler", "chained_")
_STACKED = "encoder.layers."
_MOST_LAYERS = 10_000
_AGAIN = "copy the checkpoint again"


@dataclass(frozen=True)
class _Chunk:
    """A range of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    region: Region

    def has(self, layer: int | None) -> bool:
        """Whether it holds something of this index of the first dimension; of the tensor, where `layer` is None."""
        return layer is None or 0 <= layer - self.offsets[0] < self.sizes[0]


@dataclass(frozen=True)
class _Place:
    """Where a parameter of ours is: a tensor of the checkpoint, or one layer of it."""

    key: str
    layer: int | None
    shape: tuple[int, ...]


class DistSource:
    """A folder in the format torch_dist."""

    def __init__(self, folder: Path) -> None:
        """Reads what the tensors are and where; no tensor itself.

        Raises:
            CheckpointError: the metadata are damaged, or no BERT's.
        """
        self.folder, self.legacy = folder, False
        self.layout: tuple[int, int] | None = None
        common = load_rank_file(folder / COMMON_FILE) if (folder / COMMON_FILE).is_file() else {}
        self.args = arguments_of(common)
        self.iteration = int(number_in(common, "iteration", folder / COMMON_FILE))
        self.version = number_in(common, "checkpoint_version", folder / COMMON_FILE) or 3.0
        sizes, self._chunks = _metadata(folder)
        places = {name: place for key, shape in sizes.items() for name, place in _places(key, shape)}
        raise_if_any(CheckpointError, _unknown(folder, places))
        self._places = {str(logical_name(name)): place for name, place in places.items()}

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], int]]:
        return {name: (place.shape, 1) for name, place in self._places.items()}

    def read(self, name: str, parameter: ParameterRecord, config: ModelConfig) -> Tensor:
        place = self._places[name]
        if place.shape != parameter.shape:
            raise CheckpointError.of(f"{self.folder}: {place.key}", list(place.shape),
                                     f"should be {list(parameter.shape)}", "use a complete checkpoint of a BERT")
        full, covered = torch.empty(place.shape), torch.zeros(place.shape, dtype=torch.bool)
        for chunk in self._chunks[place.key]:
            if not chunk.has(place.layer):
                continue
            first_dim = 0 if place.layer is None else 1
            where = tuple(slice(start, start + size) for start, size in
                          zip(chunk.offsets[first_dim:], chunk.sizes[first_dim:], strict=True))
            full[where], covered[where] = self._read_chunk(chunk, place), True
        if not covered.all():
            raise CheckpointError.of("checkpoint", self.folder, f"does not hold all of {place.key}", _AGAIN)
        return full

    def _read_chunk(self, chunk: _Chunk, place: _Place) -> Tensor:
        stored = load_torch_file(chunk.region)
        if not isinstance(stored, StoredTensor) or not stored.dtype.is_floating_point or stored.shape != chunk.sizes:
            raise CheckpointError.of("checkpoint", chunk.region.path,
                                     f"holds no {list(chunk.sizes)} floating-point numbers for {place.key}", _AGAIN)
        return (stored if place.layer is None else stored.row(place.layer - chunk.offsets[0])).read().float()


def _places(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, _Place]]:
    """The names in core's model that a tensor of the checkpoint stands for."""
    is_stacked = key.startswith(_STACKED) and not key.removeprefix(_STACKED)[:1].isdigit()
    if not is_stacked or not shape or shape[0] > _MOST_LAYERS:
        yield key, _Place(key, None, shape)
        return
    for layer in range(shape[0]):
        yield f"{_STACKED}{layer}.{key.removeprefix(_STACKED)}", _Place(key, layer, shape[1:])


def _unknown(folder: Path, places: Mapping[str, _Place]) -> Iterator[Problem]:
    """The tensors that BERT does not have."""
    for key in dict.fromkeys(place.key for name, place in places.items() if logical_name(name) is None):
        yield Problem("checkpoint", folder, f"{key} is no parameter of a BERT that is known here",
                      "use the checkpoint of a BERT that Megatron-LM's pretrain_bert.py trained")


def _metadata(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, list[_Chunk]]]:
    """Tensor of the model -> shape; tensor of the model -> its ranges."""
    path = folder / DIST_METADATA_FILE
    content = load_plain_pickle(path)
    try:
        tensors = {key: _state(value) for key, value in _state(content)["state_dict_metadata"].items()}
        sizes = {key: tuple(state["size"]) for key, state in tensors.items() if "size" in state and _is_weight(key)}
        lengths = {(key, tuple(_state(chunk)["offsets"])): tuple(_state(chunk)["sizes"])
                   for key in sizes for chunk in tensors[key]["chunks"]}
        chunks: dict[str, list[_Chunk]] = {key: [] for key in sizes}
        for index, where in _state(content)["storage_data"].items():
            key, state = _state(index)["fqn"], _state(where)
            if key in chunks:
                offsets = tuple(_state(index)["offset"])
                if any(start < 0 or start + size > whole for start, size, whole in
                       zip(offsets, lengths[key, offsets], sizes[key], strict=True)):
                    raise ValueError(f"a range of {key} lies outside of it")
                region = Region(folder / Path(state["relative_path"]).name, int(state["offset"]), int(state["length"]))
                chunks[key].append(_Chunk(offsets, lengths[key, offsets], region))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError.of("checkpoint", path, f"is not what torch writes ({type(error).__name__}: {error})",
                                 _AGAIN) from error
    return sizes, chunks


def _state(value: Any) -> dict[str, Any]:
    """The attributes of an object; none where it has none."""
    state = value.state or {} if isinstance(value, Inert) else None
    if not isinstance(state, dict):
        raise TypeError(f"{value!r} has no attributes")
    return state


def _is_weight(key: str) -> bool:
    return not key.startswith(_NOT_THE_MODEL) and not is_weightless(key.partition("/")[0])
