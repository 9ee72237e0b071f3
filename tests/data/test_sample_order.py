"""A run that goes on from a checkpoint reads on where it stopped, whatever it is told about its length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bert_ds.checkpoint.run_config import run_config_as_dict
from bert_ds.config.data import DataConfig
from bert_ds.config.engine import EngineConfig
from bert_ds.config.model import ModelConfig
from bert_ds.config.output import OutputConfig
from bert_ds.config.parallel import ParallelConfig
from bert_ds.config.run import RunConfig
from bert_ds.config.schedule import ScheduleConfig
from bert_ds.data.bert_dataset import build_datasets
from bert_ds.data.sample_order import planned_samples
from bert_ds.data.samples import SampleSource
from bert_ds.errors import ConfigError
from tests.data.test_bert_dataset import VOCABULARY, write_corpus


def run_of(train_iters: int, batch: int = 8, **data: object) -> RunConfig:
    return RunConfig(
        name="test", model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=64),
        parallel=ParallelConfig(), data=DataConfig(**data), schedule=ScheduleConfig(train_iters=train_iters),
        engine=EngineConfig(micro_batch_size=1, global_batch_size=batch, lr=1e-4), output=OutputConfig())


def train_samples(run: RunConfig) -> SampleSource:
    samples = run.schedule.train_iters * run.engine.global_batch_size
    train = build_datasets(run.data, seq_length=64, binary_head=True, seed=1234, vocabulary=VOCABULARY,
                           num_samples={"train": samples}).train
    assert train is not None
    assert len(train) >= samples
    return train


def resumed(run: RunConfig, before: RunConfig | None) -> RunConfig:
    """`run` as training starts it, from a checkpoint of `before`."""
    saved = None if before is None else run_config_as_dict(before)
    return replace(run, data=replace(run.data, planned_samples=planned_samples(run, saved)))


@pytest.mark.proves("a changed length of training keeps the order of samples", "EXACT")
@pytest.mark.parametrize("blend", [False, True])
def test_a_changed_length_keeps_the_order(tmp_path: Path, blend: bool) -> None:
    prefixes = [write_corpus(str(tmp_path / name), seed=seed) for seed, name in enumerate("ab")]
    paths = ("0.7", prefixes[0], "0.3", prefixes[1]) if blend else (prefixes[0],)

    def run(train_iters: int, batch: int = 8) -> RunConfig:
        return run_of(train_iters, batch, data_path=paths, split="1")

    first = resumed(run(100), None)
    longer = resumed(run(300), first)
    longer_still = resumed(run(150, batch=24), longer)
    shorter = resumed(run(30), longer_still)
    assert {one.data.planned_samples for one in (first, longer, longer_still, shorter)} == {800}
    # Without the plan, the same lengths read other samples.
    assert not same(train_samples(run(100)), train_samples(run(300)), 800)
    for before, after, count in ((first, longer, 800), (longer, longer_still, 2400), (longer_still, shorter, 240)):
        assert same(train_samples(before), train_samples(after), count)


def same(one: SampleSource, other: SampleSource, count: int) -> bool:
    indices = np.arange(count)
    return all((a == b).all() for a, b in zip(one.build_batch(indices), other.build_batch(indices), strict=True))


def test_another_plan_is_refused_and_an_explicit_one_kept() -> None:
    planned = resumed(run_of(10, planned_samples=5000), None)
    assert planned.data.planned_samples == 5000
    assert resumed(run_of(20, planned_samples=5000), planned).data.planned_samples == 5000
    with pytest.raises(ConfigError, match=r"data.planned_samples=80: .*drawn for 5000.*leave it out"):
        resumed(run_of(10, planned_samples=80), planned)
    # Neither a checkpoint of an earlier version nor one that no training made knows of plans.
    saved = run_config_as_dict(run_of(7))
    del saved["data"]["planned_samples"]
    assert planned_samples(run_of(10), saved) == 56
    assert planned_samples(run_of(10), {"model": {}}) == 80
