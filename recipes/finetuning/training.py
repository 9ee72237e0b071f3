"""Trains a model that transformers has loaded on one device: AdamW, linear warm-up and decay, batches of rows of like
length that are padded no further than their longest."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bert_ds.errors import ConfigError, GuardError, Problem, raise_if_any
from finetuning.progress import Progress

Row = Mapping[str, Any]
"""What the tokenizer made of one text (lists of integers), and its labels (integers) under the model's names."""

_BATCHES_SORTED_TOGETHER = 50


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a model is fine-tuned."""

    epochs: int
    batch_size: int
    learning_rate: float
    """The peak."""
    warmup_share: float
    """Share of the steps in which the learning rate rises from 0; it falls to 0 over the others."""
    weight_decay: float
    """For matrices; biases and LayerNorms have none."""
    clip_norm: float
    precision: Literal["fp32", "bf16"]
    device: torch.device

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> TrainingSettings:
        """Raises ConfigError with everything that is wrong with the flags of `add_training_flags`."""
        raise_if_any(ConfigError, _problems(options))
        return cls(epochs=options.epochs, batch_size=options.batch_size, learning_rate=options.learning_rate,
                   warmup_share=options.warmup_share, weight_decay=options.weight_decay, clip_norm=options.clip_norm,
                   precision=options.precision, device=choose_device(options.device))


def add_training_flags(parser: argparse.ArgumentParser, *, epochs: int, batch_size: int, learning_rate: float) -> None:
    """Adds the flags that TrainingSettings.from_options reads; the arguments are their defaults."""
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=int, default=epochs, metavar="N", help="default: %(default)s")
    group.add_argument("--batch-size", type=int, default=batch_size, metavar="N", help="default: %(default)s")
    group.add_argument("--learning-rate", type=float, default=learning_rate, metavar="X",
                       help="the peak (default: %(default)s)")
    group.add_argument("--warmup-share", type=float, default=0.1, metavar="X",
                       help="share of the steps in which the learning rate rises; then it falls to 0 "
                            "(default: %(default)s)")
    group.add_argument("--weight-decay", type=float, default=0.01, metavar="X",
                       help="for matrices only (default: %(default)s)")
    group.add_argument("--clip-norm", type=float, default=1.0, metavar="X",
                       help="largest norm of the gradients (default: %(default)s)")
    group.add_argument("--precision", choices=("fp32", "bf16"), default="fp32",
                       help="bf16 computes in bfloat16 and keeps fp32 weights (default: %(default)s)")
    add_device_flag(group)


def add_device_flag(group: argparse._ActionsContainer) -> None:
    """Adds --device, which `choose_device` reads."""
    group.add_argument("--device", default="auto", metavar="NAME",
                       help="cpu, cuda, cuda:1; auto takes a GPU where there is one (default: %(default)s)")


def choose_device(name: str) -> torch.device:
    """The device called `name`, or the best for `auto`. Raises ConfigError when it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError.of("--device", name, f"cannot be used ({str(error).splitlines()[0]})",
                             "use cpu, or auto, which takes a GPU where there is one") from error
    return device


