"""The formula written out, in operations that a compiler can fuse: what every other backend is compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bert_ds.ops.backends import AttentionBackend, AttentionQuery, Kernel
from bert_ds.ops.rows import visible_mask
from bert_ds.random_keys import hash_places, keyed_dropout


def _build(query: AttentionQuery) -> Kernel:
    def attend(q: Tensor, k: Tensor, v: Tensor, segment_ids_BS: Tensor, head_hashes_BN: Tensor | None) -> Tensor:
        """softmax(q k^T / sqrt(D)) v, scores and softmax in fp32."""
        scores_BNSS = torch.matmul(q, k.transpose(-1, -2)).float() / math.sqrt(q.size(-1))
        mask = visible_mask(segment_ids_BS, query.rows)
        if mask is not None:
            scores_BNSS = scores_BNSS.masked_fill(~mask, torch.finfo(torch.float32).min)
        probabilities_BNSS = scores_BNSS.softmax(dim=-1).to(v.dtype)
        if head_hashes_BN is not None:
            queries_S = torch.arange(q.size(2), dtype=torch.int32, device=q.device)
            row_hashes_BNS = hash_places(head_hashes_BN.unsqueeze(-1), queries_S)
            probabilities_BNSS = keyed_dropout(probabilities_BNSS, query.dropout, row_hashes_BNS)
        return torch.matmul(probabilities_BNSS, v)

    return attend


LOCAL = AttentionBackend(
    name="local", build=_build, draws=False,
    kernels=dict.fromkeys(("full", "padded", "packed"), "the formula written out"))
