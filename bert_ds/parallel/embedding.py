"""The word table, its rows cut over tensor-parallel ranks. B batch, S sequence, H hidden, V rows of this rank."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from bert_ds.parallel.collectives import reduce_from_tensor_parallel
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.sharding import sharded_parameter


class VocabParallelEmbedding(nn.Module):
    """Looks ids up in a table whose rows are cut over the ranks; each rank adds what it holds.

    Shapes: ids [B, S] -> [B, S, H] replicated; weight [V, H] with V = num_embeddings / tp_size.
    """

    def __init__(self, num_embeddings: int, hidden_size: int, ctx: ParallelContext) -> None:
        super().__init__()
        self._group = ctx.tp_group
        self.weight = sharded_parameter((num_embeddings, hidden_size), 0, ctx)
        self._first_row = ctx.tp_rank * self.weight.size(0)

    def look_up(self, ids_BS: Tensor) -> Tensor:
        """The embeddings of `ids_BS`."""
        if self._group is None:
            return F.embedding(ids_BS, self.weight)
        local_BS = ids_BS - self._first_row
        elsewhere_BS = (local_BS < 0) | (local_BS >= self.weight.size(0))
        partial_BSH = F.embedding(local_BS.masked_fill(elsewhere_BS, 0), self.weight)
        return reduce_from_tensor_parallel(partial_BSH.masked_fill(elsewhere_BS.unsqueeze(-1), 0), self._group)
