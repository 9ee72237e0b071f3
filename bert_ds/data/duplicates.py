"""Exact duplicates among documents, found by 64-bit hashes of their texts.

The set holds 8 bytes a document in a table that is at most two thirds full and doubles: 12 to 24 bytes a document
(36 while it doubles), so 100 million documents take up to 2.4 GB. Two different documents share a hash with a
probability of n^2 / 2^65: 3 in 10,000 that it happens once among 100 million.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray

NO_TEXT = 0
"""Hash of documents without text, which are no duplicates of each other."""

_FIRST_SLOTS = 1 << 12


def text_hash(texts: Sequence[str]) -> int:
    """A hash of a document's texts in 64 bits."""
    if not any(texts):
        return NO_TEXT
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        content = text.encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return int.from_bytes(digest.digest(), "little") or 1


class SeenDocuments:
    """The hashes of the documents met so far."""

    def __init__(self) -> None:
        self._slots = np.zeros(_FIRST_SLOTS, np.uint64)
        self._count = 0

    def add(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Adds documents; tells [documents] which of them were there already, earlier ones of this call included."""
        while 3 * (self._count + len(hashes)) > 2 * len(self._slots):
            larger = np.zeros(2 * len(self._slots), np.uint64)
            _insert(larger, self._slots, np.empty(len(self._slots), np.bool_))
            self._slots = larger
        is_known = np.empty(len(hashes), np.bool_)
        self._count += _insert(self._slots, hashes, is_known)
        return is_known


@numba.njit(cache=True, nogil=True)
def _insert(slots: NDArray[np.uint64], hashes: NDArray[np.uint64], is_known: NDArray[np.bool_]) -> int:
    """Open addressing in a table of 2^k slots; 0 marks a free one. Returns how many were added."""
    mask = np.uint64(len(slots) - 1)
    added = 0
    for i in range(len(hashes)):
        value = hashes[i]
        is_known[i] = False
        if value == 0:
            continue
        slot = value & mask
        while slots[slot] != 0 and slots[slot] != value:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot] == value:
            is_known[i] = True
        else:
            slots[slot] = value
            added += 1
    return added
