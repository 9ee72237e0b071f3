"""Randomness as a function of (seed, purpose, place), never of history.

A random tensor is drawn after its generator was set to a seed derived from what the tensor is for. Nothing has to be
saved in a checkpoint, recomputation draws the same numbers again, and the stage a layer lives on does not matter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and its place."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class DropoutKey:
    """Names one forward pass of one layer on this rank."""

    seed: int
    step: int
    micro_batch: int
    dp_rank: int
    tp_rank: int
    layer: int = 0

    def for_layer(self, layer: int) -> DropoutKey:
        """The key of the layer with this global index."""
        return replace(self, layer=layer)

    def replicated(self, site: str) -> int:
        """Seed for a tensor that all tensor-parallel ranks hold: they drop the same elements."""
        return derive_seed("dropout", self.seed, self.step, self.micro_batch, self.dp_rank, self.layer, site)

    def sharded(self, site: str) -> int:
        """Seed for a tensor of which every tensor-parallel rank holds another part."""
        return derive_seed("dropout", self.seed, self.step, self.micro_batch, self.dp_rank, self.layer, site,
                           self.tp_rank)


def seed_generator(device: torch.device, seed: int) -> None:
    """Sets the default generator of `device`, from which dropout and attention kernels draw."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def keyed_dropout(tensor: torch.Tensor, probability: float, seed: int | None) -> torch.Tensor:
    """Dropout whose mask depends on `seed` alone; None, or a probability of 0, leaves the tensor as it is."""
    if seed is None or probability == 0:
        return tensor
    seed_generator(tensor.device, seed)
    return torch.nn.functional.dropout(tensor, probability, training=True)
