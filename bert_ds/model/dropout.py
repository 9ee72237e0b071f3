"""What dropout depends on: the run's seed, the step, the layer, the site, and an element's place in the global batch.

B batch, S sequence, H hidden, N local heads, T tokens of this rank (B x S, or its share under sequence parallelism).

Rows are numbered through the global batch, in the order in which the loader deals them out. So the same elements are
dropped whatever the layout, the micro-batch, or the sharding of tokens and heads. The exception is attention computed
by a library's kernel, which draws from the device's generator: seeded by the same facts and the tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bert_ds.parallel.collectives import own_tokens
from bert_ds.random_keys import derive_seed, derive_words, hash_places

WORDS_A_LAYER = 4
"""Seeds of one layer: its sites, and room, so that each layer's seeds lie 16 bytes apart, where kernels like them."""
EMBEDDING, ATTENTION_OUTPUT, MLP_OUTPUT, ATTENTION = 0, 0, 1, 2
"""Sites: places in a layer's seeds."""


@dataclass(frozen=True)
class BatchKey:
    """Names the forward pass of one micro-batch on this rank."""

    seed: int
    step: int
    first_row: int
    """Number of the micro-batch's first row in the global batch."""
    tp_rank: int = 0


@dataclass(frozen=True)
class DropoutKey:
    """Names the forward pass of one micro-batch through one layer; tensors, so that a compiled layer serves all."""

    seeds_4: Tensor
    """int32, one a site."""
    tokens: Tensor
    """int32 [T]: number of each token of this rank within the global batch."""
    rows: Tensor
    """int32 [B]: number of each row within the global batch."""
    generator_seed: int
    """For attention kernels that draw from the device's generator."""

    def token_hashes(self, site: int) -> Tensor:
        """One hash a token of this rank, [T], for `keyed_dropout` of hidden states."""
        return hash_places(self.seeds_4[site], self.tokens)


def layer_keys(
    batch: BatchKey, layers: Iterable[int], segment_ids_BS: Tensor, token_group: dist.ProcessGroup | None = None
) -> list[DropoutKey]:
    """The keys of the layers with these global indices, in their order.

    Args:
        batch: the micro-batch.
        layers: global indices of layers.
        segment_ids_BS: any tensor of the micro-batch's shape, on its device.
        token_group: the ranks among which tokens are cut, under sequence parallelism.
    """
    B, S = segment_ids_BS.shape
    device = segment_ids_BS.device
    rows_B = torch.arange(batch.first_row, batch.first_row + B, dtype=torch.int32, device=device)
    tokens_T = own_tokens((rows_B[:, None] * S + torch.arange(S, dtype=torch.int32, device=device)).flatten(),
                          token_group)
    layers = list(layers)
    seeds_L4 = torch.tensor([derive_words(WORDS_A_LAYER, "dropout", batch.seed, batch.step, layer)
                             for layer in layers], dtype=torch.int32).to(device, non_blocking=True)
    return [DropoutKey(seeds_4, tokens_T, rows_B, derive_seed(
        "attention", batch.seed, batch.step, batch.first_row, layer, batch.tp_rank))
        for layer, seeds_4 in zip(layers, seeds_L4, strict=True)]
