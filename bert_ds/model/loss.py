"""The pretraining loss: masked language model plus sentence order, and the sums that metrics are made of.

B batch, P predictions kept per row, M sequences per row, H hidden, V vocabulary rows of this rank, N = B x P.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_ds.config.model import ModelConfig
from bert_ds.model.heads import HeadOutputs
from bert_ds.parallel.collectives import copy_to_tensor_parallel
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.cross_entropy import IGNORED, VocabRange, vocab_parallel_cross_entropy

Labels = tuple[Tensor, Tensor, Tensor]
"""(masked_labels_BP, sentence_order_labels_BM, loss_denominators_2)."""

METRICS = ("lm_loss", "lm_correct", "lm_count", "sop_loss", "sop_correct", "sop_count")
"""What `LossSums` counts, in order: sums over predictions, never ratios."""


class LossSums:
    """Sums over the micro-batches since the last `take`, kept on the device so that nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(METRICS), dtype=torch.float64, device=device)

    def add(self, *values: Tensor) -> None:
        """Adds one micro-batch's sums, in the order of METRICS."""
        self._sums += torch.stack([value.detach().double() for value in values])

    @property
    def so_far(self) -> Tensor:
        """The sums since the last `take`, [len(METRICS)] float64."""
        return self._sums

    def take(self) -> Tensor:
        """The sums so far, [len(METRICS)] float64; starts again at zero."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return taken


@dataclass(frozen=True)
class PretrainingLoss:
    """Callable as DeepSpeed's engine wants it: (outputs, labels) -> the loss of one micro-batch, fp32, 0-d.

    The engine averages losses over micro-batches and data-parallel ranks. With denominators of the whole global batch,
    each micro-batch's sum x accumulation x data-parallel size / denominator makes that average the true mean over all
    predictions. With `per_micro_batch` the micro-batch's own counts are the denominators: Megatron-LM's mean of means.
    """

    config: ModelConfig
    ctx: ParallelContext
    sums: LossSums
    averaged_over: int
    """Micro-batches the engine averages over: accumulation x data-parallel size."""
    per_micro_batch: bool = False

    def __call__(self, outputs: HeadOutputs, labels: Labels) -> Tensor:
        features_BPH, word_weight_VH, bias_V, sentence_logits_BM2 = outputs
        masked_labels_BP, sentence_labels_BM, denominators_2 = labels
        lm_loss, lm_correct, lm_count = self._masked_language_model(
            features_BPH, word_weight_VH, bias_V, masked_labels_BP)
        sop_loss, sop_correct, sop_count = _sentence_order(sentence_logits_BM2, sentence_labels_BM)
        self.sums.add(lm_loss, lm_correct, lm_count, sop_loss, sop_correct, sop_count)
        if self.per_micro_batch:
            return lm_loss / lm_count.clamp(min=1) + sop_loss / sop_count.clamp(min=1)
        lm_denominator, sop_denominator = denominators_2.float().clamp(min=1)
        return (lm_loss / lm_denominator + sop_loss / sop_denominator) * self.averaged_over

    def _masked_language_model(
        self, features_BPH: Tensor, word_weight_VH: Tensor, bias_V: Tensor, labels_BP: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        features_BPH = copy_to_tensor_parallel(features_BPH, self.ctx.tp_group)
        logits_NV = F.linear(features_BPH.flatten(0, 1), word_weight_VH, bias_V)
        vocab = VocabRange(self.ctx.tp_rank * word_weight_VH.size(0), self.config.vocab_size, self.ctx.tp_group)
        labels_N = labels_BP.flatten()
        loss_N, correct_N = vocab_parallel_cross_entropy(logits_NV, labels_N, vocab)
        return loss_N.sum(), correct_N.sum(), (labels_N != IGNORED).sum()


def _sentence_order(logits_BM2: Tensor, labels_BM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the losses, correct answers and labelled pairs; zeros without a binary head."""
    if logits_BM2.size(-1) == 0:
        zero = torch.zeros((), device=logits_BM2.device)
        return zero, zero, zero
    logits_N2, labels_N = logits_BM2.flatten(0, 1).float(), labels_BM.flatten()
    loss = F.cross_entropy(logits_N2, labels_N, ignore_index=IGNORED, reduction="sum")
    return loss, (logits_N2.argmax(dim=1) == labels_N).sum(), (labels_N != IGNORED).sum()
