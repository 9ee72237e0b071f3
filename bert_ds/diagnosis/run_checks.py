"""Runs every check in a process of its own, so that one that crashes or hangs is a row and ends nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from bert_ds.diagnosis.checks import CHECKS, Entry
from bert_ds.diagnosis.finding import Finding, Settings

TOTAL_S = 57.0
"""All checks together, so that the command ends within a minute."""
_LOOK_S = 0.2
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


def run_checks(settings: Settings, entries: Sequence[Entry] = CHECKS, total_s: float = TOTAL_S) -> Iterator[Finding]:
    """Yields the findings in the order of `entries`, each as soon as those before it are there."""
    deadline = time.monotonic() + total_s
    given_up = threading.Event()
    lanes = {lane: ThreadPoolExecutor(1) for lane in dict.fromkeys(entry.lane for entry in entries)}
    try:
        waiting = [lanes[entry.lane].submit(_run_limited, entry, settings, deadline, given_up) for entry in entries]
        for findings in waiting:
            yield from findings.result()
    finally:  # after Ctrl-C, too
        given_up.set()
        for lane in lanes.values():
            lane.shutdown(cancel_futures=True)


def _run_limited(entry: Entry, settings: Settings, deadline: float, given_up: threading.Event) -> list[Finding]:
    limit_s = min(entry.limit_s, deadline - time.monotonic())
    if limit_s < 1:
        return [Finding(check=entry.name, verdict="warning", found="not looked at: the time was used up by the others",
                        repair="start the command again while the machine is idle")]
    with tempfile.TemporaryDirectory(prefix="bert_ds_doctor_") as folder:
        result, output = Path(folder) / "findings.json", Path(folder) / "output"
        process = _start(entry, settings, result, output)
        exit_code = _wait(process, limit_s, given_up)
        if exit_code is None:
            # One that was cut short for the sake of the others may just be slow.
            return [Finding(check=entry.name, verdict="problem" if limit_s == entry.limit_s else "warning",
                            found=f"no answer within {limit_s:.0f} s",
                            repair=f"see where it hangs: {_command_text(entry)}")]
        if exit_code or not result.is_file():
            return [Finding(check=entry.name, verdict="problem",
                            found=f"the check ended with {_exit_text(exit_code)}: {_last_line(output)}",
                            repair=f"see all that it prints: {_command_text(entry)}")]
        return [Finding(**fields) for fields in json.loads(result.read_text(encoding="utf-8"))]


def _start(entry: Entry, settings: Settings, result: Path, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bert_ds.diagnosis.one_check", entry.function, json.dumps(asdict(settings)),
               "--result", str(result)]
    path = os.pathsep.join(filter(None, (_PACKAGE_PARENT, os.environ.get("PYTHONPATH"))))
    with output.open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                env=os.environ | {"PYTHONPATH": path} | dict(entry.environment), start_new_session=True)


def _wait(process: subprocess.Popen[bytes], limit_s: float, given_up: threading.Event) -> int | None:
    """Exit code of a check's process, or None where it had to be ended."""
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline and not given_up.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_LOOK_S)
        return None
    finally:
        # Ranks that the check started may outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _command_text(entry: Entry) -> str:
    variables = "".join(f"{name}={value} " for name, value in entry.environment)
    return f"{variables}python -m bert_ds.diagnosis.one_check {entry.function}"


def _exit_text(exit_code: int) -> str:
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"


def _last_line(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "nothing was printed")
