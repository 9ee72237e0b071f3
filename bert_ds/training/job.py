"""Puts a run together on this rank: processes, data, model, engine, checkpoint; then trains it."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bert_ds.checkpoint.format import Manifest
from bert_ds.cli.deepspeed_json import engine_json
from bert_ds.cli.launcher import ProcessPlace
from bert_ds.compat import check_transformer_engine
from bert_ds.config.run import RunConfig
from bert_ds.data.bert_dataset import open_corpora
from bert_ds.data.run_datasets import datasets_of_run
from bert_ds.data.sample_order import planned_samples
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import EXIT_DONE
from bert_ds.model.loss import LossSums
from bert_ds.parallel.context import ParallelContext, build_context
from bert_ds.training.coordination import Coordinator
from bert_ds.training.deepspeed_layout import check_folder, save_deepspeed_layout
from bert_ds.training.disks import Disks, find_disks
from bert_ds.training.engine import build_engine, build_pipeline
from bert_ds.training.launch import choose_device, join_process_group
from bert_ds.training.metrics import Reporter
from bert_ds.training.periodic_export import PeriodicExport
from bert_ds.training.resume import find_starting_point, load_checkpoint, tell_what_differs
from bert_ds.training.save_lock import save_lock
from bert_ds.training.saver import Saver
from bert_ds.training.state import TrainingState
from bert_ds.training.throughput import peak_flops, row_flops
from bert_ds.training.trainer import Job, train

log = logging.getLogger(__name__)
COLLECTIVE_LIMIT = timedelta(minutes=30)
"""How long a collective may wait: a first compilation or a slow disk on one rank must not end a job."""
PREPARATION_LIMIT_S = 4 * 3600.0
"""How long ranks wait for files: an index over a billion sentences, a checkpoint of 20B parameters."""

LAUNCHERS_THAT_STAY = ("deepspeed", "torchrun")
"""Launchers that are each rank's parent until it ends."""


@dataclass(frozen=True)
class Prepared:
    """A run that this rank can start: checked against its vocabulary and devices."""

    run: RunConfig
    place: ProcessPlace
    device: torch.device
    vocabulary: Vocabulary
    started: float
    """The monotonic clock when this rank was started."""


def prepare(run: RunConfig, place: ProcessPlace) -> Prepared:
    """Checks what can be checked before ranks meet.

    Raises:
        UserError: the devices, the vocabulary or the data do not fit the run.
    """
    started, device = time.monotonic(), choose_device(place)
    vocabulary = Vocabulary.of_run(run.data)
    run = replace(run, model=replace(run.model, vocab_size=len(vocabulary.tokens)))
    run.validate(place.world_size)
    if run.model.transformer_impl == "transformer_engine":
        check_transformer_engine(device.type)
    open_corpora(run.data, vocabulary)
    if run.schedule.deterministic_mode:
        _be_deterministic()
    return Prepared(run, place, device, vocabulary, started)


def run_job(prepared: Prepared) -> int:
    """Joins the other ranks and trains; returns the exit code."""
    run, place = prepared.run, prepared.place
    join_process_group(place, prepared.device, COLLECTIVE_LIMIT)
    coordinator = Coordinator.of_default_group(PREPARATION_LIMIT_S)
    try:
        ctx = build_context(
            tp_size=run.parallel.tensor_model_parallel_size, pp_size=run.parallel.pipeline_model_parallel_size,
            device=prepared.device, timeout=COLLECTIVE_LIMIT, sequence_parallel=run.parallel.sequence_parallel,
            dualpipev=run.parallel.is_dualpipev)
        disks = find_disks(Path(run.output.save), coordinator) if run.output.save else None
        leads = disks is not None and disks.leads(ctx.rank)
        with coordinator.entered(save_lock(run.output.save if leads else None)):
            code = coordinator.guarded(lambda: _train(prepared, ctx, coordinator, disks))
        coordinator.leave("the end of the run")
        return code
    finally:
        dist.destroy_process_group()


