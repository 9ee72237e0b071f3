"""A run that goes on from a checkpoint tells what it does otherwise, in a line each, and nothing beside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bert_ds.checkpoint.config_diff import differences
from bert_ds.checkpoint.format import LayoutRecord, Manifest, VocabularyRecord
from bert_ds.checkpoint.run_config import run_config_as_dict
from bert_ds.config.engine import LossScaleConfig
from bert_ds.config.run import RunConfig
from tests.checkpoint.saved_checkpoints import model_config, run_config

RUN = run_config(model_config())
LAYOUT = LayoutRecord(2, 2, 2)


def manifest(run: RunConfig = RUN) -> Manifest:
    return Manifest(
        step=10, consumed_samples=320, successful_samples=320, skipped_steps=0, optimizer_step=10, loss_scaler=None,
        config=run_config_as_dict(run), layout=LAYOUT, versions={}, vocabulary=VocabularyRecord("", 0, ""), metrics={},
        parameters={}, files=())


def changed(section: str, **settings: Any) -> RunConfig:
    return replace(RUN, **{section: replace(getattr(RUN, section), **settings)})


def told(run: RunConfig, *, saved: RunConfig = RUN, layout: LayoutRecord = LAYOUT) -> list[str]:
    return [str(one) for one in differences(manifest(saved), run, layout)]


def test_nothing_is_told_where_nothing_differs() -> None:
    assert told(RUN) == []
    unimportant = replace(
        changed("output", save="elsewhere", load="elsewhere", save_interval=5), name="other",
        data=replace(RUN.data, num_workers=7, data_cache_path="/scratch", vocab_file="moved.txt", planned_samples=9),
        parallel=replace(RUN.parallel, tensor_model_parallel_size=4))
    assert told(unimportant) == []


@pytest.mark.parametrize(("run", "line"), [
    (changed("model", hidden_dropout=0.0), "model.hidden_dropout: 0.1 -> 0.0"),
    (changed("schedule", train_iters=300), "schedule.train_iters: 200 -> 300"),
    (changed("engine", global_batch_size=64), "engine.global_batch_size: 32 -> 64"),
    (changed("engine", betas=(0.9, 0.95)), "engine.betas: 0.9 0.999 -> 0.9 0.95"),
    (changed("engine", precision="fp16"), "engine.precision: fp32 -> fp16 (loss scaling starts afresh)"),
    (changed("engine", loss_scaling=LossScaleConfig(initial_scale_power=20, hysteresis=4)),
     "engine.loss_scaling.hysteresis: 2 -> 4"),
    (changed("engine", passed_through={"wall_clock_breakdown": True}), "deepspeed.wall_clock_breakdown: none -> true"),
    (changed("data", split="1"), "data.split: 949,50,1 -> 1 (from here on the run reads other samples)"),
    (changed("data", data_path=("1", "a", "2", "b")),
     "data.data_path: /home/someone/books_text_sentence -> 1 a 2 b (from here on the run reads other samples)"),
    (changed("schedule", seed=5), "schedule.seed: 1234 -> 5 (from here on the run reads other samples)"),
])
def test_what_differs_is_one_line(run: RunConfig, line: str) -> None:
    assert told(run) == [line]


def test_the_layout_is_one_line() -> None:
    assert told(RUN, layout=LayoutRecord(1, 4, 1)) == [
        "layout: tensor 2 x pipeline 2 x data 2 -> tensor 1 x pipeline 4 x data 1"]


def test_several_settings_are_several_lines_and_the_loss_scale_is_dropped() -> None:
    saved = changed("engine", precision="fp16", zero_stage=0)
    assert told(RUN, saved=saved) == ["engine.precision: fp16 -> fp32 (the loss scale is dropped)",
                                      "engine.zero_stage: 0 -> 1"]


def test_settings_of_another_version_are_left_out() -> None:
    saved = manifest()
    config = {section: dict(values) for section, values in saved.config.items() if section not in ("name", "schedule")}
    config["data"]["gone"] = 1
    del config["data"]["split"]
    assert list(differences(replace(saved, config=config), RUN, LAYOUT)) == []
    assert list(differences(replace(saved, config={"model": config["model"]}), RUN, LAYOUT)) == []
