"""Several corpora as one dataset: the forms of --data-path, and Megatron's order of a blend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from bert_ds.config.data import DataConfig
from bert_ds.data.samples import MeasuredSource, SampleBatch
from bert_ds.data.splits import SPLITS
from bert_ds.errors import ConfigError, DataError

BLEND_ENTRY = np.dtype([("dataset", np.int16), ("sample", np.int64)])

_SETTING = "--data-path"
_LARGEST_BLEND = 2**15 - 1


@dataclass(frozen=True)
class Blend:
    """Prefixes of .bin/.idx pairs and how much each gives; `weights` is None where the user gave none."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    setting: str = _SETTING
    """The flag that named them."""

    @property
    def source(self) -> str:
        """The prefixes, for messages."""
        return " ".join(self.prefixes)


def blends_of_splits(data: DataConfig) -> dict[str, Blend | None]:
    """What each split reads; None where a split has no data of its own although another has. Raises ConfigError."""
    if not data.has_data_of_splits:
        return dict.fromkeys(SPLITS, parse_data_path(data.data_path))
    blends: dict[str, Blend | None] = {}
    for split in SPLITS:
        words = getattr(data, f"{split}_data_path")
        blends[split] = parse_data_path(words, f"--{split}-data-path") if words else None
    return blends


def parse_data_path(data_path: Sequence[str], setting: str = _SETTING) -> Blend:
    """Reads `PREFIX`, `WEIGHT PREFIX WEIGHT PREFIX ...` or `PREFIX PREFIX ...`; raises ConfigError on anything else."""
    words = tuple(word.strip() for word in data_path)
    numbers = [_as_number(word) for word in words]
    if all(number is None for number in numbers):
        return Blend(words, None, setting)
    weights, prefixes = numbers[::2], words[1::2]
    if len(words) % 2 or None in weights or any(number is not None for number in numbers[1::2]):
        raise ConfigError.of(setting, " ".join(words), "mixes weights and prefixes",
                             "give a weight before every prefix, or before none")
    known = tuple(weight for weight in weights if weight is not None)
    bad = [weight for weight in known if not 0 < weight < math.inf]
    if bad:
        raise ConfigError.of(setting, " ".join(words), f"has the weight {bad[0]:g}",
                             "give positive weights and leave out what is not wanted")
    if len(prefixes) > _LARGEST_BLEND:
        raise ConfigError.of(setting, f"{len(prefixes)} prefixes", f"are more than {_LARGEST_BLEND}", "merge some")
    return Blend(prefixes, known, setting)


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights over their sum, in numpy's order of addition."""
    array = np.array(weights, dtype=np.float64)
    shares: list[float] = (array / np.sum(array)).tolist()
    return shares


def samples_of_each(weights: Sequence[float], num_samples: int, surplus: float = 0.0) -> list[int]:
    """Samples that each dataset gives to a blend of `num_samples`, rounded up; with `surplus`, that it builds."""
    parts = [math.ceil(num_samples * share) for share in normalised(weights)]
    return [math.ceil(part * (1 + surplus)) for part in parts] if surplus else parts


def blend_order(weights: Sequence[float], size: int) -> NDArray[np.void]:
    """[size] of BLEND_ENTRY: at each step the dataset that lags furthest behind its weight, and its next sample."""
    # The weights are normalised twice, as Megatron does: the last bits decide ties.
    return _blend_order(np.array(normalised(normalised(weights))), np.empty(size, BLEND_ENTRY))


class BlendedDataset:
    """Samples of several datasets in the order of a blend."""

    def __init__(self, datasets: Sequence[MeasuredSource], order: NDArray[np.void], *, source: str) -> None:
        self.datasets = tuple(datasets)
        self.order = order
        counts = np.bincount(order["dataset"], minlength=len(self.datasets)).tolist()
        for number, (dataset, needed) in enumerate(zip(self.datasets, counts, strict=True)):
            if needed > len(dataset):
                raise DataError.of(_SETTING, source, f"dataset {number} of the blend has {len(dataset)} samples where "
                                   f"{needed} are needed", "raise --mid-level-dataset-surplus")

    def __len__(self) -> int:
        return len(self.order)

    def build_batch(self, indices: NDArray[np.int64]) -> SampleBatch:
        """The samples [B] of `indices`; see SampleSource."""
        entries = self.order[indices]
        batches = [(rows, self.datasets[number].build_batch(entries["sample"][rows]))
                   for number in np.unique(entries["dataset"]).tolist()
                   for rows in [np.flatnonzero(entries["dataset"] == number)]]
        merged = SampleBatch(*(np.empty((len(indices), *field.shape[1:]), field.dtype) for field in batches[0][1]))
        for rows, batch in batches:
            for target, field in zip(merged, batch, strict=True):
                target[rows] = field
        return merged

    def lengths(self, indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """Tokens [B] of the samples; see MeasuredSource."""
        entries = self.order[indices]
        lengths = np.empty(len(indices), np.int32)
        for number in np.unique(entries["dataset"]).tolist():
            chosen = entries["dataset"] == number
            lengths[chosen] = self.datasets[number].lengths(entries["sample"][chosen])
        return lengths


def _as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


@numba.njit(cache=True, nogil=True)
def _blend_order(weights: NDArray[np.float64], order: NDArray[np.void]) -> NDArray[np.void]:
    taken = np.zeros(len(weights), np.int64)
    for step in range(len(order)):
        furthest, largest_lag = 0, -np.inf
        for dataset in range(len(weights)):
            lag = weights[dataset] * max(np.float64(step), 1.0) - np.float64(taken[dataset])
            if lag > largest_lag:
                furthest, largest_lag = dataset, lag
        order[step]["dataset"] = furthest
        order[step]["sample"] = taken[furthest]
        taken[furthest] += 1
    return order
