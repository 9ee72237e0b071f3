"""Randomness as a function of (seed, purpose, place), never of history.

Nothing random has to be saved in a checkpoint, recomputation meets the same numbers again, and neither the stage, the
rank nor the micro-batch that an element falls to matters: whether dropout keeps it is a hash of its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_GOLDEN_RATIO = 0x9E3779B9 - 2**32
"""2^32 / golden ratio, as a signed number: successive multiples lie far apart."""


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and its place."""
    return int.from_bytes(_digest(parts, 8), "little") >> 1


def derive_words(count: int, *parts: int | str) -> list[int]:
    """`count` signed 32-bit numbers, at most 16, that depend on every part and its place."""
    digest = _digest(parts, 4 * count)
    return [int.from_bytes(digest[start:start + 4], "little", signed=True) for start in range(0, 4 * count, 4)]


def _digest(parts: Iterable[int | str], size: int) -> bytes:
    return hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=size).digest()


def seed_generator(device: torch.device, seed: int) -> None:
    """Sets the default generator of `device`, from which attention kernels of libraries draw."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def hash_places(seed: Tensor, places: Tensor) -> Tensor:
    """A hash of each place, int32 like `places`, under the 0-d int32 `seed`."""
    return _mix(_mix(places) ^ seed)


def keyed_dropout(tensor: Tensor, probability: float, row_hashes: Tensor | None) -> Tensor:
    """Dropout along the last dimension, [..., K], by the hash of each row, [...] int32, and the place in it.

    Without hashes, or with a probability of 0, the tensor stays as it is. Elementwise, so that a compiler can fuse it.
    """
    if row_hashes is None or probability == 0:
        return tensor
    columns_K = torch.arange(tensor.size(-1), dtype=torch.int32, device=tensor.device) * _GOLDEN_RATIO
    bits = _mix(row_hashes.unsqueeze(-1) + columns_K)
    kept = bits >= round(probability * 2**32) - 2**31
    return torch.where(kept, tensor * (1 / (1 - probability)), 0.0)


def _mix(bits: Tensor) -> Tensor:
    """A bijection of 32-bit numbers in which every input bit flips every output bit about half of the time.

    The multipliers and shifts are those of "lowbias32" (Chris Wellons, "Prospecting for hash functions", 2018). int32
    multiplication wraps; the masks make the arithmetic shifts logical ones.
    """
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * 0x7FEB352D
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * (0x846CA68B - 2**32)
    return bits ^ ((bits >> 16) & 0xFFFF)
