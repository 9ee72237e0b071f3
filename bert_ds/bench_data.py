"""Measures how fast the data layer works, beside megatron-core and `tokenizers` where they are installed.

    OMP_NUM_THREADS=1 python -m bert_ds.bench_data --output recipes/results/data_speed
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

from bert_ds import build_vocab, gather_text
from bert_ds.cli.command_parser import CommandParser
from bert_ds.compat import installed_version
from bert_ds.data.atomic_file import atomic_text_file
from bert_ds.data.speed import BenchSettings, Measurement, measure_all
from bert_ds.errors import EXIT_DONE, ConfigError, DataError, run_command

_PACKAGES = ("bert_ds", "numba", "numpy", "tokenizers", "sentencex", "torch", "megatron-core")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_command(argv)
    if arguments.rounds < 1 or arguments.mapping_sentences < 1000 or arguments.written_sentences < 1000:
        raise ConfigError.of("--rounds, --mapping-sentences, --written-sentences", "", "are too small to measure",
                             "leave them out for the defaults")
    # One thread each, so that CPU seconds compare.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    load_before = os.getloadavg()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        text, vocab_file = _corpus(arguments, folder)
        settings = BenchSettings(text=text, vocab_file=vocab_file, folder=folder, rounds=arguments.rounds,
                                 mapping_sentences=arguments.mapping_sentences,
                                 written_sentences=arguments.written_sentences,
                                 consumed_seconds=arguments.consumed_seconds)
        measurements = []
        for measurement in measure_all(settings):
            print(_row(measurement), flush=True)
            measurements.append(measurement)
    facts = _facts(arguments, argv, load_before)
    if arguments.output is not None:
        _write(arguments.output, measurements, facts)
    return EXIT_DONE


def _corpus(arguments: argparse.Namespace, folder: Path) -> tuple[str, str]:
    """The text and a vocabulary for it, made where none were given."""
    text = arguments.input
    if text is None:
        text = str(folder / "text.jsonl")
        if gather_text.main(["--output", text]) != EXIT_DONE:
            raise DataError.of("--input", "", "no text could be gathered", "give one")
    vocab_file = arguments.vocab_file
    if vocab_file is None:
        vocab_file = str(folder / "vocab.txt")
        if build_vocab.main(["--input", text, "--output", vocab_file, "--size", "8192"]) != EXIT_DONE:
            raise DataError.of("--vocab-file", "", "no vocabulary could be made", "give one")
    return text, vocab_file


def _row(measurement: Measurement) -> str:
    ours = _spread(measurement.ours)
    peer = f"{measurement.peer_name}: {_spread(measurement.peer)}" if measurement.peer else ""
    ratio = "" if measurement.ratio is None else f"{measurement.ratio:.3g}x"
    return f"| {measurement.name} | {measurement.unit} | {ours} | {peer} | {ratio} | {measurement.note} |"


def _spread(values: Sequence[float]) -> str:
    return f"**{_short(median(values))}** ({_short(min(values))} to {_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _facts(arguments: argparse.Namespace, argv: Sequence[str] | None,
           load_before: Sequence[float]) -> dict[str, object]:
    """Where, with what and how the measurements were taken."""
    words = sys.argv[1:] if argv is None else argv
    versions = {package: installed_version(package) for package in _PACKAGES}
    return {
        "command": shlex.join(["python", "-m", "bert_ds.bench_data", *words]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "processor": _processor(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
        "versions": {package: found for package, found in versions.items() if found},
        "rounds": arguments.rounds,
        "text": arguments.input or "documentation strings of the installed packages (bert_ds.gather_text)",
        "load before and after (1 min)": [round(load_before[0], 2), round(os.getloadavg()[0], 2)],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _write(output: str, measurements: Sequence[Measurement], facts: dict[str, object]) -> None:
    try:
        with atomic_text_file(f"{output}.json") as file:
            json.dump({**facts, "measurements": [asdict(one) | {"ratio": one.ratio} for one in measurements]}, file,
                      indent=2)
            file.write("\n")
        with atomic_text_file(f"{output}.md") as file:
            file.write("# Speed of the data layer\n\nMedian (lowest to highest) of the rounds; ours and the peer's "
                       "alternate in every round. CPU seconds count\nall threads of the process.\n\n"
                       "| what | unit | bert_ds | peer | ratio | |\n|---|---|---|---|---|---|\n")
            file.writelines(_row(one) + "\n" for one in measurements)
            file.write("\n")
            file.writelines(f"- {name}: {_fact(value)}\n" for name, value in facts.items())
    except OSError as error:
        raise DataError.of("--output", output, f"cannot be written ({error.strerror})",
                           "name a file in a folder that you may write to") from error
    print(f"wrote {output}.md and {output}.json", flush=True)


def _fact(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {content}" for name, content in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m bert_ds.bench_data", description="Measures the speed of the data layer.")
    parser.add_argument("--output", metavar="NAME", help="writes NAME.md and NAME.json")
    parser.add_argument("--input", metavar="FILE", help="JSON lines with the key text; default: gathered documentation")
    parser.add_argument("--vocab-file", metavar="FILE", help="default: one of 8192 entries is trained on the text")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--mapping-sentences", type=int, default=20_000_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--written-sentences", type=int, default=2_000_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--consumed-seconds", type=float, default=5.0, metavar="S",
                        help="how long the loader is watched in each round (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
