"""PyTorch's scaled_dot_product_attention, one of its kernels at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bert_ds.ops.backends import (
    BEFORE_AMPERE,
    FP32,
    NO_GPU,
    AttentionBackend,
    AttentionQuery,
    Kernel,
    Limit,
    head_dims,
    needs_half_precision,
)
from bert_ds.ops.rows import visible_mask


def _restricted_to(kernel: SDPBackend) -> Callable[[AttentionQuery], Kernel]:
    def build(query: AttentionQuery) -> Kernel:
        def attend(q: Tensor, k: Tensor, v: Tensor, segment_ids_BS: Tensor, head_hashes_BN: Tensor | None) -> Tensor:
            with sdpa_kernel([kernel]):
                return F.scaled_dot_product_attention(
                    q, k, v, attn_mask=visible_mask(segment_ids_BS, query.rows),
                    dropout_p=0.0 if head_hashes_BN is None else query.dropout)

        return attend

    return build


def _needs_freedom(query: AttentionQuery) -> str | None:
    return "it is not deterministic" if query.deterministic else None


def _flash_dtypes(query: AttentionQuery) -> str | None:
    return needs_half_precision(query) if query.device_type == "cuda" else None


def _flash_dropout(query: AttentionQuery) -> str | None:
    return "it has no dropout on a CPU" if query.device_type == "cpu" and query.dropout > 0 else None


_NO_MASK = "PyTorch's flash attention takes no mask"

FUSED = AttentionBackend(
    name="fused", build=_restricted_to(SDPBackend.CUDNN_ATTENTION),
    kernels={"full": "cuDNN", "padded": "cuDNN, key mask", "packed": "cuDNN, block-diagonal mask"},
    limits=(NO_GPU, BEFORE_AMPERE, FP32,
            head_dims(128),
            Limit("`--deterministic-mode`", _needs_freedom)))

FLASH = AttentionBackend(
    name="flash", build=_restricted_to(SDPBackend.FLASH_ATTENTION),
    kernels={"full": "PyTorch flash"}, refused_rows={"padded": _NO_MASK, "packed": _NO_MASK},
    limits=(BEFORE_AMPERE, Limit("fp32 on a GPU", _flash_dtypes),
            head_dims(256, multiple=1),
            Limit("dropout on a CPU", _flash_dropout)))

UNFUSED = AttentionBackend(
    name="unfused", build=_restricted_to(SDPBackend.MATH),
    kernels={"full": "PyTorch math", "padded": "PyTorch math, key mask",
             "packed": "PyTorch math, block-diagonal mask"})
