"""The word table, its rows cut over tensor-parallel ranks.

B batch, S sequence, H hidden, V rows of this rank, T tokens this rank goes on with: B x S, or its share of them under
sequence parallelism.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from bert_ds.parallel.collectives import reduce_from_tensor_parallel, reduce_scatter_tokens
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.sharding import sharded_parameter


class VocabParallelEmbedding(nn.Module):
    """Looks ids up in a table whose rows are cut over the ranks; each rank adds what it holds.

    Shapes: ids [B, S] -> [T, H]; weight [V, H] with V = num_embeddings / tp_size.
    """

    def __init__(self, num_embeddings: int, hidden_size: int, ctx: ParallelContext) -> None:
        super().__init__()
        self._group = ctx.tp_group
        self._leave = reduce_scatter_tokens if ctx.sequence_parallel else reduce_from_tensor_parallel
        self.weight = sharded_parameter((num_embeddings, hidden_size), 0, ctx)
        self._first_row = ctx.tp_rank * self.weight.size(0)

    def look_up(self, ids_BS: Tensor) -> Tensor:
        """The embeddings of `ids_BS`, row after row."""
        ids_T = ids_BS.flatten()
        if self._group is None:
            return F.embedding(ids_T, self.weight)
        local_T = ids_T - self._first_row
        elsewhere_T = (local_T < 0) | (local_T >= self.weight.size(0))
        partial_TH = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self._leave(partial_TH.masked_fill(elsewhere_T.unsqueeze(-1), 0), self._group)
