"""The order of rows, the learning rate and the optimizer's groups of fine-tuning."""

from __future__ import annotations

import pytest
import torch

from finetuning.training import learning_rate_factor, shuffled_batches


def test_each_row_comes_once_in_batches_of_like_length() -> None:
    lengths = torch.randint(5, 200, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = shuffled_batches(lengths, 8, torch.Generator().manual_seed(1))
    assert sorted(row for batch in batches for row in batch) == list(range(1000))
    assert [len(batch) for batch in batches].count(8) == 125 == len(batches)
    padding = sum(max(lengths[i] for i in batch) * len(batch) for batch in batches) / sum(lengths)
    assert padding < 1.05
    assert batches != shuffled_batches(lengths, 8, torch.Generator().manual_seed(2))
    assert batches == shuffled_batches(lengths, 8, torch.Generator().manual_seed(1))
    # Neither the shortest first nor the longest.
    means = [sum(lengths[i] for i in batch) / 8 for batch in batches]
    assert means != sorted(means) and means != sorted(means, reverse=True)


def test_the_learning_rate_rises_and_falls_linearly() -> None:
    factors = [learning_rate_factor(step, warmup_steps=2, steps=10) for step in range(11)]
    assert factors == pytest.approx([0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0])
    assert learning_rate_factor(0, warmup_steps=0, steps=1) == 1
