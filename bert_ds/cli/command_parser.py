"""Argument parser of the commands that need no recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence

from bert_ds.cli.megatron_flags import Only
from bert_ds.cli.nearest import suggestion
from bert_ds.errors import ConfigError, Problem, raise_if_any


class CommandParser(argparse.ArgumentParser):
    """`argparse` that takes flags in full only and answers a misspelt one with the nearest there is."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self._idle: Mapping[str, Only] = {}
        self._refused: Mapping[str, tuple[str, str]] = {}

    def take_over(self, idle: Mapping[str, Only], refused: Mapping[str, tuple[str, str]]) -> None:
        """Knows flags of another program: some change nothing, others are refused with what to use instead."""
        self._idle, self._refused = idle, refused
        for flag in idle:
            self.add_argument(flag, nargs="?", const="", help=argparse.SUPPRESS)

    def parse_command(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parses `argv`, or the process's own arguments. Raises ConfigError for unknown and refused flags."""
        words = list(sys.argv[1:] if argv is None else argv)
        raise_if_any(ConfigError, self._unknown_flags(words))
        arguments = self.parse_args(words)
        raise_if_any(ConfigError, (
            Problem(flag, value, only.why, only.instead) for flag, only, value in self._idle_flags(arguments)
            if only.values and value not in only.values))
        return arguments

    def remarks(self, arguments: argparse.Namespace) -> list[str]:
        """What is to be told of flags that change nothing."""
        return [f"{flag} has no effect: {only.why}" for flag, only, _ in self._idle_flags(arguments)]

    def _idle_flags(self, arguments: argparse.Namespace) -> Iterator[tuple[str, Only, str]]:
        for flag, only in self._idle.items():
            value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
            if value is not None:
                yield flag, only, value

    def _unknown_flags(self, words: Sequence[str]) -> Iterator[Problem]:
        known = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        for word in words:
            flag, _, value = word.partition("=")
            if flag in self._refused:
                yield Problem(flag, value or "given", *self._refused[flag])
            elif flag.startswith("--") and flag not in known:
                yield Problem(flag, value, "is not a flag of this command", suggestion(flag, known))
