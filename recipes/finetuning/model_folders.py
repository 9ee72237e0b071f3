"""The folder that a model comes from, and the one that the fine-tuned model becomes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bert_ds.convert.hf_model import CONFIG_FILE
from bert_ds.convert.output_folder import check_output, output_folder


def add_model_folders(parser: argparse.ArgumentParser, *, makes: str) -> None:
    """Adds MODEL, OUT, which becomes what `makes` says, and --force."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder that `bert_ds.convert to-hf` wrote")
    parser.add_argument("out", type=Path, metavar="OUT", help=f"folder to make: {makes}")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is an earlier output")


def check_model_folders(options: argparse.Namespace) -> None:
    """Raises ConfigError where OUT is something that must not be replaced."""
    check_output(options.out.resolve(), options.model.resolve(), force=options.force, marker=CONFIG_FILE)


def save_model(model: Any, tokenizer: Any, options: argparse.Namespace, *, is_first: bool) -> None:
    """Makes OUT; where it is not the first of this command, in place of the one before."""
    with output_folder(options.out, source=options.model, force=options.force or not is_first,
                       marker=CONFIG_FILE) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
