"""Batches that grow, runs that end by the clock or by a signal, evaluation alone: the training loop itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_runs import GuardedRun
from ranks import run_ranks
from tiny_runs import ADAM_EPS, GLOBAL_BATCH, Batch, Case, allow_fp16_on_cpu, run_config, write_vocabulary

from bert_ds.checkpoint.reader import Checkpoint, find_latest
from bert_ds.config.schedule import ScheduleConfig
from bert_ds.model.bert import BertModel, ComputeSettings
from bert_ds.model.loss import LossSums, PretrainingLoss
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.lr_schedule import LearningRate
from bert_ds.training.state import TrainingState

RAMP = ("8", "4", "24")
ROWS = [8, 8, 12, 16, 16, 16]
"""Of the first iterations: 8 up to 12 samples, 12 up to 24, then 16."""
FAST = [Case(pp=2), Case()]
CASES = [Case(pp=2, precision="bf16"), Case(precision="fp16"), Case(zero=0), Case(tp=2, normalization="micro_batch"),
         Case(pp=2, schedule="dualpipev"), Case(pp=2, precision="bf16", schedule="dualpipev")]


def ramp(case: Case, folder: Path | None = None, **schedule: Any) -> GuardedRun:
    return GuardedRun(case, folder, rampup_batch_size=RAMP, **schedule)


def straight_and_interrupted(cases: list[Case], root: str, vocab_file: str) -> list[tuple[Any, ...]]:
    """Each case in one go, and ended after iteration 3 and resumed: log lines, samples read, whether they are equal."""
    allow_fp16_on_cpu()
    results = []
    for index, case in enumerate(cases):
        straight = ramp(case).train(vocab_file)
        first = ramp(case, Path(root) / str(index), exit_interval=3).train(vocab_file)
        second = ramp(case, Path(root) / str(index)).resume(vocab_file)
        same = all(map(torch.equal, straight.weights(), second.weights()))
        lines = straight.records.lines
        results.append((lines, sorted(straight.data.read), same, first.records.lines + second.records.lines == lines))
        for run in (straight, first, second):
            run.close()
    return results


def in_plain_torch(case: Case) -> tuple[list[float], list[float]]:
    """The same six updates without DeepSpeed: losses and gradient norms."""
    run, ctx = run_config(case), ParallelContext.single_process()
    model = BertModel(run.model, ctx, ComputeSettings())
    model.initialize(run.schedule.seed)
    sums = LossSums(ctx.device)
    named = dict(model.named_logical_parameters())
    decayed = [p for name, p in named.items() if p.dim() > 1 and not name.endswith("bias")]
    kept = [p for name, p in named.items() if p.dim() == 1 or name.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}],
                                  lr=1e-2, eps=ADAM_EPS)
    rates = LearningRate(ScheduleConfig(train_iters=6, lr_warmup_iters=2), 1e-2, GLOBAL_BATCH)
    losses, norms, consumed = [], [], 0
    for step, rows in enumerate(ROWS):
        drawn = [Batch.draw(index, case) for index in range(consumed // GLOBAL_BATCH, consumed // GLOBAL_BATCH + 3)]
        where = slice(consumed % GLOBAL_BATCH, consumed % GLOBAL_BATCH + rows)
        inputs = tuple(torch.cat(parts)[where] for parts in zip(*(batch.inputs for batch in drawn), strict=True))
        labels = tuple(torch.cat(parts)[where] for parts in zip(*(batch.labels for batch in drawn), strict=True))
        counts = torch.tensor([float((label != -100).sum()) for label in labels])
        for group in optimizer.param_groups:
            group["lr"] = rates.after_updates(step)
        optimizer.zero_grad()
        PretrainingLoss(run.model, ctx, sums, 1)(model(inputs, None), (*labels, counts)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), 1.0)))
        optimizer.step()
        lm_loss, _, lm_count, *_ = sums.take().tolist()
        losses.append(lm_loss / lm_count)
        consumed += rows
    return losses, norms


@pytest.mark.proves("a global batch that grows gives plain PyTorch's updates, and resumes in the midst of it", "EXACT")
@pytest.mark.parametrize("cases", [FAST, pytest.param(CASES, marks=pytest.mark.long)], ids=["fast", "all"])
def test_a_batch_that_grows(cases: list[Case], tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    ranks = run_ranks(straight_and_interrupted, 2, cases, str(tmp_path), str(vocab_file))
    losses, norms = in_plain_torch(Case())
    for index, case in enumerate(cases):
        read: list[int] = []
        for lines, samples, same_weights, same_lines in (results[index] for results in ranks):
            assert same_weights and same_lines, case
            assert [line["rows"] for line in lines] == ROWS
            assert [line["consumed_samples"] for line in lines] == [8, 16, 28, 44, 60, 76]
            if case.normalization == "global_batch":
                close = {"rel": 2e-5} if case.precision == "fp32" else {"rel": 3e-2}
                assert [line["lm_loss"] for line in lines] == pytest.approx(losses, **close), case
                if case.zero:  # without ZeRO, DeepSpeed tells no norm
                    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, **close), case
            read += samples
        assert set(read) == set(range(76)), case
        if case.pp == case.tp == 1:
            assert len(read) == 76, "data-parallel ranks share the samples"


def by_the_clock(root: str, vocab_file: str) -> dict[str, Any]:
    """Runs that end by a budget, by a limit, by a signal, and one that does not train."""
    found: dict[str, Any] = {}
    case, long = Case(pp=2), {"train_iters": 20_000, "lr_warmup_iters": 0}
    run = GuardedRun(case, Path(root) / "budget", train_minutes=0.05, eval_interval=10**6, eval_iters=1, **long)
    run.train(vocab_file)
    found["budget"] = (run.outcome, [line["learning_rate"] for line in run.records.lines], run.records.evaluations)
    run.close()
    run = GuardedRun(case, train_minutes=0.05, **long)
    run.train(vocab_file, TrainingState(training_s=2.0))
    found["second part"] = [line["learning_rate"] for line in run.records.lines]
    run.close()
    run = GuardedRun(case, Path(root) / "limit", exit_duration_in_mins=0.01, **long).train(vocab_file)
    found["limit"] = run.outcome
    run.close()
    run = GuardedRun(case, Path(root) / "signal", **long)
    if run.inner.ctx.rank == 1:
        run.records.on_line = lambda step: os.kill(os.getpid(), signal.SIGUSR1) if step == 3 else None
    run.train(vocab_file)
    found["signal"] = run.outcome
    run.close()
    run = GuardedRun(case, Path(root) / "evaluation", skip_train=True, eval_interval=5, eval_iters=2).train(vocab_file)
    found["evaluation"] = (run.outcome, run.records.lines, run.records.evaluations, run.data.read)
    run.close()
    return found


def test_clocks_and_signals(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")

    def saved(name: str) -> Any:
        found = find_latest(tmp_path / name, verify_hashes=True)
        assert found is not None
        return Checkpoint.open(found).manifest

    for found in run_ranks(by_the_clock, 2, str(tmp_path), str(vocab_file)):
        code, rates, evaluations = found["budget"]
        assert code == 0
        assert rates == sorted(rates, reverse=True) and rates[0] > 0.5e-2 and rates[-1] == 0.0
        steps = saved("budget").step
        assert evaluations == [("valid", 0), ("valid", steps), ("test", steps)] and len(rates) == steps
        assert found["second part"][0] < 0.4e-2 and found["second part"][-1] == 0.0, "a third of the curve is left"
        assert (found["limit"], found["signal"]) == (0, 75)
        assert found["evaluation"] == (0, [], [("valid", 0), ("test", 0)], [])
    assert 3.0 <= saved("budget").training_s < 30.0
    assert saved("limit").step >= 1
    assert saved("signal").step in {3, 4}
    assert find_latest(tmp_path / "evaluation", verify_hashes=True) is None
