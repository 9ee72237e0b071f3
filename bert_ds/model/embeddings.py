"""From token ids to the first hidden states.

B batch, S sequence, H hidden, P predictions kept per row, T tokens of this rank: B x S, row after row, or this rank's
share of them under sequence parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert_ds.config.model import ModelConfig
from bert_ds.model.dropout import EMBEDDING, DropoutKey
from bert_ds.ops.rows import RowKind
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
    """The word table, and nothing else: where it is tied, whatever lives here is copied to the last stage."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext) -> None:
        super().__init__(config.padded_vocab_size, config.hidden_size, ctx)

    def forward(self, inputs: ModelInputs, key: DropoutKey | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        input_ids_BS, token_type_ids_BS, segment_ids_BS, masked_positions_BP = inputs
        return self.look_up(input_ids_BS), token_type_ids_BS, segment_ids_BS, masked_positions_BP


class EmbeddingTail(nn.Module):
    """Adds what tables there are for positions and token types to the word embeddings, and drops out."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext, rows: RowKind) -> None:
        super().__init__()
        self._token_group = ctx.tp_group if ctx.sequence_parallel else None
        self._dropout = config.hidden_dropout
        self._rows = rows
        self.position_embeddings: nn.Embedding | None = None
        if config.num_positions:
            self.position_embeddings = nn.Embedding(config.num_positions, config.hidden_size)
        self.tokentype_embeddings: nn.Embedding | None = None
        if config.num_token_types:
            self.tokentype_embeddings = nn.Embedding(config.num_token_types, config.hidden_size)
        if ctx.sequence_parallel:
            for parameter in self.parameters():
                mark_partial_gradient(parameter)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor, Tensor], key: DropoutKey | None = None) -> StageTensors:
        hidden_TH, token_type_ids_BS, segment_ids_BS, masked_positions_BP = inputs
        if self.position_embeddings is not None:
            positions_BS = token_positions(segment_ids_BS, self._rows).expand_as(segment_ids_BS)
            hidden_TH = hidden_TH + self.position_embeddings(self._own(positions_BS))
        if self.tokentype_embeddings is not None:
            hidden_TH = hidden_TH + self.tokentype_embeddings(self._own(token_type_ids_BS))
        hidden_TH = keyed_dropout(hidden_TH, self._dropout, key.token_hashes(EMBEDDING) if key else None)
        return hidden_TH, segment_ids_BS, masked_positions_BP

    def _own(self, values_BS: Tensor) -> Tensor:
        """The values at this rank's tokens, [T]."""
        return own_tokens(values_BS.flatten(), self._token_group)


def token_positions(segment_ids_BS: Tensor, rows: RowKind) -> Tensor:
    """Position of each token within its own sequence: [B, S] in packed rows, else [1, S], the same in all rows."""
    if rows == "packed":
        return packed_positions(segment_ids_BS)
    return torch.arange(segment_ids_BS.size(1), device=segment_ids_BS.device).unsqueeze(0)


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
