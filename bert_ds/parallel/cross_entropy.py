"""Cross entropy over a vocabulary cut over tensor-parallel ranks.

N predictions, V logits of this rank, C vocabulary columns of all ranks. Arithmetic in fp32 whatever the weights are.
The exchange (maximum, sum of exponentials, logit of the label) follows Megatron-LM (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

IGNORED = -100
"""The label of a prediction that does not count."""


@dataclass(frozen=True)
class VocabRange:
    """The columns of this rank among those of all ranks."""

    first: int
    """Index of this rank's first column."""
    num_real: int
    """Columns of all ranks that stand for a token; the rest pad the table and never take part."""
    group: dist.ProcessGroup | None

    def real_columns(self, local_columns: int) -> int:
        """How many of this rank's columns stand for a token."""
        return min(max(self.num_real - self.first, 0), local_columns)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, vocab: VocabRange) -> tuple[Tensor, Tensor]:
        logits_NV = logits_NV.float()
        real = vocab.real_columns(logits_NV.size(1))
        if real < logits_NV.size(1):
            logits_NV = logits_NV.clone()
            logits_NV[:, real:] = float("-inf")
        maximum_N = _reduced(logits_NV.amax(dim=1), vocab.group, dist.ReduceOp.MAX)
        counted_N = labels_N != IGNORED
        local_N = labels_N - vocab.first
        here_N = counted_N & (local_N >= 0) & (local_N < logits_NV.size(1))
        index_N1 = local_N.masked_fill(~here_N, 0).unsqueeze(1)
        label_logit_N = logits_NV.gather(1, index_N1).squeeze(1).masked_fill(~here_N, 0)
        label_logit_N = _reduced(label_logit_N, vocab.group, dist.ReduceOp.SUM)
        exponentials_NV = (logits_NV - maximum_N.unsqueeze(1)).exp_()
        total_N = _reduced(exponentials_NV.sum(dim=1), vocab.group, dist.ReduceOp.SUM)
        loss_N = (total_N.log() + maximum_N - label_logit_N).masked_fill(~counted_N, 0)
        ctx.save_for_backward(exponentials_NV.div_(total_N.unsqueeze(1)), index_N1, here_N, counted_N)
        correct_N = counted_N & (label_logit_N >= maximum_N)
        ctx.mark_non_differentiable(correct_N)
        return loss_N, correct_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        probabilities_NV, index_N1, here_N, counted_N = ctx.saved_tensors
        grad_NV = probabilities_NV.scatter_add(1, index_N1, -here_N.to(probabilities_NV.dtype).unsqueeze(1))
        return grad_NV.mul_((grad_N * counted_N).unsqueeze(1)), None, None


def vocab_parallel_cross_entropy(logits_NV: Tensor, labels_N: Tensor, vocab: VocabRange) -> tuple[Tensor, Tensor]:
    """Loss of each prediction and whether the label's logit is the largest.

    Args:
        logits_NV: logits of this rank's columns, [N, V].
        labels_N: label of each prediction among the columns of all ranks, [N]; IGNORED gives a loss of 0.
        vocab: which columns these are.

    Returns:
        loss_N fp32 [N] and correct_N bool [N], equal on all tensor-parallel ranks.
    """
    return _VocabParallelCrossEntropy.apply(logits_NV, labels_N, vocab)


def _reduced(tensor: Tensor, group: dist.ProcessGroup | None, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if group is not None:
        dist.all_reduce(tensor, op=operation, group=group)
    return tensor
