"""How much useful arithmetic a step does, and which share of the hardware's peak that is.

FLOPs of one row, forward and backward (backward = 2 x forward), nothing recomputed counted:
  3 x [ L x S x (8 H A + 4 H F + 4 S A) + P x (2 H^2 + 2 H V) + M x 2 H^2 ]
where A is heads x head dimension, the width of the queries, equal to H unless kv_channels says otherwise,
with attention in both directions and the head only on the P positions that are computed. In a packed row of up to M
sequences attention counts over the whole row: the kernels compute it, then mask it.
MFU = FLOPs of a step / (seconds x GPUs x dense 16-bit peak).
"""

from __future__ import annotations

import torch

from bert_ds.config.model import ModelConfig
from bert_ds.config.stages import layer_flops

_PEAK_TFLOPS = (("H200", 989.5), ("H100", 989.5), ("GH200", 989.5), ("B200", 2250.0), ("A100", 312.0), ("V100", 125.0),
                ("L40S", 362.0), ("A10", 125.0), ("4090", 165.0))
"""Dense fp16/bf16 peak by device name, from the vendors' data sheets."""


def row_flops(model: ModelConfig, predictions_per_row: int, sequences_per_row: int = 1) -> int:
    """FLOPs that one row costs in training, see the head of this file."""
    hidden = model.hidden_size
    layers = model.num_layers * model.seq_length * layer_flops(model)
    head = predictions_per_row * (2 * hidden * hidden + 2 * hidden * model.padded_vocab_size)
    pooler = sequences_per_row * 2 * hidden * hidden if model.binary_head else 0
    return 3 * (layers + head + pooler)


def peak_flops(device: torch.device) -> float | None:
    """Dense 16-bit peak of the device in FLOP/s; None where it is not known, as on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for known, tflops in _PEAK_TFLOPS if known in name), None)
