"""What a run reports: console lines and TensorBoard scalars under Megatron-LM's names, and metrics.jsonl.

Sums come from the last stage; ratios are formed here, after the reduction over all ranks.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bert_ds.checkpoint.run_config import run_config_as_dict
from bert_ds.config.run import RunConfig
from bert_ds.data.atomic_file import atomic_text_file
from bert_ds.model.loss import METRICS
from bert_ds.parallel.context import ParallelContext

log = logging.getLogger(__name__)
SUMS = (*METRICS, "real_tokens", "nan_steps")
"""What is added up between two log lines: the loss's sums, tokens that are not padding, steps with a NaN loss."""
_SENTENCE_TASKS = {"order": "sop", "random_next": "nsp"}
"""What lines call the sentence task: sentence order or next sentence. Scalars and records say `sop` for both, as
Megatron-LM's scalars do, so that whatever reads them need not know the task."""
_DAY_S = 86400


@dataclass(frozen=True)
class Losses:
    """Means over all predictions of some steps; None where nothing was predicted."""

    lm_loss: float | None
    lm_accuracy: float | None
    sop_loss: float | None
    sop_accuracy: float | None

    @classmethod
    def from_sums(cls, sums: Mapping[str, float]) -> Losses:
        def ratio(part: str, count: str) -> float | None:
            return sums[part] / sums[count] if sums[count] else None

        return cls(ratio("lm_loss", "lm_count"), ratio("lm_correct", "lm_count"),
                   ratio("sop_loss", "sop_count"), ratio("sop_correct", "sop_count"))


def reduce_sums(sums: Tensor, ctx: ParallelContext) -> dict[str, float]:
    """Adds the last stage's sums over the data-parallel ranks and hands them to every rank."""
    if ctx.dp_group is not None and ctx.is_last_stage:
        dist.all_reduce(sums, group=ctx.dp_group)
    if ctx.pp_group is not None:
        dist.broadcast(sums, src=ctx.last_stage_rank, group=ctx.pp_group)
    return dict(zip(SUMS, sums.tolist(), strict=True))


@dataclass
class Interval:
    """What happened since the last log line."""

    device: torch.device
    steps: int = 0
    rows: int = 0
    skipped: int = 0
    sums: Tensor = field(init=False)
    started_s: float = field(default_factory=time.monotonic)
    data_wait_s: float = 0.0

    def __post_init__(self) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)

    def add(self, sums: Tensor, real_tokens: int, *, rows: int, skipped: bool, data_wait_s: float) -> None:
        """Counts one step over `rows` rows; the losses of a skipped one do not enter the means."""
        self.steps += 1
        self.rows += rows
        self.skipped += skipped
        self.data_wait_s += data_wait_s
        self.sums[-2] += real_tokens
        self.sums[-1] += sums.isnan().any()
        if not skipped:
            self.sums[:-2] += sums


