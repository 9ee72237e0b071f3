"""What a run does when its loss goes wrong: the statistics, and the training loop itself in several layouts."""

from __future__ import annotations

import json
import logging
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_runs import GuardedRun, weights_after
from ranks import run_ranks
from tiny_runs import Case, allow_fp16_on_cpu, write_vocabulary

from bert_ds.checkpoint.reader import Checkpoint, find_latest
from bert_ds.config.guards import GuardConfig
from bert_ds.training.guards import LossHistory, PlateauHint

FAST = [Case(pp=2, precision="bf16", dropout=0.1)]
CASES = [Case(pp=2, dropout=0.1), Case(precision="fp16"), Case(zero=0),
         Case(pp=2, precision="bf16", schedule="dualpipev")]


def infinite(hidden: Any) -> Any:
    return hidden * float("inf")


def bad_losses(cases: list[Case], root: str, vocab_file: str) -> list[dict[str, Any]]:
    """Iteration 4 (3 from 0) of 6 goes wrong in each case, once for each policy; checkpoints after 2, 4 and 6."""
    allow_fp16_on_cpu()
    results = []
    for index, case in enumerate(cases):
        found: dict[str, Any] = {}
        for policy, batches in (("stop", [0, 1, 2]), ("skip", [0, 1, 2, 4, 5]), ("rewind", [0, 1, 4, 5])):
            run = GuardedRun(case, Path(root) / f"{index}_{policy}", guards={"on_nan_loss": policy})
            run.at_step(3, infinite).train(vocab_file)
            wanted = weights_after(case, run.run, batches)
            found[policy] = run.outcome
            found[f"{policy} equal"] = all(map(torch.equal, run.weights(), wanted))
            found[f"{policy} finite"] = all(bool(weight.isfinite().all()) for weight in run.weights())
            run.close()
        results.append(found)
    return results


