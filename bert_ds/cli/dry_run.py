"""What a run would be, as text: every value with its origin, the layout, batch, parameters, memory, schedule, files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bert_ds.cli.data_files import (
    SUFFIXES,
    commands_that_make_missing,
    count_vocabulary,
    data_prefixes,
    unusable_folders,
)
from bert_ds.cli.deepspeed_json import engine_json
from bert_ds.cli.fields import SECTIONS, settings_of
from bert_ds.cli.resolve import ResolvedRun
from bert_ds.cli.settings import show
from bert_ds.cli.shipped_files import display
from bert_ds.config.memory import predict_memory
from bert_ds.config.run import RunConfig
from bert_ds.config.stages import stage_bounds
from bert_ds.errors import ConfigError, raise_if_any

MIB = 2**20
BUSY_PIPELINE = 4
"""Micro-batches a stage from which the idle time at start and end of a step is small."""


def dry_run_text(resolved: ResolvedRun) -> str:
    """The whole report. Reads no more than the number of lines of the vocabulary, when there is one.

    Raises ConfigError when that vocabulary does not fit the layout.
    """
    resolved, vocabulary = _with_vocabulary(resolved)
    parts = (
        (f"Dry run of {resolved.config.name} on {_count(resolved.world_size, 'rank')}: nothing is started", ()),
        ("Files", _files(resolved)),
        ("Configuration", _configuration(resolved)),
        ("Overrides", resolved.remarks or ("none",)),
        ("Layout", _layout(resolved)),
        ("Batch", _batch(resolved)),
        ("Vocabulary", vocabulary),
        ("Parameters and memory of each rank of a pipeline (MiB, an estimate)", _memory(resolved)),
        ("Learning rate", _learning_rate(resolved.config)),
        ("Data and output", _data_and_output(resolved.config)),
        ("DeepSpeed configuration as it is handed over", _engine(resolved)),
    )
    return "\n".join(line for title, lines in parts for line in _part(title, lines))


def _part(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield title
    yield from (f"  {line}" for line in lines)
    yield ""


def _with_vocabulary(resolved: ResolvedRun) -> tuple[ResolvedRun, tuple[str, ...]]:
    """The run with the size of its vocabulary file, as training takes it, and what to say about it."""
    run = resolved.config
    size = count_vocabulary(run.data)
    source = "expected, the file is not there"
    if size is not None:
        run = replace(run, model=replace(run.model, vocab_size=size))
        raise_if_any(ConfigError, run.problems(resolved.world_size))
        resolved = replace(resolved, config=run, origins={**resolved.origins, "model.vocab_size": run.data.vocab_file})
        source = f"read from {run.data.vocab_file}"
    model = run.model
    return resolved, (f"{model.vocab_size:,} entries ({source}), padded to {model.padded_vocab_size:,} rows, a "
                      f"multiple of {model.make_vocab_size_divisible_by}",)


def _files(resolved: ResolvedRun) -> Iterator[str]:
    for name, path in (("recipe", resolved.recipe), ("DeepSpeed JSON", resolved.deepspeed_config)):
        yield f"{name:<16}{display(path) if path else 'none'}"


def _configuration(resolved: ResolvedRun) -> list[str]:
    rows = []
    for section in SECTIONS:
        for setting in settings_of(section):
            if setting in ("engine.loss_scaling", "engine.passed_through"):
                continue
            rows.append((setting, show(_value(resolved.config, setting)), resolved.origins[setting]))
    return _table(rows)


def _value(run: RunConfig, setting: str) -> object:
    section, name = setting.split(".")
    holder = run.engine.loss_scaling if section == "loss_scaling" else getattr(run, section)
    return getattr(holder, name)


def _layout(resolved: ResolvedRun) -> Iterator[str]:
    run, world = resolved.config, resolved.world_size
    tensor, pipeline = run.parallel.tensor_model_parallel_size, run.parallel.pipeline_model_parallel_size
    yield (f"tensor {tensor} x pipeline {pipeline} x data {run.parallel.data_parallel_size(world)} = "
           f"{_count(world, 'rank')}")
    contents = list(_stages(run))
    if not run.parallel.is_dualpipev:
        yield from (f"stage {stage}: {content}" for stage, content in enumerate(contents))
        return
    for pp_rank in range(pipeline):
        out, back = run.parallel.stages_of(pp_rank)
        yield f"pipeline rank {pp_rank}: stage {out}: {contents[out]}; stage {back}: {contents[back]}"


def _stages(run: RunConfig) -> Iterator[str]:
    """What each stage holds."""
    for stage, (start, end) in enumerate(stage_bounds(run.model, run.parallel)):
        parts = [f"layer {start}" if end - start == 1 else f"layers {start}-{end - 1}"]
        parts = ["embeddings", *parts] if stage == 0 else parts
        parts = [*parts, "heads"] if stage == run.parallel.num_stages - 1 else parts
        yield ", ".join(parts)


def _batch(resolved: ResolvedRun) -> Iterator[str]:
    run = resolved.config
    copies, pipeline = run.parallel.data_parallel_size(resolved.world_size), run.parallel.pipeline_model_parallel_size
    engine = run.engine
    accumulation = engine.accumulation(copies)
    yield (f"global batch {engine.global_batch_size} = micro batch {engine.micro_batch_size} x data parallel "
           f"{copies} x accumulation {accumulation}")
    yield (f"{engine.global_batch_size * run.model.seq_length:,} tokens an iteration, "
           f"{run.data.predictions_per_row(run.model.seq_length, run.data.sequences_per_row)} predictions kept a row")
    packed = f" of up to {run.data.sequences_per_row} samples" if run.data.pack_sequences else ""
    yield (f"{engine.global_batch_size * run.schedule.train_iters:,} rows{packed} in {run.schedule.train_iters:,} "
           "iterations")
    if run.schedule.eval_interval is not None:
        yield (f"evaluation: {_count(run.schedule.eval_iters, 'global batch', 'es')} = micro batch "
               f"{run.eval_micro_batch_size} x data parallel {copies} x accumulation {run.eval_accumulation(copies)}, "
               f"rows of {run.eval_seq_length} tokens")
    if pipeline > 1:
        ranks = f" on {pipeline} ranks" if run.parallel.is_dualpipev else ""
        yield (f"pipeline of {run.parallel.num_stages} stages{ranks} with {accumulation} micro-batches: "
               f"{_idle(run, accumulation):.0%} of the time idle")
        if accumulation < BUSY_PIPELINE * pipeline:
            yield f"advice: {BUSY_PIPELINE * pipeline} micro-batches or more keep it busy; raise the global batch or " \
                  "use fewer stages"


def _idle(run: RunConfig, accumulation: int) -> float:
    """Share of a step in which a rank of the pipeline waits, a backward pass taking as long as two forward passes."""
    ranks = run.parallel.pipeline_model_parallel_size
    if run.parallel.is_dualpipev:
        # Counted in forward passes of one of a rank's two stages, from DeepSpeed's schedule played through.
        waiting = 4 * ranks - 5
        return waiting / (6 * accumulation + waiting)
    return (ranks - 1) / (accumulation + ranks - 1)


def _memory(resolved: ResolvedRun) -> Iterator[str]:
    run = resolved.config
    yield f"{run.model.num_parameters:,} parameters in all, the tied word table once"
    rows: list[Sequence[str]] = [("stage", "parameters", "weights", "gradients", "optimizer", "activations", "logits",
                                  "total")]
    for memory in predict_memory(run, resolved.world_size):
        sizes = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.logits, memory.total)
        rows.append((", ".join(map(str, memory.stages)), f"{memory.parameters:,}",
                     *(f"{size / MIB:,.0f}" for size in sizes)))
    yield from _table(rows)
    yield "without the allocator's reserve, communication buffers and the device's own context"
    if run.output.save and run.output.async_save:
        saved = max(memory.saved for memory in predict_memory(run, resolved.world_size))
        yield f"and up to {saved / MIB:,.0f} in the memory of its machine: a copy to write checkpoints from"


def _learning_rate(run: RunConfig) -> Iterator[str]:
    schedule, peak = run.schedule, run.engine.lr
    if schedule.warmup_iters:
        yield f"iteration 0: {schedule.lr_warmup_init:g}, rising linearly"
    yield f"iteration {schedule.warmup_iters:,.0f}: {peak:g} (peak)"
    if schedule.lr_decay_style == "constant":
        yield f"constant until iteration {schedule.train_iters:,}"
        return
    if schedule.lr_decay_style == "WSD":
        yield f"iteration {schedule.decay_iters - schedule.lr_wsd_decay_iters:,}: {peak:g}, decay begins"
    if schedule.decay_iters > schedule.train_iters:
        yield f"{schedule.lr_decay_style}, cut off at iteration {schedule.train_iters:,} of {schedule.decay_iters:,}"
        return
    yield f"iteration {schedule.decay_iters:,}: {schedule.min_lr:g} ({schedule.lr_decay_style})"
    if schedule.decay_iters < schedule.train_iters:
        yield f"{schedule.min_lr:g} until iteration {schedule.train_iters:,}"


def _data_and_output(run: RunConfig) -> Iterator[str]:
    for prefix in data_prefixes(run.data):
        yield f"{'data':<16}{prefix}: " + ", ".join(f"{suffix} {_presence(prefix + suffix)}" for suffix in SUFFIXES)
    yield f"{'vocabulary':<16}{run.data.vocab_file}: {_presence(run.data.vocab_file)}"
    for name, folder in (("checkpoints", run.output.save), ("resumes from", run.output.load),
                         ("logs", run.output.tensorboard_dir)):
        yield f"{name:<16}{f'{folder}: {_presence(folder)}' if folder else 'none'}"
    yield from (f"error: {problem}" for problem in unusable_folders(run.output))
    commands = commands_that_make_missing(run.data)
    if commands:
        yield "to make what is missing from your own text:"
        yield from (f"  {command}" for command in commands)


def _presence(path: str) -> str:
    return "there" if Path(path).exists() else "not there"


def _engine(resolved: ResolvedRun) -> list[str]:
    return json.dumps(engine_json(resolved.config, resolved.world_size), indent=2).splitlines()


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}" + (plural if number != 1 else "")
