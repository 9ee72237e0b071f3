"""Rotary position embeddings (Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864, section 3.4.2).

Of a head's first R dimensions, pair i of r = R / 2 is turned by the angle p x base^(-i / r) at position p; the rest pass.
So the product of a query and a key depends on the distance of their positions. A pair is (x_i, x_(r+i)), one of each
half, not two neighbours as in the paper: Megatron core's convention without --rotary-interleaved
(models/common/embeddings/rope_utils.py), in which its checkpoints are trained.

B batch, S sequence, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions_BS: Tensor, rotary_dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """Angle of each pair at each position, [B, S, r], in `dtype`, fp32 or more."""
    exponents_r = torch.arange(0, rotary_dim, 2, dtype=dtype, device=positions_BS.device) / rotary_dim
    return positions_BS.to(dtype).unsqueeze(-1) * (1.0 / base**exponents_r)


def rotate(x: Tensor, angles_BSr: Tensor) -> Tensor:
    """Turns the first R of the last dimension of x, [B, S, ..., D], by the angles of its position.

    Computed in the type of the angles; the result has that of x.
    """
    rotary_dim = 2 * angles_BSr.size(-1)
    angles = angles_BSr.view(*angles_BSr.shape[:2], *(1,) * (x.dim() - 3), -1)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :rotary_dim].to(angles.dtype).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, x[..., rotary_dim:]], dim=-1)
