"""Measures training steps: `python -m bert_ds.bench --recipe 340m --micro-batch-size 32 --variant="--compile"`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_ds.cli.launcher import ProcessPlace, process_place
from bert_ds.cli.resolve import resolve_run
from bert_ds.compat import import_deepspeed
from bert_ds.config.run import RunConfig
from bert_ds.data.atomic_file import atomic_text_file
from bert_ds.errors import EXIT_DONE, run_command
from bert_ds.log import configure_logging

if TYPE_CHECKING:
    from bert_ds.training.benchmark import Measurement

log = logging.getLogger("bert_ds.bench")
LIMIT = timedelta(minutes=10)
HEADER = ("variant", "rows/s", "tokens/s", "TFLOP/s", "MFU", "step ms", "spread", "peak GiB", "first step s")
DESCRIPTION = """\
Steps the real engine on random rows and prints one line a variant. All flags of pretrain.py choose the run; --variant
adds flags for one line, as in --variant="--bf16 --compile", and can be given several times.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`; returns the exit code."""
    options, flags = _parser().parse_known_args(argv)
    return run_command(lambda: _run(options, flags))


def _run(options: argparse.Namespace, flags: list[str]) -> int:
    place = process_place(os.environ)
    configure_logging(rank=place.rank)
    logging.getLogger("bert_ds").setLevel(logging.INFO if options.verbose else logging.WARNING)
    variants = [(text or "as given", resolve_run([*flags, *shlex.split(text)], world_size=place.world_size).config)
                for text in options.variant or [""]]
    records = _measure_all(variants, place, options)
    if place.rank == 0 and options.out:
        with atomic_text_file(Path(options.out)) as file:
            json.dump({"versions": _versions(), "flags": flags, "runs": records}, file, indent=1)
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bert_ds.bench", description=DESCRIPTION, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", metavar="FLAGS", help="flags of one line, in quotes")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps that are measured (20)")
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="steps before them (5)")
    parser.add_argument("--short-rows", type=float, default=0.1, metavar="SHARE",
                        help="share of the rows that are padded (0.1); with --rows-are-full give 0")
    parser.add_argument("--profile", action="store_true", help="split a step by kinds of kernels, on a GPU")
    parser.add_argument("--verbose", action="store_true", help="show the log of each run's construction")
    parser.add_argument("--out", metavar="FILE", help="write all figures as JSON")
    return parser


def _measure_all(
    variants: Sequence[tuple[str, RunConfig]], place: ProcessPlace, options: argparse.Namespace
) -> list[dict[str, Any]]:
    import_deepspeed()
    import torch.distributed as dist  # noqa: PLC0415

    from bert_ds.parallel.context import build_context  # noqa: PLC0415
    from bert_ds.training.benchmark import Workload, measure  # noqa: PLC0415
    from bert_ds.training.launch import choose_device, join_process_group  # noqa: PLC0415

    device = choose_device(place)
    join_process_group(place, device, LIMIT)
    records = []
    workload = Workload(steps=options.steps, warmup=max(options.warmup, 1), short_rows=options.short_rows,
                        profile=options.profile)
    try:
        _print_row(HEADER, place.rank)
        for name, run in variants:
            ctx = build_context(
                tp_size=run.parallel.tensor_model_parallel_size, pp_size=run.parallel.pipeline_model_parallel_size,
                device=device, timeout=LIMIT, sequence_parallel=run.parallel.sequence_parallel)
            measured = measure(run, ctx, workload)
            _print_row(_cells(name, measured), place.rank)
            if measured.kernels is not None and place.rank == 0:
                _print_kernels(measured)
            records.append({"variant": name, **dataclasses.asdict(measured)})
    finally:
        dist.destroy_process_group()
    return records


def _cells(name: str, measured: Measurement) -> tuple[str, ...]:
    return (name, f"{measured.rows_per_s:.1f}", f"{measured.tokens_per_s:.0f}", f"{measured.tflops:.1f}",
            "-" if measured.mfu is None else f"{measured.mfu:.1%}", f"{measured.step_s * 1e3:.1f}",
            f"{measured.spread:.1%}", "-" if measured.peak_gib is None else f"{measured.peak_gib:.1f}",
            f"{measured.first_step_s:.1f}")


def _print_row(cells: Sequence[str], rank: int) -> None:
    if rank == 0:
        print(f"{cells[0]:<48}" + "".join(f"{cell:>13}" for cell in cells[1:]), flush=True)


def _print_kernels(measured: Measurement) -> None:
    assert measured.kernels is not None
    kinds = ", ".join(f"{kind} {spent:.1f}" for kind, spent in sorted(measured.kernels.by_kind.items()))
    print(f"    ms a step: {kinds}, idle {measured.kernels.idle:.1f}")
    for name, spent in measured.kernels.top:
        print(f"    {spent:8.2f} ms  {name[:110]}")


def _versions() -> dict[str, str]:
    import torch  # noqa: PLC0415

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": device, **{package: version(package) for package in ("torch", "deepspeed")}}


if __name__ == "__main__":
    sys.exit(main())
