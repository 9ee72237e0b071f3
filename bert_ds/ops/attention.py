"""Attention behind one signature: who computes it, what each can serve, and why a choice was refused.

B batch, S sequence, N local heads, D head dim.

A row's `segment_ids_BS` say which sequence each position belongs to (0 = padding). Three kinds of rows:
  full    nothing is padded, attention needs no mask
  padded  one sequence a row: keys that are padding are masked
  packed  several sequences a row: a position sees its own sequence only (block diagonal)
The kind is fixed for a run, never read off the data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bert_ds.errors import ConfigError
from bert_ds.random_keys import hash_places, keyed_dropout

RowKind = Literal["full", "padded", "packed"]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionQuery:
    """What a run asks of attention."""

    rows: RowKind
    dtype: torch.dtype
    device_type: str
    head_dim: int
    dropout: float
    deterministic: bool = False
    """Whether repeated runs have to give the same bits."""


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, Tensor | None], Tensor]
"""(q_BNSD, k_BNSD, v_BNSD, visible mask or None, dropout, one hash a head [B, N] or None) -> context_BNSD.
None instead of hashes switches dropout off."""


@dataclass(frozen=True)
class AttentionBackend:
    """One way to compute attention."""

    name: str
    kernel: Kernel
    refusal: Callable[[AttentionQuery], str | None]
    """Why it cannot serve a query, or None."""
    draws: bool = True
    """Whether its dropout draws from the device's generator, which the caller seeds; otherwise it follows hashes."""


def visible_mask(segment_ids_BS: Tensor, rows: RowKind) -> Tensor | None:
    """Which keys a query may see: None (all), [B, 1, 1, S] for padded rows, [B, 1, S, S] for packed ones; bool.

    Padding positions of packed rows see each other, so that no row of the mask is empty.
    """
    if rows == "full":
        return None
    if rows == "padded":
        return (segment_ids_BS != 0)[:, None, None, :]
    return segment_ids_BS[:, None, :, None] == segment_ids_BS[:, None, None, :]


def _local(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, head_hashes_BN: Tensor | None
) -> Tensor:
    """The formula written out: softmax(q k^T / sqrt(D)) v, scores and softmax in fp32."""
    scores_BNSS = torch.matmul(q, k.transpose(-1, -2)).float() / math.sqrt(q.size(-1))
    if mask is not None:
        scores_BNSS = scores_BNSS.masked_fill(~mask, torch.finfo(torch.float32).min)
    probabilities_BNSS = scores_BNSS.softmax(dim=-1).to(v.dtype)
    if head_hashes_BN is not None:
        queries_S = torch.arange(q.size(2), dtype=torch.int32, device=q.device)
        row_hashes_BNS = hash_places(head_hashes_BN.unsqueeze(-1), queries_S)
        probabilities_BNSS = keyed_dropout(probabilities_BNSS, dropout, row_hashes_BNS)
    return torch.matmul(probabilities_BNSS, v)


def _sdpa(kernels: list[SDPBackend]) -> Kernel:
    """PyTorch's scaled_dot_product_attention restricted to the given kernels."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, head_hashes_BN: Tensor | None
    ) -> Tensor:
        with sdpa_kernel(kernels):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=0.0 if head_hashes_BN is None else dropout)

    return attend


def _serves_all(query: AttentionQuery) -> str | None:
    return None


def _refuses_fused(query: AttentionQuery) -> str | None:
    if query.device_type != "cuda":
        return "cuDNN attention needs a GPU"
    if query.deterministic:
        return "cuDNN attention is not deterministic"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"cuDNN attention computes in fp16 or bf16, not {query.dtype}"
    if query.head_dim % 8 or query.head_dim > 128:
        return f"cuDNN attention serves head dimensions up to 128 that are multiples of 8, not {query.head_dim}"
    return None


def _refuses_flash(query: AttentionQuery) -> str | None:
    if query.rows != "full":
        return f"PyTorch's flash attention takes no mask, and these rows are {query.rows}"
    if query.device_type == "cpu":
        return "PyTorch's CPU flash attention has no dropout" if query.dropout > 0 else None
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention computes in fp16 or bf16, not {query.dtype}"
    if query.head_dim > 256:
        return f"flash attention serves head dimensions up to 256, not {query.head_dim}"
    return None


BACKENDS = (
    AttentionBackend("fused", _sdpa([SDPBackend.CUDNN_ATTENTION]), _refuses_fused),
    AttentionBackend("flash", _sdpa([SDPBackend.FLASH_ATTENTION]), _refuses_flash),
    AttentionBackend("unfused", _sdpa([SDPBackend.MATH]), _serves_all),
    AttentionBackend("local", _local, _serves_all, draws=False),
)
"""In the order in which `auto` tries them."""


def choose_backend(name: str, query: AttentionQuery) -> AttentionBackend:
    """The backend `name` for `query`, or the first that serves it for "auto"; logs the choice and each refusal.

    Raises:
        ConfigError: the named backend cannot serve the query; names the reason and the nearest that can.
    """
    refusals = {backend.name: backend.refusal(query) for backend in BACKENDS}
    serving = [backend for backend in BACKENDS if refusals[backend.name] is None]
    if name != "auto" and refusals[name] is not None:
        raise ConfigError.of("model.attention_backend", name, str(refusals[name]),
                             f"use {serving[0].name}, or auto, which picks it")
    chosen = serving[0] if name == "auto" else next(backend for backend in BACKENDS if backend.name == name)
    refused = "; ".join(f"{other} refused: {reason}" for other, reason in refusals.items() if reason)
    log.info("attention backend: %s for %s rows in %s%s", chosen.name, query.rows,
             str(query.dtype).removeprefix("torch."), f" ({refused})" if refused else "")
    return chosen
