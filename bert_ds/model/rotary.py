"""Rotary position embeddings (Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864, section 3.4.2).

Of a head's first 2 r dimensions, pair i of r is turned by the angle p x base^(-i / r) at position p; the rest pass. So
the product of a query and a key depends on the distance of their positions. A pair is (x_i, x_(r+i)), one of each half,
not two neighbours as in the paper: the convention of Megatron core without --rotary-interleaved
(models/common/embeddings/rope_utils.py).

B batch, S sequence, N heads, D head dimension, r turned pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

Turns = tuple[Tensor, Tensor]
"""(cos, sin) of the angle of each pair at each position, [B, S, 1, r], or [1, S, 1, r] for all rows alike."""


def rotary_turns(positions_BS: Tensor, rotary_dim: int, base: float, dtype: torch.dtype) -> Turns:
    """The turns of `rotary_dim` dimensions, an even number, at the given positions, computed in `dtype`."""
    exponents_r = torch.arange(0, rotary_dim, 2, dtype=dtype, device=positions_BS.device) / rotary_dim
    angles_BS1r = positions_BS.to(dtype)[:, :, None, None] * (1.0 / base**exponents_r)
    return angles_BS1r.cos(), angles_BS1r.sin()


def rotate(x_BSND: Tensor, turns: Turns) -> Tensor:
    """Turns the first 2 r dimensions of each head; computed in the type of `turns`, the result has that of x."""
    cos_BS1r, sin_BS1r = turns
    rotary_dim = 2 * cos_BS1r.size(-1)
    first, second = x_BSND[..., :rotary_dim].to(cos_BS1r.dtype).chunk(2, dim=-1)
    turned = torch.cat([first * cos_BS1r - second * sin_BS1r, second * cos_BS1r + first * sin_BS1r], dim=-1)
    return torch.cat([turned.to(x_BSND.dtype), x_BSND[..., rotary_dim:]], dim=-1)
