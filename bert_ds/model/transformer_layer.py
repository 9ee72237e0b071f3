"""One transformer layer.

B batch, S sequence, H hidden, N local heads (heads / tp_size), D head dim, F feed-forward. T tokens between the
matrices: B x S, row after row, or this rank's share of them under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bert_ds.config.model import ModelConfig
from bert_ds.model.dropout import ATTENTION, ATTENTION_OUTPUT, MLP_OUTPUT, DropoutKey
from bert_ds.model.embeddings import StageTensors, token_positions
from bert_ds.model.rotary import Turns, rotary_turns, rotate
from bert_ds.ops.backends import Attention
from bert_ds.ops.rows import RowKind
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.linear import column_parallel_linear, row_parallel_linear
from bert_ds.parallel.sharding import mark_partial_gradient
from bert_ds.random_keys import hash_places, keyed_dropout, seed_generator


def activation(x: Tensor, kind: str) -> Tensor:
    """GELU, one of config.model.ACTIVATIONS: exact, or its tanh approximation."""
    return F.gelu(x, approximate="none" if kind == "gelu" else "tanh")


class SelfAttention(nn.Module):
    """Multi-head attention. The rows of the fused projection are ordered (head, [q, k, v], D), so that shards
    concatenate to the whole matrix whatever the tensor-parallel size."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext, attention: Attention, rows: RowKind) -> None:
        super().__init__()
        self._heads = config.num_attention_heads // ctx.tp_size
        self._head_dim = config.head_dim
        self._dropout = config.attention_dropout
        self._attention = attention
        self._first_head, self._all_heads = ctx.tp_rank * self._heads, config.num_attention_heads
        self._rows = rows
        self._rotary_dim, self._rotary_base = config.rotary_dim, config.rotary_base
        self._recompute = config.recompute_granularity == "selective"
        self.linear_qkv = column_parallel_linear(config.hidden_size, 3 * config.projection_size, ctx,
                                                 config.transformer_impl)
        self.linear_proj = row_parallel_linear(config.projection_size, config.hidden_size, ctx, config.transformer_impl)

    def forward(self, hidden_TH: Tensor, segment_ids_BS: Tensor, key: DropoutKey | None) -> Tensor:
        B, S = segment_ids_BS.shape
        qkv_BSN3D = self.linear_qkv(hidden_TH).view(B, S, self._heads, 3, self._head_dim)
        q_BSND, k_BSND, v_BSND = qkv_BSN3D.unbind(dim=3)
        if self._rotary_dim:
            turns = self._turns(segment_ids_BS, q_BSND.dtype)
            q_BSND, k_BSND = rotate(q_BSND, turns), rotate(k_BSND, turns)
        q_BNSD, k_BNSD, v_BNSD = (part.transpose(1, 2) for part in (q_BSND, k_BSND, v_BSND))
        if self._recompute and key is not None:
            context_BNSD = checkpoint(self._attend, q_BNSD, k_BNSD, v_BNSD, segment_ids_BS, key, use_reentrant=False,
                                      preserve_rng_state=self._attention.draws)
        else:
            context_BNSD = self._attend(q_BNSD, k_BNSD, v_BNSD, segment_ids_BS, key)
        return self.linear_proj(context_BNSD.transpose(1, 2).reshape(B * S, self._heads * self._head_dim))

    def _turns(self, segment_ids_BS: Tensor, dtype: torch.dtype) -> Turns:
        """What turns queries and keys by their positions, in fp32 or more."""
        return rotary_turns(token_positions(segment_ids_BS, self._rows), self._rotary_dim, self._rotary_base,
                            torch.promote_types(dtype, torch.float32))

    def _attend(
        self, q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, segment_ids_BS: Tensor, key: DropoutKey | None
    ) -> Tensor:
        """What selective recomputation computes again, the mask and its dropout included."""
        return self._attention.kernel(q_BNSD, k_BNSD, v_BNSD, segment_ids_BS, self._head_hashes(key) if key else None)

    def seed(self, key: DropoutKey) -> None:
        """Seeds the generator that the backend's dropout draws from, if it does."""
        if self._attention.draws and self._dropout > 0:
            seed_generator(key.rows.device, key.generator_seed)

    def _head_hashes(self, key: DropoutKey) -> Tensor:
        """One hash a row and local head, [B, N]; heads are counted over all tensor-parallel ranks."""
        heads_N = torch.arange(self._heads, dtype=torch.int32, device=key.rows.device) + self._first_head
        return hash_places(key.seeds_4[ATTENTION], key.rows[:, None] * self._all_heads + heads_N)


class FeedForward(nn.Module):
    """H -> F -> H with the model's activation."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext) -> None:
        super().__init__()
        self._activation = config.activation
        self.linear_fc1 = column_parallel_linear(config.hidden_size, config.ffn_size, ctx, config.transformer_impl)
        self.linear_fc2 = row_parallel_linear(config.ffn_size, config.hidden_size, ctx, config.transformer_impl)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        return self.linear_fc2(activation(self.linear_fc1(hidden_TH), self._activation))


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each LayerNorm -> block -> dropout -> residual.

    pre-LN (Megatron-LM): the residual starts before the LayerNorm. post-LN (the original BERT): it starts from the
    LayerNorm's output, which is the original order with every LayerNorm counted one place later, so that both share
    modules and names; the final LayerNorm is then the last layer's own.
    """

    def __init__(self, config: ModelConfig, ctx: ParallelContext, attention: Attention, rows: RowKind) -> None:
        super().__init__()
        self._dropout = config.hidden_dropout
        self._post_norm = config.norm_placement == "post"
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.self_attention = SelfAttention(config, ctx, attention, rows)
        self.pre_mlp_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.mlp = FeedForward(config, ctx)
        self._compute = self._compiled(ctx) if config.compile else self._layer
        if ctx.sequence_parallel:
            for norm in (self.input_layernorm, self.pre_mlp_layernorm):
                mark_partial_gradient(norm.weight)
                mark_partial_gradient(norm.bias)

    def forward(self, inputs: StageTensors, key: DropoutKey | None = None) -> StageTensors:
        hidden_TH, segment_ids_BS, masked_positions_BP = inputs
        if key is not None:
            self.self_attention.seed(key)
        return self._compute(hidden_TH, segment_ids_BS, key), segment_ids_BS, masked_positions_BP

    def _compiled(self, ctx: ParallelContext) -> Callable[[Tensor, Tensor, DropoutKey | None], Tensor]:
        """One graph for all layers of a stage. Collectives cut it, so with tensor parallelism it is several."""
        return torch.compile(self._layer, dynamic=False, fullgraph=ctx.tp_size == 1)

    def _layer(self, hidden_TH: Tensor, segment_ids_BS: Tensor, key: DropoutKey | None) -> Tensor:
        normed_TH = self.input_layernorm(hidden_TH)
        residual_TH = normed_TH if self._post_norm else hidden_TH
        block_TH = self.self_attention(normed_TH, segment_ids_BS, key)
        hidden_TH = residual_TH + self._drop(block_TH, key, ATTENTION_OUTPUT)
        normed_TH = self.pre_mlp_layernorm(hidden_TH)
        residual_TH = normed_TH if self._post_norm else hidden_TH
        return residual_TH + self._drop(self.mlp(normed_TH), key, MLP_OUTPUT)

    def _drop(self, block_TH: Tensor, key: DropoutKey | None, site: int) -> Tensor:
        return keyed_dropout(block_TH, self._dropout, key.token_hashes(site) if key else None)