@pytest.mark.proves("an update that a guard refuses, or goes back behind, leaves no trace on any rank", "EXACT")
@pytest.mark.parametrize("cases", [FAST, pytest.param(CASES, marks=pytest.mark.long)], ids=["fast", "all"])
def test_stop_skip_and_rewind(cases: list[Case], tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    for rank, results in enumerate(run_ranks(bad_losses, 2, cases, str(tmp_path), str(vocab_file))):
        for case, found in zip(cases, results, strict=True):
            for policy in ("stop", "skip", "rewind"):
                assert found[f"{policy} equal"] and found[f"{policy} finite"], (case, rank, policy)
            assert (found["skip"], found["rewind"]) == (0, 0)
            for part in ("stopped by a guard", "loss=the loss is nan", "iteration 4 is not in the weights",
                         "gradients with inf or NaN, the first in the order of the backward pass is",
                         "the first layer whose output has inf or NaN is encoder.layers.3;",
                         "the state before it is saved in", "--on-nan-loss"):
                assert part in found["stop"], found["stop"]
    for index in range(len(cases)):
        stopped, skipped, rewound = (
            Checkpoint.open(found).manifest for policy in ("stop", "skip", "rewind")
            if (found := find_latest(tmp_path / f"{index}_{policy}", verify_hashes=True)))
        assert (stopped.step, stopped.consumed_samples, stopped.skipped_steps) == (3, 48, 0)
        assert (skipped.step, skipped.consumed_samples, skipped.skipped_steps) == (6, 96, 1)
        assert (rewound.step, rewound.consumed_samples, rewound.skipped_steps, rewound.successful_samples) == (
            6, 96, 2, 64)
        assert rewound.optimizer_step == 4


def test_spikes_are_judged_by_the_losses_before() -> None:
    draw = random.Random(3)
    config = GuardConfig(on_loss_spike="skip", loss_spike_window=50, loss_spike_deviations=6.0)
    history = LossHistory(config)
    falling = [7 * 0.997**step + draw.gauss(0, 0.1) for step in range(400)]
    assert not [loss for loss in falling if history.judge(loss)], "a curve that falls has no spikes"
    verdict = history.judge(falling[-1] + 1.5)
    assert verdict is not None and verdict.policy == "skip" and "jumped to" in verdict.reason
    assert history.judge(falling[-1]) is None, "a spike is no measure for what comes after"
    for _ in range(8):
        verdict = history.judge(float("nan"))
        assert verdict is not None and verdict.policy == "stop"
    persistent = LossHistory(replace(config, on_nan_loss="skip", bad_losses_in_window=3))
    assert [verdict.policy for verdict in map(persistent.judge, [float("inf")] * 3) if verdict] == [
        "skip", "skip", "stop"]


def test_a_spike_is_told_once_where_it_is_only_told() -> None:
    history = LossHistory(GuardConfig(loss_spike_window=10))
    verdicts = [history.judge(loss) for loss in [2.0] * 10 + [4.0] * 10]
    assert [verdict.policy for verdict in verdicts if verdict] == ["warn"]
    assert LossHistory(GuardConfig(loss_spike_window=1, loss_spike_deviations=0)).judge(1e9) is None


def test_the_plateau_is_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    hint = PlateauHint()
    with caplog.at_level(logging.INFO, "bert_ds"):
        for step in range(100, 1200, 100):
            hint.see(step, 10 - step / 300)  # falls all the time
        assert not caplog.records
        for step in range(1200, 6000, 100):
            hint.see(step, 6.4)
    assert len(caplog.records) == 1 and "That is normal" in caplog.text


def told_on_the_way(root: str, vocab_file: str) -> tuple[Any, list[str]]:
    """A loss that goes wrong before there is a checkpoint, and data that come late: exit code and warnings."""
    run = GuardedRun(Case(pp=2), Path(root), guards={"on_nan_loss": "rewind", "data_wait_s": 0.3}, train_iters=3)
    read = run.data.build_batch

    def late(indices: Any) -> Any:
        time.sleep(1.0 if indices[0] == 0 else 0.0)
        return read(indices)

    run.data.build_batch = late  # type: ignore[method-assign]
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("bert_ds.training.trainer")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    run.at_step(0, infinite).train(vocab_file)
    logger.removeHandler(handler)
    run.close()
    return run.outcome, heard


def test_late_data_and_a_rewind_to_nowhere_are_told(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    (code, heard), (other_code, _) = run_ranks(told_on_the_way, 2, str(tmp_path / "out"), str(vocab_file))
    assert (code, other_code) == (0, 0)
    text = "\n".join(heard)
    assert "iteration 1 waited" in text and "--num-workers" in text
    assert "iteration 1: the loss is nan (rewind)" in text
    assert text.count("there is no checkpoint to go back to yet; the update is skipped") == 1


def collapse(root: str, vocab_file: str) -> str:
    """An fp16 run whose gradients overflow with the scale at its floor, from the second layer on."""
    allow_fp16_on_cpu()
    run = GuardedRun(Case(pp=2, precision="fp16"), Path(root))
    scaler = run.inner.engine.optimizer.loss_scaler
    scaler.cur_scale, scaler.cur_hysteresis = scaler.min_scale, 1
    for local in run.inner.pipeline.local_parameters():
        if local.name == "encoder.layers.1.mlp.linear_fc1.weight":
            local.parameter.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    run.train(vocab_file)
    run.close()
    return str(run.outcome)


def test_a_collapse_of_the_loss_scale_names_the_parameter(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    for text in run_ranks(collapse, 2, str(tmp_path / "out"), str(vocab_file)):
        assert "1 of" in text and "parameters have gradients with inf or NaN" in text
        assert "is encoder.layers.1.mlp.linear_fc1.weight" in text
        assert "--bf16" in text and "iteration 1 still overflow" in text
    assert json.loads((tmp_path / "out" / "iter_0000000" / "checkpoint.json").read_text())["step"] == 0
