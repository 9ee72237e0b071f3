"""From token ids to the first hidden states.

B batch, S sequence, H hidden, P predictions kept per row, T tokens of this rank: B x S, row after row, or this rank's
share of them under sequence parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert_ds.config.model import ModelConfig
from bert_ds.model.dropout import EMBEDDING, DropoutKey
from bert_ds.ops.attention import RowKind
from bert_ds.parallel.collectives import own_tokens
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.embedding import VocabParallelEmbedding
from bert_ds.parallel.sharding import mark_partial_gradient
from bert_ds.random_keys import keyed_dropout

ModelInputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""(input_ids_BS, token_type_ids_BS, segment_ids_BS, masked_positions_BP)."""
StageTensors = tuple[Tensor, Tensor, Tensor]
"""(hidden_TH, segment_ids_BS, masked_positions_BP): what travels between layers and stages, the only float first."""


class WordEmbeddings(VocabParallelEmbedding):
    """The tied word table, and nothing else: whatever lives here is copied to the last stage."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext) -> None:
        super().__init__(config.padded_vocab_size, config.hidden_size, ctx)

    def forward(self, inputs: ModelInputs, key: DropoutKey | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        input_ids_BS, token_type_ids_BS, segment_ids_BS, masked_positions_BP = inputs
        return self.look_up(input_ids_BS), token_type_ids_BS, segment_ids_BS, masked_positions_BP


class EmbeddingTail(nn.Module):
    """Adds positions and token types to the word embeddings and drops out."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext, rows: RowKind) -> None:
        super().__init__()
        self._token_group = ctx.tp_group if ctx.sequence_parallel else None
        self._dropout = config.hidden_dropout
        self._rows = rows
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.tokentype_embeddings: nn.Embedding | None = None
        if config.num_token_types:
            self.tokentype_embeddings = nn.Embedding(config.num_token_types, config.hidden_size)
        if ctx.sequence_parallel:
            for parameter in self.parameters():
                mark_partial_gradient(parameter)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor, Tensor], key: DropoutKey | None = None) -> StageTensors:
        words_TH, token_type_ids_BS, segment_ids_BS, masked_positions_BP = inputs
        hidden_TH = words_TH + self.position_embeddings(self._own(self._positions(segment_ids_BS)))
        if self.tokentype_embeddings is not None:
            hidden_TH = hidden_TH + self.tokentype_embeddings(self._own(token_type_ids_BS))
        hidden_TH = keyed_dropout(hidden_TH, self._dropout, key.token_hashes(EMBEDDING) if key else None)
        return hidden_TH, segment_ids_BS, masked_positions_BP

    def _own(self, values_BS: Tensor) -> Tensor:
        """The values at this rank's tokens, [T]."""
        return own_tokens(values_BS.flatten(), self._token_group)

    def _positions(self, segment_ids_BS: Tensor) -> Tensor:
        if self._rows == "packed":
            return packed_positions(segment_ids_BS)
        return torch.arange(segment_ids_BS.size(1), device=segment_ids_BS.device).expand_as(segment_ids_BS)


def packed_positions(segment_ids_BS: Tensor) -> Tensor:
    """Position of each token within its own sequence; restarts at 0 wherever the segment changes."""
    index_S = torch.arange(segment_ids_BS.size(1), device=segment_ids_BS.device)
    starts_BS = torch.ones_like(segment_ids_BS, dtype=torch.bool)
    starts_BS[:, 1:] = segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1]
    return index_S - (index_S * starts_BS).cummax(dim=1).values


def sequence_starts(segment_ids_BS: Tensor, sequences_per_row: int) -> Tensor:
    """Position of the [CLS] token of each sequence, [B, M]; 0 for a sequence that the row does not have."""
    wanted_M = torch.arange(1, sequences_per_row + 1, device=segment_ids_BS.device)
    return (segment_ids_BS[:, None, :] == wanted_M[None, :, None]).int().argmax(dim=2)
