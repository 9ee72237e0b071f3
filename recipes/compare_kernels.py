"""Trains the same steps in each precision and with each attention backend, and draws their losses on one plot.

    python recipes/compare_kernels.py --recipe 340m --data-path data/corpus_text_sentence --vocab-file data/vocab.txt \\
        --output recipes/results/340m_kernels

writes 340m_kernels.json and .png. Every run sees the same samples and drops the same hidden states; attention has no
dropout, since each kernel would drop other probabilities. A variant that this machine cannot serve is written down
with its reason.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    # For a checkout that is not installed.
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch

from bert_ds.cli.command_parser import CommandParser
from bert_ds.compat import installed_version
from bert_ds.data.atomic_file import atomic_text_file
from bert_ds.errors import EXIT_BAD_INPUT, EXIT_DONE, DataError, run_command

ROOT = Path(__file__).resolve().parent.parent
TE = ("--transformer-impl", "transformer_engine")
VARIANTS: dict[str, tuple[str, ...]] = {
    "bf16": ("--bf16",),
    "fp16": ("--fp16",),
    "FP8 delayed": ("--bf16", *TE, "--fp8-format", "hybrid"),
    "FP8 tensorwise": ("--bf16", *TE, "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    **{f"bf16 PyTorch {backend}": ("--bf16", "--attention-backend", backend)
       for backend in ("flash", "unfused", "local")},
    **{f"bf16 Transformer Engine {backend}": ("--bf16", *TE, "--attention-backend", backend)
       for backend in ("fused", "flash", "unfused")},
}
"""Name of each run and the flags that set it apart; the first is what the others are compared with."""


@dataclass(frozen=True)
class Outcome:
    """What one variant came to."""

    flags: tuple[str, ...]
    losses: list[float] = field(default_factory=list)
    """Masked-LM loss of each step."""
    attention: str = ""
    """The log line that says which kernel computed attention."""
    rows_per_s: float | None = None
    """Median over the second half of the steps."""
    memory_gb: float | None = None
    seconds: float = 0.0
    """Of the whole run, its start included."""
    refused: str | None = None
    """Why it did not run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(_parser().parse_command(argv)))


def _parser() -> CommandParser:
    parser = CommandParser(prog="compare_kernels.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", default="340m")
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--split", default="900,50,50")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT",
                        help=f"Some of: {', '.join(VARIANTS)}.")
    parser.add_argument("--output", type=Path, required=True, help="Where to write, without a suffix.")
    return parser


def _run(options: argparse.Namespace) -> int:
    outcomes = {}
    for name in options.only:
        outcomes[name] = _train(options, name)
        _write(options, outcomes)
        print(f"{name}: {_summary(outcomes[name])}", flush=True)
    return EXIT_DONE


def _train(options: argparse.Namespace, name: str) -> Outcome:
    """One run of `pretrain` in a process of its own."""
    flags, started = VARIANTS[name], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, str(ROOT / "bert_ds" / "pretrain.py"), *_settings(options), *flags,
                               "--tensorboard-dir", folder], capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
        if done.returncode == EXIT_BAD_INPUT:
            return Outcome(flags, seconds=seconds, refused=" ".join(done.stderr.split()))
        if done.returncode:
            raise DataError.of("variant", name, f"ended with exit code {done.returncode}",
                               "read what it said: " + done.stderr[-2000:])
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    rows = [options.global_batch_size / record["step_time_s"] for record in records]
    attention = next((line for line in (done.stdout + done.stderr).splitlines() if "attention backend:" in line), "")
    return Outcome(flags, [record["lm_loss"] for record in records], attention.partition("attention backend: ")[2],
                   median(rows[len(rows) // 2:]), records[-1]["memory_gb"], seconds)


def _settings(options: argparse.Namespace) -> list[str]:
    """What all runs share."""
    steps = str(options.steps)
    return ["--recipe", options.recipe, "--data-path", options.data_path, "--vocab-file", options.vocab_file,
            "--split", options.split, "--micro-batch-size", str(options.micro_batch_size), "--global-batch-size",
            str(options.global_batch_size), "--train-iters", steps, "--lr-decay-iters", steps, "--lr-warmup-iters",
            str(max(options.steps // 2, 1)), "--log-interval", "1", "--eval-interval", "none", "--save", "none",
            "--load", "none", "--save-interval", "none", "--attention-dropout", "0"]


def _write(options: argparse.Namespace, outcomes: dict[str, Outcome]) -> None:
    """Results so far; a run that is killed leaves those before it."""
    options.output.parent.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                **{name: installed_version(name) for name in ("deepspeed", "transformer_engine", "flash-attn")}}
    content = {"hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
               "versions": versions, "settings": _settings(options),
               "runs": {name: asdict(outcome) for name, outcome in outcomes.items()}}
    with atomic_text_file(options.output.with_suffix(".json")) as file:
        json.dump(content, file, indent=1)
    _draw({name: outcome for name, outcome in outcomes.items() if outcome.losses}, options.output.with_suffix(".png"))


def _draw(outcomes: dict[str, Outcome], path: Path) -> None:
    """Losses above; below, how far each run is from the first one."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 8), sharex=True, height_ratios=(2, 1))
    first = next(iter(outcomes.values()), None)
    for name, outcome in outcomes.items():
        steps = range(1, len(outcome.losses) + 1)
        above.plot(steps, outcome.losses, label=name, linewidth=1)
        assert first is not None
        below.plot(steps, [loss - base for loss, base in zip(outcome.losses, first.losses, strict=True)], linewidth=1)
    above.set_ylabel("masked-LM loss")
    above.legend()
    below.set_ylabel(f"difference from {next(iter(outcomes), '')}")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _summary(outcome: Outcome) -> str:
    if outcome.refused:
        return f"refused: {outcome.refused}"
    return f"loss {outcome.losses[-1]:.3f} after {len(outcome.losses)} steps, {outcome.rows_per_s:.0f} rows/s, " \
           f"{outcome.seconds:.0f} s; attention by {outcome.attention}"


if __name__ == "__main__":
    sys.exit(main())
