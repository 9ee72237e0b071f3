"""Errors a user can repair: what was set, to which value, why it cannot be used, and what to do instead.

A command that ends with one of these prints the message without a traceback and exits with code 2 (`run_command`).
Our own invariants use `assert` instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

Error = TypeVar("Error", bound="UserError")

EXIT_DONE = 0
EXIT_BAD_INPUT = 2
EXIT_GUARD = 3
EXIT_STUCK = 4
"""A rank was stuck or gone, and the watchdog has ended the job; the last checkpoint is the one to go on from."""
EXIT_REQUEUE = 75
"""After SIGUSR1: the state is saved and the run wants to be started again (EX_TEMPFAIL of sysexits.h)."""
EXIT_INTERRUPTED = 128 + 2
"""What a shell reports for a process that SIGINT, Ctrl-C, has ended."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with what the user gave us."""

    setting: str
    """The setting or file, as the user writes it: `model.num_attention_heads`, `--data-path`."""
    value: object
    reason: str
    repair: str

    def __str__(self) -> str:
        # A command on a line of its own is there to be copied.
        end = "" if "\n" in self.repair else "."
        return f"{self.setting}={self.value}: {self.reason}. Fix: {self.repair}{end}"


class UserError(Exception):
    """Base of all errors that the user can repair; the message lists every problem found."""

    headline = "cannot continue"
    exit_code = EXIT_BAD_INPUT
    is_told = False
    """Whether the message has been printed already."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("\n".join([f"{self.headline}:", *(f"  {problem}" for problem in problems)]))

    @classmethod
    def of(cls: type[Error], setting: str, value: object, reason: str, repair: str) -> Error:
        """The error for a single problem."""
        return cls(Problem(setting, value, reason, repair))


class GuardError(UserError):
    """Training has stopped itself, since going on would do harm."""

    headline = "stopped by a guard"
    exit_code = EXIT_GUARD


class ConfigError(UserError):
    """A setting, or a combination of settings, that cannot be run."""

    headline = "invalid run configuration"


class DataError(UserError):
    """Data that are missing, damaged or unusable."""

    headline = "unusable data"


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or belongs to another model."""

    headline = "unusable checkpoint"


class SoundCheckpointError(CheckpointError):
    """A checkpoint that cannot be used though nothing says that it is damaged: no older one may take its place."""


class SaveError(CheckpointError):
    """A checkpoint that could not be saved."""

    headline = "could not save"


def tell(error: UserError) -> None:
    """Prints the message on stderr, once."""
    if not error.is_told:
        error.is_told = True
        print(f"error: {error}", file=sys.stderr, flush=True)


def raise_if_any(error: type[UserError], problems: Iterable[Problem]) -> None:
    """Raises `error` with all problems at once; does nothing when there are none."""
    found = tuple(problems)
    if found:
        raise error(*found)


def run_command(command: Callable[[], int]) -> int:
    """Runs a command line's body and turns a `UserError` into its message on stderr and exit code 2, Ctrl-C into one
    line and exit code 130."""
    try:
        return command()
    except UserError as error:
        tell(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