def train(model: Any, tokenizer: Any, rows: Sequence[Row], settings: TrainingSettings, *, seed: int,
          progress: Progress) -> Iterator[int]:
    """Trains `model` in place; yields the number of each epoch that is done, counted from 1.

    The order of the rows and dropout follow from `seed`.

    Raises:
        ConfigError: a batch does not fit into the device's memory.
        GuardError: the loss or the weights are not finite at the end of an epoch.
    """
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    steps_per_epoch = -(-len(rows) // settings.batch_size)
    optimizer, schedule = _optimizer(model, settings, steps_per_epoch * settings.epochs)
    lengths = [len(row["input_ids"]) for row in rows]
    for epoch in range(1, settings.epochs + 1):
        model.train()
        progress.begin_epoch(epoch)
        for numbers in shuffled_batches(lengths, settings.batch_size, order):
            with _memory_reported(settings.batch_size):
                loss = _run(model, _collate(tokenizer, [rows[i] for i in numbers], settings), settings).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            progress.step(len(numbers), loss.detach())
        if not _is_finite(model, progress.mean_loss_of_epoch()):
            raise GuardError.of("--learning-rate", settings.learning_rate, f"training has diverged in epoch {epoch}: "
                                "the loss or the weights are not finite", "lower it")
        yield epoch


@torch.inference_mode()
def predict(model: Any, tokenizer: Any, rows: Sequence[Row],
            settings: TrainingSettings) -> Iterator[tuple[list[int], Any]]:
    """Yields, batch by batch, the numbers of the rows and the model's output for them; longest rows first."""
    model.eval()
    lengths = [len(row["input_ids"]) for row in rows]
    numbers = sorted(range(len(rows)), key=lambda i: -lengths[i])
    for batch in _cut(numbers, settings.batch_size):
        with _memory_reported(settings.batch_size):
            output = _run(model, _collate(tokenizer, [rows[i] for i in batch], settings), settings)
        yield batch, output


def shuffled_batches(lengths: Sequence[int], batch_size: int, generator: torch.Generator) -> list[list[int]]:
    """The numbers of all rows, each once, in batches of rows of like length.

    Shuffled rows are sorted by length within groups of several batches; the order of the batches is shuffled again.
    """
    numbers = torch.randperm(len(lengths), generator=generator).tolist()
    batches = [batch for group in _cut(numbers, batch_size * _BATCHES_SORTED_TOGETHER)
               for batch in _cut(sorted(group, key=lambda i: lengths[i]), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def learning_rate_factor(step: int, *, warmup_steps: int, steps: int) -> float:
    """Share of the peak in step `step`, counted from 0: up to 1 over the warm-up, then down towards 0, both linear."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return max(0, steps - step) / max(1, steps - warmup_steps)


def _problems(options: argparse.Namespace) -> Iterator[Problem]:
    for flag, value, least in (("--epochs", options.epochs, 0), ("--batch-size", options.batch_size, 1)):
        if value < least:
            yield Problem(flag, value, f"must be at least {least}", "give a larger number")
    for flag, value in (("--learning-rate", options.learning_rate), ("--clip-norm", options.clip_norm)):
        if not 0 < value < float("inf"):
            yield Problem(flag, value, "must be a positive number", "leave it out for the default")
    for flag, value in (("--warmup-share", options.warmup_share), ("--weight-decay", options.weight_decay)):
        if not 0 <= value <= 1:
            yield Problem(flag, value, "is not between 0 and 1", "leave it out for the default")


def _optimizer(model: Any, settings: TrainingSettings, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([
        {"params": [parameter for parameter in parameters if parameter.dim() > 1],
         "weight_decay": settings.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ], lr=settings.learning_rate)
    warmup_steps = round(settings.warmup_share * steps)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, warmup_steps=warmup_steps, steps=steps))


def _is_finite(model: Any, loss: float) -> bool:
    return math.isfinite(loss) and all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def _cut(numbers: Sequence[int], size: int) -> Iterator[list[int]]:
    return (list(numbers[start:start + size]) for start in range(0, len(numbers), size))


def _collate(tokenizer: Any, rows: Sequence[Row], settings: TrainingSettings) -> dict[str, Tensor]:
    padded = tokenizer.pad(list(rows), return_tensors="pt")
    return {name: tensor.to(settings.device) for name, tensor in padded.items()}


def _run(model: Any, batch: Mapping[str, Tensor], settings: TrainingSettings) -> Any:
    with torch.autocast(settings.device.type, dtype=torch.bfloat16, enabled=settings.precision == "bf16"):
        return model(**batch)


@contextmanager
def _memory_reported(batch_size: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError.of("--batch-size", batch_size, "does not fit into the device's memory",
                             "halve it, or shorten the rows") from error
