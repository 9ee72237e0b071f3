"""Shows what a run, or several side by side, logged: `python -m bert_ds.report RUN [RUN ...] --output report.html`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bert_ds.cli.command_parser import CommandParser
from bert_ds.errors import EXIT_DONE, run_command
from bert_ds.reporting.page import write_page
from bert_ds.reporting.picture import write_picture
from bert_ds.reporting.runs import METRICS_FILE, read_run
from bert_ds.reporting.summary import table


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = CommandParser(prog="python -m bert_ds.report", description="Shows what runs logged, side by side.")
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN",
                        help=f"TensorBoard folder of a run, or its {METRICS_FILE}")
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE",
                        help="page (.html) or picture (.png, .svg, .pdf) to write; default: %(default)s")
    options = parser.parse_command(argv)
    runs = [read_run(path) for path in options.run]
    write = write_page if options.output.suffix.lower() in (".html", ".htm") else write_picture
    write(runs, options.output)
    print(table(runs))
    print(f"wrote {options.output}")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
