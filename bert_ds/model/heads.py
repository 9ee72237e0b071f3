"""From the last hidden states to what the loss needs.

B batch, S sequence, H hidden, P predictions kept per row, M sequences per row, V vocabulary rows of this rank, T tokens
of this rank (B x S, or its share under sequence parallelism: gathered here, since every rank computes the head).

The masked positions are gathered before anything else, so the head works on P rows instead of S. The projection to the
vocabulary is left to the loss, which can fuse it with the cross entropy: the last layers pass the weight and bias on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert_ds.config.model import ModelConfig
from bert_ds.model.dropout import DropoutKey
from bert_ds.model.embeddings import StageTensors, WordEmbeddings, sequence_starts
from bert_ds.model.transformer_layer import activation
from bert_ds.parallel.collectives import gather_tokens_for_all
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.sharding import mark_partial_gradient, sharded_parameter

HeadOutputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""(features_BPH, word_weight_VH, bias_V, sentence_logits_BM2). The weight is that of the word table or of the output
layer; the last has no element without the binary head."""


class LMHead(nn.Module):
    """Dense, activation, LayerNorm: the transform in front of the vocabulary projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._activation = config.lm_head_activation
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, hidden_BPH: Tensor) -> Tensor:
        return self.layer_norm(activation(self.dense(hidden_BPH), self._activation))


class Pooler(nn.Module):
    """Dense and tanh on the hidden state of each sequence's [CLS] token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_BMH: Tensor) -> Tensor:
        return torch.tanh(self.dense(hidden_BMH))


class PretrainingHeads(nn.Module):
    """Final LayerNorm, masked-language-model transform, pooler and sentence-order logits."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext, sequences_per_row: int) -> None:
        super().__init__()
        self._token_group = ctx.tp_group if ctx.sequence_parallel else None
        self._sequences_per_row = sequences_per_row
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        if ctx.sequence_parallel:
            mark_partial_gradient(self.final_layernorm.weight)
            mark_partial_gradient(self.final_layernorm.bias)
        self.lm_head = LMHead(config)
        self.pooler: Pooler | None = None
        self.binary_head: nn.Linear | None = None
        if config.binary_head:
            self.pooler = Pooler(config)
            self.binary_head = nn.Linear(config.hidden_size, 2)

    def forward(self, inputs: StageTensors, key: DropoutKey | None = None) -> tuple[Tensor, Tensor]:
        hidden_TH, segment_ids_BS, masked_positions_BP = inputs
        hidden_BSH = gather_tokens_for_all(self.final_layernorm(hidden_TH), self._token_group).view(
            *segment_ids_BS.shape, hidden_TH.size(-1))
        features_BPH = self.lm_head(gather_positions(hidden_BSH, masked_positions_BP))
        return features_BPH, self._sentence_logits(hidden_BSH, segment_ids_BS)

    def _sentence_logits(self, hidden_BSH: Tensor, segment_ids_BS: Tensor) -> Tensor:
        if self.pooler is None or self.binary_head is None:
            return hidden_BSH.new_empty(hidden_BSH.size(0), self._sequences_per_row, 0)
        starts_BM = sequence_starts(segment_ids_BS, self._sequences_per_row)
        return self.binary_head(self.pooler(gather_positions(hidden_BSH, starts_BM)))


def gather_positions(hidden_BSH: Tensor, positions_BP: Tensor) -> Tensor:
    """The hidden states at the given positions, [B, P, H]."""
    index_BPH = positions_BP.long().unsqueeze(-1).expand(-1, -1, hidden_BSH.size(-1))
    return hidden_BSH.gather(1, index_BPH)


def pass_word_weight(
    words: WordEmbeddings, inputs: tuple[Tensor, Tensor], key: DropoutKey | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The second use of the tied table: hands its weight to the loss."""
    features_BPH, sentence_logits_BM2 = inputs
    return features_BPH, words.weight, sentence_logits_BM2


class LogitBias(nn.Module):
    """The bias of the vocabulary projection, cut like the table's rows."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext) -> None:
        super().__init__()
        self.bias = sharded_parameter((config.padded_vocab_size,), 0, ctx)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor], key: DropoutKey | None = None) -> HeadOutputs:
        features_BPH, word_weight_VH, sentence_logits_BM2 = inputs
        return features_BPH, word_weight_VH, self.bias, sentence_logits_BM2


class OutputLayer(nn.Module):
    """Weight and bias of the vocabulary projection where it does not share the word table; cut like that one's rows."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext) -> None:
        super().__init__()
        self.weight = sharded_parameter((config.padded_vocab_size, config.hidden_size), 0, ctx)
        self.bias = sharded_parameter((config.padded_vocab_size,), 0, ctx)

    def forward(self, inputs: tuple[Tensor, Tensor], key: DropoutKey | None = None) -> HeadOutputs:
        features_BPH, sentence_logits_BM2 = inputs
        return features_BPH, self.weight, self.bias, sentence_logits_BM2
