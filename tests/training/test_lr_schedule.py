"""The learning rate by Megatron-LM's formulas, in samples of successful updates."""

from __future__ import annotations

import math

import pytest

from bert_ds.config.schedule import ScheduleConfig
from bert_ds.training.lr_schedule import LearningRate


def rate(**settings: object) -> LearningRate:
    schedule = ScheduleConfig(**{"train_iters": 1000, "min_lr": 1e-5, "lr_warmup_iters": 100, **settings})
    return LearningRate(schedule, peak=1e-4, global_batch_size=32)


def test_the_340m_recipe() -> None:
    recipe = rate(train_iters=1_000_000, lr_decay_iters=990_000, lr_warmup_iters=0, lr_warmup_fraction=0.01)
    expected = {0: 0.0, 1: 1e-4 / 9900, 4950: 5e-5, 9900: 1e-4, 499_950: 5.5e-5, 990_000: 1e-5, 999_999: 1e-5}
    for updates, wanted in expected.items():
        assert recipe.at(updates * 32) == pytest.approx(wanted, rel=1e-12), updates


@pytest.mark.parametrize(("style", "halfway", "end"), [
    ("linear", 5.5e-5, 1e-5), ("cosine", 5.5e-5, 1e-5), ("constant", 1e-4, 1e-4),
    ("inverse-square-root", 1e-4 * math.sqrt(100 / 550), 1e-4 * math.sqrt(100 / 1000))])
def test_styles(style: str, halfway: float, end: float) -> None:
    schedule = rate(lr_decay_style=style)
    assert schedule.at(50 * 32) == pytest.approx(5e-5)
    assert schedule.at(100 * 32) == pytest.approx(1e-4)
    assert schedule.at(550 * 32) == pytest.approx(halfway)
    assert schedule.at(1000 * 32) == pytest.approx(end)
    assert schedule.at(1001 * 32) == pytest.approx(1e-4 if style == "constant" else 1e-5)


@pytest.mark.parametrize(("style", "half"), [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1),
                                             ("minus_sqrt", 1 - 0.5**0.5)])
def test_wsd_stays_at_the_peak_then_decays(style: str, half: float) -> None:
    schedule = rate(lr_decay_style="WSD", lr_wsd_decay_iters=200, lr_wsd_decay_style=style)
    assert schedule.at(799 * 32) == pytest.approx(1e-4)
    assert schedule.at(900 * 32) == pytest.approx(1e-5 + half * 9e-5)
    assert schedule.at(1000 * 32) == pytest.approx(1e-5)


def test_warm_up_starts_where_it_is_told() -> None:
    assert rate(lr_warmup_init=2e-5).at(0) == 2e-5
    assert rate(lr_warmup_iters=0).at(0) == 1e-4
