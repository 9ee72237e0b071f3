"""Argument parser of the commands that need no recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from bert_ds.cli.nearest import suggestion
from bert_ds.errors import ConfigError, Problem, raise_if_any


class CommandParser(argparse.ArgumentParser):
    """`argparse` that takes flags in full only and answers a misspelt one with the nearest there is."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse_command(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parses `argv`, or the process's own arguments. Raises ConfigError for unknown flags."""
        words = list(sys.argv[1:] if argv is None else argv)
        raise_if_any(ConfigError, self._unknown_flags(words))
        return self.parse_args(words)

    def _unknown_flags(self, words: Sequence[str]) -> Iterator[Problem]:
        known = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        for word in words:
            flag, _, value = word.partition("=")
            if flag.startswith("--") and flag not in known:
                yield Problem(flag, value, "is not a flag of this command", suggestion(flag, known))
