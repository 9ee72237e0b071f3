"""How Transformer Engine wants to be told of padding, by its version.

The table is Megatron-LM's (megatron/core/models/bert/bert_model.py, commit d98e8a6): releases differ in the shape and
type of the mask that each backend takes. Masks are True where a key is hidden, the opposite of PyTorch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packaging.version import Version
from torch import Tensor

MaskShape = Literal["b11s", "b1ss"]
PACKED_SINCE = Version("1.10")
"""From here on flash and fused attention take packed sequences by their boundaries."""


@dataclass(frozen=True)
class MaskRule:
    """How some backends of some versions take the padding of rows."""

    since: Version
    """The first version that it holds for; the first rule that fits counts."""
    backends: tuple[str, ...]
    shape: MaskShape
    mask_type: Literal["padding", "arbitrary"]


MASK_RULES = (
    MaskRule(Version("1.10"), ("flash", "fused", "unfused"), "b11s", "padding"),
    MaskRule(Version("1.7"), ("flash", "fused"), "b11s", "padding"),
    MaskRule(Version("1.7"), ("unfused",), "b1ss", "arbitrary"),
    MaskRule(Version("0"), ("unfused",), "b1ss", "padding"),
)


def mask_rule(version: Version, backend: str) -> MaskRule | None:
    """The rule for a backend of a version; None where it takes no padding mask."""
    return next((rule for rule in MASK_RULES if version >= rule.since and backend in rule.backends), None)


def hidden_mask(segment_ids_BS: Tensor, shape: MaskShape) -> Tensor:
    """Which keys padding hides, bool: [B, 1, 1, S], or [B, 1, S, S] where queries that are padding see nothing."""
    hidden_BS = segment_ids_BS == 0
    if shape == "b11s":
        return hidden_BS[:, None, None, :]
    return hidden_BS[:, None, None, :] | hidden_BS[:, None, :, None]
