"""Initial weights: each drawn from (seed, parameter name), the full matrix cut for this rank.

So every layout starts from the same model. The distributions are Megatron-LM's: N(0, std) for matrices and tables,
N(0, std / sqrt(2 L)) for the two matrices that close a residual branch, zero biases, unit LayerNorm weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bert_ds.config.model import ModelConfig
from bert_ds.parallel.sharding import sharding_of
from bert_ds.random_keys import derive_seed

_CLOSES_A_BRANCH = (".linear_proj.weight", ".linear_fc2.weight")


def initial_std(name: str, config: ModelConfig) -> float:
    """Standard deviation of the weight with this logical name."""
    if name.endswith(_CLOSES_A_BRANCH):
        return config.init_method_std / math.sqrt(2 * config.num_layers)
    return config.init_method_std


@torch.no_grad()
def initialize_parameter(parameter: Tensor, name: str, config: ModelConfig, seed: int) -> None:
    """Fills `parameter`, which may be a tensor-parallel piece, with its initial value.

    The numbers come from the CPU generator, so that they do not depend on the device either.
    """
    if name.endswith("bias"):
        parameter.zero_()
    elif "layernorm" in name or "layer_norm" in name:
        parameter.fill_(1.0)
    else:
        sharding = sharding_of(parameter)
        generator = torch.Generator().manual_seed(derive_seed("initial weight", seed, name))
        full = torch.empty(sharding.full_shape).normal_(0.0, initial_std(name, config), generator=generator)
        parameter.copy_(sharding.cut(full))
