"""The command `python -m bert_ds.convert`; each direction is a file of its own: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from bert_ds.convert import command_from_hf, command_from_megatron, command_to_hf, command_to_megatron
from bert_ds.errors import run_command
from bert_ds.log import configure_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and converts; returns the exit code."""
    arguments = _parser().parse_args(argv)
    configure_logging()
    logging.getLogger("bert_ds").setLevel(logging.WARNING)
    return run_command(lambda: arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bert_ds.convert", description="Converts checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command_to_hf.add_parser(commands)
    command_from_hf.add_parser(commands)
    command_to_megatron.add_parser(commands)
    command_from_megatron.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
