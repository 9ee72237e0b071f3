"""Commands that run one after another; what is finished is not run again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from bert_ds.data.atomic_file import atomic_text_file

_STAMPS = ".steps"
_STOPPED_BY_SIGNAL = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Step:
    """One command."""

    name: str
    purpose: str
    command: tuple[str, ...]
    outputs: tuple[Path, ...] = ()
    """What it leaves behind. A step without outputs is for the eyes and always runs."""
    sources: tuple[Path, ...] = ()
    """Files that decide what it does and that no earlier step wrote."""
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()
    """Words in front of the command that decide nothing about its result."""
    resumes: bool = False
    """Whether it goes on from what an interrupted run of the same command left."""

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.launcher, *self.command)

    def __str__(self) -> str:
        """The command as one would type it, a flag a line when it is long."""
        environment = (f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        program, *arguments = self.words
        line = " ".join([*environment, short_path(program), *map(shlex.quote, arguments)])
        return line if len(line) <= 110 else line.replace(" --", " \\\n      --")


class StepError(Exception):
    """A step ended with a non-zero exit code; it has said why itself."""

    def __init__(self, step: Step, code: int) -> None:
        super().__init__(f"{step.name} was stopped; the same command goes on from there" if code in _STOPPED_BY_SIGNAL
                         else f"{step.name} failed with exit code {code}; its message stands above")
        self.code = code


class Steps:
    """Runs steps and remembers in the work folder which of them are finished.

    A step is the same as before when its command, its sources and the steps before it are. One that has changed
    starts from nothing; one that was interrupted may resume.
    """

    def __init__(self, work_dir: Path, *, total: int, limit_s: float) -> None:
        self._stamps = work_dir / _STAMPS
        self._total = total
        self._limit_s = limit_s
        self._number = 0
        self._key = ""

    def run(self, step: Step) -> None:
        """Runs the step unless it is finished already. Raises StepError."""
        self._number += 1
        self._key = self._key_of(step)
        stamp = self._stamps / f"{step.name}.json"
        print(f"\n=== {self._number}/{self._total} {step.name}: {step.purpose}\n$ {step}\n", flush=True)
        before = _read_stamp(stamp)
        is_same = before.get("key") == self._key
        if is_same and before["finished"] and step.outputs and all(path.exists() for path in step.outputs):
            print("--- finished before", flush=True)
            return
        if not (is_same and step.resumes):
            for path in step.outputs:
                _remove(path)
        _write_stamp(stamp, self._key, finished=False)
        started = time.monotonic()
        code = _exit_code(step, self._limit_s)
        if code:
            raise StepError(step, code)
        missing = [path for path in step.outputs if not path.exists()]
        assert not missing, f"{step.name} left no {missing}"
        _write_stamp(stamp, self._key, finished=True)
        print(f"--- {step.name}: {time.monotonic() - started:.0f} s", flush=True)

    def _key_of(self, step: Step) -> str:
        digest = hashlib.sha256(json.dumps([self._key, step.command, sorted(step.environment.items())]).encode())
        for source in step.sources:
            digest.update(source.read_bytes())
        return digest.hexdigest()


def short_path(path: str) -> str:
    """The path relative to the working directory when it lies below; links are left as they are."""
    with contextlib.suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


def _exit_code(step: Step, limit_s: float) -> int:
    """Runs the command; 128 + N when signal N ended it, as a shell has it."""
    process = subprocess.Popen(step.words, env={**os.environ, **step.environment})
    with _signals_for(process):
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            print(f"error: {step.name} has run for {limit_s / 60:g} minutes and is ended; allow more with "
                  "--minutes-limit", file=sys.stderr, flush=True)
            process.terminate()
            code = process.wait() or 128 + signal.SIGTERM
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals_for(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Passes SIGTERM on to the command, which a terminal's SIGINT reaches by itself; either way it may end in peace."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    def leave_it(number: int, frame: FrameType | None) -> None:
        pass

    previous = {number: signal.signal(number, handler)
                for number, handler in ((signal.SIGTERM, pass_on), (signal.SIGINT, leave_it))}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _read_stamp(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _write_stamp(path: Path, key: str, *, finished: bool) -> None:
    with atomic_text_file(path) as file:
        json.dump({"key": key, "finished": finished}, file)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
