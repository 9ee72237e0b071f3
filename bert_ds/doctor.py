"""Says what would go wrong in a run on this machine: `python -m bert_ds.doctor --save checkpoints`.

Exit code 0: nothing, or warnings only, so that `python -m bert_ds.doctor && deepspeed ...` starts; 2: a problem.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bert_ds.cli.command_parser import CommandParser
from bert_ds.cli.launcher import process_place
from bert_ds.data.atomic_file import atomic_text_file
from bert_ds.diagnosis.finding import VERDICTS, Finding, Settings, worst
from bert_ds.diagnosis.run_checks import run_checks
from bert_ds.errors import EXIT_BAD_INPUT, EXIT_DONE, ConfigError, DataError, run_command

_NAME_WIDTH, _VERDICT_WIDTH = 24, 16
_DESCRIPTION = """Says within a minute what would go wrong in a run on this machine, and what to do about it; needs no
GPU. Exit code 0: nothing, or warnings only; 2: a problem. Started by a launcher, it
checks the ranks and the meeting point that the launcher has chosen; the first rank of each machine answers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = CommandParser(prog="python -m bert_ds.doctor", description=_DESCRIPTION)
    parser.add_argument("--save", default=".", metavar="DIR", help="where checkpoints will go (default: here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was found as JSON, too")
    options = parser.parse_command(argv)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise DataError.of("--json", options.json, "its folder does not exist", "name a file in a folder that does")
    with contextlib.suppress(ConfigError):  # a row of the table tells it
        if process_place(os.environ).local_rank > 0:
            return EXIT_DONE
    started = time.monotonic()
    findings = []
    for finding in run_checks(Settings(save_dir=options.save)):
        print(_row(finding), flush=True)
        findings.append(finding)
    seconds = time.monotonic() - started
    print(f"\n{_summary(findings)} ({seconds:.0f} s)")
    if options.json is not None:
        _write(options.json, findings, seconds)
    return EXIT_BAD_INPUT if worst(findings) == "problem" else EXIT_DONE


def _row(finding: Finding) -> str:
    """The finding, and its repair below, folded to the terminal."""
    indent = " " * (_NAME_WIDTH + _VERDICT_WIDTH)
    width = max(shutil.get_terminal_size((120, 24)).columns, len(indent) + 40)
    lines = [finding.found, *([f"-> {finding.repair}"] if finding.repair else [])]
    folded = [part for line in lines for part in textwrap.wrap(line, width - len(indent), break_long_words=False)]
    head = f"{finding.check:<{_NAME_WIDTH}}{finding.verdict:<{_VERDICT_WIDTH}}"
    return head + f"\n{indent}".join(folded)


def _summary(findings: Sequence[Finding]) -> str:
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in reversed(VERDICTS)}
    return ", ".join(f"{count} {verdict}{'s' if verdict in ('problem', 'warning') and count != 1 else ''}"
                     for verdict, count in counts.items() if count)


def _write(path: Path, findings: Sequence[Finding], seconds: float) -> None:
    try:
        with atomic_text_file(path) as file:
            json.dump({"verdict": worst(findings), "seconds": round(seconds, 1),
                       "findings": [asdict(finding) for finding in findings]}, file, indent=2)
            file.write("\n")
    except OSError as error:
        raise DataError.of("--json", path, f"cannot be written ({error.strerror})",
                           "name a file in a folder that you may write to") from error


if __name__ == "__main__":
    sys.exit(main())