class Reporter:
    """Writes log lines, scalars and metrics.jsonl; does so on one rank, keeps silent on the others."""

    def __init__(self, run: RunConfig, *, active: bool, flops_per_step: float, peak_flops_of_all: float | None) -> None:
        self._run = run
        self._active = active
        self._flops_per_step = flops_per_step
        self._peak = peak_flops_of_all
        self._file = None
        self._board: Any = None
        if active and run.output.tensorboard_dir:
            folder = Path(run.output.tensorboard_dir)
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_text_file(folder / "settings.json") as file:
                json.dump(run_config_as_dict(run), file, indent=1)
            self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
            self._board = _open_tensorboard(folder)
        self._bar = _progress_bar(run) if active else None

    def steps(self, step: int, consumed_samples: int, interval: Interval,  # noqa: PLR0913
              sums: dict[str, float], *, learning_rate: float, grad_norm: float | None, loss_scale: float | None,
              clock_left_s: float = math.inf) -> dict[str, Any]:
        """Reports the interval that ends with `step`; returns the record of metrics.jsonl. `clock_left_s`: seconds
        until the clock ends the run."""
        losses = Losses.from_sums(sums)
        seconds = time.monotonic() - interval.started_s
        step_time = seconds / interval.steps
        batch = interval.rows / interval.steps
        flops = self._flops_per_step * batch / self._run.engine.global_batch_size
        mfu = flops / (step_time * self._peak) if self._peak else None
        record = {
            "iteration": step, "consumed_samples": consumed_samples, **losses.__dict__,
            "learning_rate": learning_rate, "grad_norm": grad_norm, "loss_scale": loss_scale,
            "skipped": interval.skipped, "nan": int(sums["nan_steps"]), "step_time_s": step_time,
            "tokens_per_s": batch * self._run.model.seq_length / step_time,
            "real_tokens_per_s": sums["real_tokens"] / seconds,
            "data_wait_share": interval.data_wait_s / seconds, "mfu": mfu,
            "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if interval.device.type == "cuda" else None,
        }
        if self._active:
            left_s = min((self._run.schedule.train_iters - step) * step_time, max(clock_left_s, 0.0))
            self._say(_console_line(record, self._run, interval, left_s))
            self._write(record)
            self._scalars(step, consumed_samples, {
                "lm loss": losses.lm_loss, "sop loss": losses.sop_loss, "lm accuracy": losses.lm_accuracy,
                "sop accuracy": losses.sop_accuracy, "learning-rate": learning_rate, "grad-norm": grad_norm,
                "loss-scale": loss_scale, "batch-size": batch, "skipped-steps": interval.skipped,
                "iteration-time": step_time, "tokens-per-second": record["tokens_per_s"], "mfu": mfu})
        return record

    def evaluation(self, split: str, step: int, consumed_samples: int, losses: Losses) -> dict[str, Any]:
        """Reports an evaluation; returns the record of metrics.jsonl."""
        record = {"split": split, "iteration": step, "consumed_samples": consumed_samples, **losses.__dict__}
        if self._active:
            self._say(_evaluation_line(split, step, losses, self._run))
            self._write(record)
            kind = "validation" if split == "valid" else split
            self._scalars(step, consumed_samples, {
                f"lm loss {kind}": losses.lm_loss, f"sop loss {kind}": losses.sop_loss,
                f"lm accuracy {kind}": losses.lm_accuracy, f"sop accuracy {kind}": losses.sop_accuracy,
                f"lm loss {kind} ppl": None if losses.lm_loss is None else math.exp(min(20.0, losses.lm_loss))})
        return record

    def advance(self, steps: int) -> None:
        """Moves the progress bar."""
        if self._bar is not None:
            self._bar.update(steps)

    def close(self) -> None:
        """Flushes and closes the files."""
        for output in (self._bar, self._board, self._file):
            if output is not None:
                output.close()

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        log.info(line)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def _scalars(self, step: int, samples: int, values: Mapping[str, float | None]) -> None:
        if self._board is None:
            return
        for name, value in values.items():
            if value is not None:
                self._board.add_scalar(name, value, step)
                self._board.add_scalar(f"{name} vs samples", value, samples)
        self._board.flush()


def _console_line(record: Mapping[str, Any], run: RunConfig, interval: Interval, left_s: float) -> str:
    parts = [
        f"iteration {record['iteration']:8d}/{run.schedule.train_iters:8d}",
        f"consumed samples: {record['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {record['step_time_s'] * 1e3:.1f}",
        f"learning rate: {record['learning_rate']:.6E}",
        f"global batch size: {round(interval.rows / interval.steps):5d}",
        *_loss_parts(record, run, "{:.6E}"),
    ]
    if record["loss_scale"] is not None:
        parts.append(f"loss scale: {record['loss_scale']:.1f}")
    if record["grad_norm"] is not None:
        parts.append(f"grad norm: {record['grad_norm']:.3f}")
    parts += [f"number of skipped iterations: {interval.skipped:3d}", f"number of nan iterations: {record['nan']:3d}",
              f"tokens/s: {record['tokens_per_s']:.0f}"]
    if record["mfu"] is not None:
        parts.append(f"MFU: {record['mfu']:.1%}")
    return " " + " | ".join([*parts, f"time left: {duration(left_s)}"]) + " |"


def _loss_parts(record: Mapping[str, Any], run: RunConfig, number: str) -> list[str]:
    parts = []
    for head, name in (("lm", "lm"), ("sop", _SENTENCE_TASKS[run.data.sentence_task])):
        if record[f"{head}_loss"] is not None:
            parts += [f"{name} loss: {number.format(record[f'{head}_loss'])}",
                      f"{name} accuracy: {record[f'{head}_accuracy']:.2%}"]
    return parts


def _evaluation_line(split: str, step: int, losses: Losses, run: RunConfig) -> str:
    name = "validation" if split == "valid" else split
    return f" {name} loss at iteration {step} | " + " | ".join(_loss_parts(losses.__dict__, run, "{:.6f}")) + " |"


def duration(seconds: float) -> str:
    """1 d 02:03:04, 02:03:04 or 03:04."""
    days, rest = divmod(round(seconds), _DAY_S)
    hours, minutes, seconds_left = rest // 3600, rest // 60 % 60, rest % 60
    clock = f"{hours:02d}:{minutes:02d}:{seconds_left:02d}" if hours or days else f"{minutes:02d}:{seconds_left:02d}"
    return f"{days} d {clock}" if days else clock


def _open_tensorboard(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - slow to import, needed on one rank

    return SummaryWriter(str(folder), max_queue=1000)


def _progress_bar(run: RunConfig) -> Any:
    from tqdm import tqdm  # noqa: PLC0415 - needed on one rank

    return tqdm(total=run.schedule.train_iters, unit="it", disable=not sys.stdout.isatty(), file=sys.stdout,
                dynamic_ncols=True, leave=False)
