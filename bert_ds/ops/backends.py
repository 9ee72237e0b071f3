"""The one signature behind which attention is computed, and what describes a way to compute it.

B batch, S sequence, N local heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bert_ds.ops.rows import RowKind

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(q_BNSD, k_BNSD, v_BNSD, segment_ids_BS, one hash a head [B, N] or None) -> context_BNSD.
None instead of hashes switches dropout off."""


@dataclass(frozen=True, kw_only=True)
class AttentionQuery:
    """What a run asks of attention."""

    rows: RowKind
    dtype: torch.dtype
    device_type: str
    heads: int
    """On one tensor-parallel rank."""
    head_dim: int
    dropout: float
    sequences_per_row: int = 1
    """The most sequences in a packed row."""
    deterministic: bool = False
    """Whether repeated runs have to give the same bits."""
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU, as in (9, 0) for Hopper; None without one."""
    fp8: bool = False
    """Whether the matrices around attention multiply in FP8."""


@dataclass(frozen=True)
class Limit:
    """One condition under which a backend refuses a run."""

    when: str
    """The condition in a few words, for the table in bert_ds/README.md."""
    reason: Callable[[AttentionQuery], str | None]
    """What keeps the backend from serving a query, or None."""


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """One way to compute attention, as it stands in the table."""

    name: str
    kernels: Mapping[RowKind, str]
    """What computes rows of each kind; a kind that is missing is refused."""
    build: Callable[[AttentionQuery], Kernel]
    limits: tuple[Limit, ...] = ()
    refused_rows: Mapping[RowKind, str] = field(default_factory=dict)
    """Why a kind is refused."""
    draws: bool = True
    """Whether its dropout draws from the device's generator, which the caller seeds; otherwise it follows hashes."""

    def refusal(self, query: AttentionQuery) -> str | None:
        """Why it cannot serve a query, or None."""
        if query.rows not in self.kernels:
            return self.refused_rows[query.rows]
        return next((reason for limit in self.limits if (reason := limit.reason(query))), None)


@dataclass(frozen=True)
class Attention:
    """A backend chosen and built for a run."""

    name: str
    kernel: Kernel
    draws: bool
    """As in AttentionBackend."""


def needs_gpu(query: AttentionQuery) -> str | None:
    """For kernels that only a GPU has."""
    return None if query.device_type == "cuda" else "it needs a GPU"


def needs_half_precision(query: AttentionQuery) -> str | None:
    """For kernels that compute in 16 bits."""
    if query.dtype in (torch.float16, torch.bfloat16):
        return None
    return f"it computes in fp16 or bf16, not {str(query.dtype).removeprefix('torch.')}"


def needs_ampere(query: AttentionQuery) -> str | None:
    """For kernels written for compute capability 8.0 and later."""
    if query.capability is None or query.capability >= (8, 0):
        return None
    return f"it needs compute capability 8.0, and this GPU has {query.capability[0]}.{query.capability[1]}"


def head_dims(largest: int, multiple: int = 8) -> Limit:
    """For kernels written for some head dimensions."""

    def reason(query: AttentionQuery) -> str | None:
        if query.head_dim % multiple == 0 and query.head_dim <= largest:
            return None
        kind = f" that are multiples of {multiple}" if multiple > 1 else ""
        return f"it serves head dimensions up to {largest}{kind}, not {query.head_dim}"

    return Limit(f"head dimension over {largest}" + (f" or no multiple of {multiple}" if multiple > 1 else ""), reason)


NO_GPU = Limit("no GPU", needs_gpu)
FP32 = Limit("fp32", needs_half_precision)
BEFORE_AMPERE = Limit("compute capability below 8.0", needs_ampere)
