"""How close is close: every tolerance of the tests, with its reason."""

from __future__ import annotations

import torch

EXACT = {"rtol": 0.0, "atol": 0.0}
"""The same operations in the same order: resume, cutting and joining, conversion there and back."""

REDUCTION_ORDER = {"rtol": 1e-5, "atol": 1e-7}
"""fp32, where a sum is taken in another order: over ranks, micro-batches or pieces of a matrix."""

OTHER_KERNEL = {"rtol": 1e-4, "atol": 1e-6}
"""fp32, where other shapes or another kernel compute the same formula: sums of some hundred terms in another order."""

GOLDEN = {"rel": 1e-4}
"""fp32 over twelve steps on other processors: their vector units sum in other orders, and every step amplifies it."""

HALF_KERNEL = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Relative norm of the difference of two attention kernels in half precision: both round the probabilities and the
context once; an H200 shows 6e-4 (fp16) and 5e-3 (bf16)."""

FP8_LOSS = 0.02
"""Relative, losses of a few steps: e4m3 keeps 4 bits of each factor of a product; a loss averages over many."""

ADAM_STEPS = {"rtol": 1e-4, "atol": 1e-6}
"""fp32 parameters after a few AdamW steps of lr 1e-2 with eps 1e-3: REDUCTION_ORDER, amplified by at most lr / eps."""

BF16 = {"rtol": 2e-2, "atol": 2e-2}
"""bf16 activations carry 8 bits; another order of sums moves the last one or two."""

BF16_GRADIENT = 0.05
"""Relative norm of the difference of a parameter's gradient in bf16 and in fp32, through five layers: 0.018 at most
are seen, and 0.8 where one of two uses of the word table is missing."""

FP16_STEPS = {"rtol": 1e-4, "atol": 3e-4}
"""fp32 masters after four AdamW steps of lr 1e-2 on fp16 gradients that were summed in another order: each carries 11
bits, and a parameter whose gradient is mere rounding moves by a share of lr."""