def _train(prepared: Prepared, ctx: ParallelContext, coordinator: Coordinator, disks: Disks | None) -> int:
    run, place, vocabulary = prepared.run, prepared.place, prepared.vocabulary
    if deepspeeds := run.output.save_deepspeed:
        coordinator.on_leader(f"looking at {deepspeeds}", lambda: check_folder(Path(deepspeeds)), leader=ctx.rank == 0)
    start = find_starting_point(run, ctx, coordinator, vocabulary)
    if start is not None:
        tell_what_differs(start, run, ctx)
    saved = start.continued if start else None
    run = _with_order_kept(run, saved)
    train_samples = _train_samples(run, saved)
    datasets = coordinator.leaders_first(
        "building the sample index", lambda: datasets_of_run(run, vocabulary, train_samples),
        leader=place.local_rank == 0)
    sums = LossSums(ctx.device)
    pipeline = build_pipeline(run, ctx, sums)
    engine = build_engine(run, ctx, pipeline, engine_json(run, ctx.world_size))
    state = load_checkpoint(start, ctx, coordinator, engine) if start else TrainingState()
    reporter = _reporter(run, ctx)
    _introduce(run, ctx)
    exports = _exports(run)
    with ExitStack() as stack:
        stack.callback(reporter.close)
        saver = stack.enter_context(Saver(run, ctx, coordinator, engine, vocabulary, disks,
                                          exports.after_save if exports else None)) if disks else None
        code = train(Job(run, ctx, coordinator, engine, sums, datasets, reporter, saver,
                         place.launcher in LAUNCHERS_THAT_STAY, prepared.started), state)
    if code == EXIT_DONE and not run.schedule.skip_train:  # a run that was told to stop has no time for either
        if exports:
            exports.finish()
        if run.output.save_deepspeed:
            save_deepspeed_layout(run, ctx, coordinator, engine, vocabulary)
    return code


def _exports(run: RunConfig) -> PeriodicExport | None:
    save, every = run.output.save, run.output.export_hf_interval
    return PeriodicExport(Path(save), every) if save and every else None


def _with_order_kept(run: RunConfig, saved: Manifest | None) -> RunConfig:
    """The run with its plan of the sample order, which is that of the checkpoint it goes on from."""
    planned = planned_samples(run, saved.config if saved else None)
    return replace(run, data=replace(run.data, planned_samples=planned))


def _train_samples(run: RunConfig, saved: Manifest | None) -> int:
    """Training samples up to the last iteration: what is consumed already, and the rest in today's batches."""
    step, consumed = (saved.step, saved.consumed_samples) if saved else (0, 0)
    return run.batch_sizes.after(consumed, run.schedule.train_iters - step)


def _introduce(run: RunConfig, ctx: ParallelContext) -> None:
    """Says once what is trained, how it is cut, and what the numbers of the log mean."""
    engine, model = run.engine, run.model
    ways = [way for way, chosen in (
        ("sequence parallel", ctx.sequence_parallel), ("DualPipeV", ctx.dualpipev),
        ("layers by Transformer Engine", model.transformer_impl == "transformer_engine"),
        (f"matrices in FP8 ({model.fp8_format}, {model.fp8_recipe} scaling)", model.fp8_format)) if chosen]
    log.info("model: %s parameters in %s, ZeRO %d; tensor %d x pipeline %d x data %d ranks%s",
             f"{model.num_parameters:,}", engine.precision, engine.zero_stage, ctx.tp_size, ctx.pp_size,
             ctx.dp_size, "".join(f", {way}" for way in ways))
    log.info("global batch %d = micro-batch %d x accumulation %d x data parallel %d", engine.global_batch_size,
             engine.micro_batch_size, engine.accumulation(ctx.dp_size), ctx.dp_size)
    if unexportable := " ".join(map(str, run.model.export_problems())):
        log.info("this model will not export to Hugging Face: %s", unexportable)
    if peak_flops(ctx.device) is None:
        return
    log.info("grad norm is before clipping; tokens/s counts padding; MFU = FLOPs of a step / (seconds x GPUs x dense "
             "16-bit peak), FLOPs of a row = 3 x [L S (8 H A + 4 H F + 4 S A) + P (2 H^2 + 2 H V) + 2 M H^2], A = "
             "heads x head dimension")


def _reporter(run: RunConfig, ctx: ParallelContext) -> Reporter:
    sequences = run.data.sequences_per_row
    flops = run.engine.global_batch_size * row_flops(
        run.model, run.data.predictions_per_row(run.model.seq_length, sequences), sequences)
    peak = peak_flops(ctx.device)
    return Reporter(run, active=ctx.rank == 0, flops_per_step=flops,
                    peak_flops_of_all=None if peak is None else peak * ctx.world_size)


def _be_deterministic() -> None:
    """Chooses deterministic GPU kernels; CPUs compute deterministically in any case."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False

