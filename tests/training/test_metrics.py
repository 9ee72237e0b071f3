"""What a run reports: console line, metrics.jsonl, TensorBoard scalars, and the arithmetic behind them."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import Case, run_config

from bert_ds.config.model import ModelConfig
from bert_ds.config.output import OutputConfig
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.metrics import Interval, Losses, Reporter, duration, reduce_sums
from bert_ds.training.throughput import row_flops

CPU = torch.device("cpu")
KEYS = {"iteration", "consumed_samples", "lm_loss", "sop_loss", "lm_accuracy", "sop_accuracy", "learning_rate",
        "grad_norm", "loss_scale", "skipped", "step_time_s", "tokens_per_s", "mfu"}


def report(folder: Path, sums: list[list[float]], skipped: list[bool],
           sentence_task: Literal["order", "random_next"] = "order") -> dict[str, object]:
    run = run_config(Case())
    run = replace(run, output=OutputConfig(tensorboard_dir=str(folder), log_interval=len(sums)),
                  data=replace(run.data, sentence_task=sentence_task))
    reporter = Reporter(run, active=True, flops_per_step=1e9, peak_flops_of_all=1e12)
    interval = Interval(CPU)
    for values, skip in zip(sums, skipped, strict=True):
        interval.add(torch.tensor(values, dtype=torch.float64), 100, rows=16, skipped=skip, data_wait_s=0.0)
    record = reporter.steps(7, 112, interval, reduce_sums(interval.sums, ParallelContext.single_process()),
                            learning_rate=3e-4, grad_norm=1.25, loss_scale=65536.0)
    reporter.evaluation("valid", 7, 112, Losses(2.0, 0.5, 0.7, 0.6))
    reporter.close()
    return record


def test_means_are_over_predictions_of_steps_that_were_not_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "bert_ds"):
        report(tmp_path, [[30.0, 5, 10, 7.0, 6, 10], [10.0, 5, 30, 7.0, 8, 10], [1e9, 0, 1, 1e9, 0, 1]],
               [False, False, True])
    training, evaluation = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert set(training) >= KEYS
    assert (training["lm_loss"], training["lm_accuracy"]) == (1.0, 0.25)
    assert (training["sop_loss"], training["sop_accuracy"]) == (0.7, 0.7)
    assert training["skipped"] == 1
    assert evaluation == {"split": "valid", "iteration": 7, "consumed_samples": 112, "lm_loss": 2.0,
                          "lm_accuracy": 0.5, "sop_loss": 0.7, "sop_accuracy": 0.6}
    line, validation = (record.getMessage() for record in caplog.records[-2:])
    for part in ("iteration        7/     100", "consumed samples:          112", "learning rate: 3.000000E-04",
                 "global batch size:    16", "lm loss: 1.000000E+00", "sop loss: 7.000000E-01", "loss scale: 65536.0",
                 "grad norm: 1.250", "number of skipped iterations:   1", "time left: "):
        assert part in line
    assert "validation loss at iteration 7" in validation
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    scalars = board.Tags()["scalars"]
    for name in ("lm loss", "sop loss", "learning-rate", "loss-scale", "grad-norm", "batch-size",
                 "lm loss validation", "sop loss validation", "lm loss validation ppl"):
        assert {name, f"{name} vs samples"} <= set(scalars)
    assert board.Scalars("lm loss")[0].value == 1.0
    assert board.Scalars("lm loss vs samples")[0].step == 112
    assert board.Scalars("lm loss validation ppl")[0].value == pytest.approx(math.exp(2))


def test_lines_name_the_sentence_task_and_scalars_keep_their_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "bert_ds"):
        report(tmp_path, [[30.0, 5, 10, 7.0, 6, 10]], [False], "random_next")
    line, validation = (record.getMessage() for record in caplog.records[-2:])
    assert "nsp loss: 7.000000E-01 | nsp accuracy: 60.00%" in line and "nsp loss: 0.7" in validation
    assert "sop" not in line + validation
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert {"sop loss", "sop loss validation"} <= set(board.Tags()["scalars"])


def test_nan_is_reported_as_nan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bert_ds"):
        report(tmp_path, [[math.nan, 0, 10, 7.0, 6, 10], [10.0, 5, 30, 7.0, 8, 10]], [False, False])
    assert "lm loss: NAN" in caplog.records[-2].getMessage()
    assert "number of nan iterations:   1" in caplog.records[-2].getMessage()


def test_flops_of_a_row() -> None:
    """BERT-Large at 512 tokens with 80 predictions kept: 927.7 + 77.3 GFLOP for the layers, the rest for the head."""
    model = ModelConfig(num_layers=24, hidden_size=1024, num_attention_heads=16)
    head = 6 * 80 * (1024**2 + 1024 * 30592) + 6 * 1024**2
    assert row_flops(model, 80) == 72 * 24 * 1024**2 * 512 + 12 * 24 * 512**2 * 1024 + head
    assert row_flops(model, 80) == pytest.approx(1.0205e12, rel=1e-3)


def test_durations() -> None:
    assert [duration(seconds) for seconds in (5, 3725, 90061)] == ["00:05", "01:02:05", "1 d 01:01:01"]
