"""Gathers real English text that every machine has: the documentation strings of Python and of installed packages.

    python -m bert_ds.gather_text --output data/corpus.jsonl
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from bert_ds.cli.command_parser import CommandParser
from bert_ds.data.atomic_file import atomic_text_file
from bert_ds.data.documentation_corpus import CorpusDocument, gather_documentation
from bert_ds.errors import EXIT_DONE, ConfigError, DataError, run_command

_MOST_WORKERS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_command(argv)
    for flag, value in (("--max-mb", arguments.max_mb), ("--workers", arguments.workers)):
        if not value > 0:
            raise ConfigError.of(flag, value, "must be above 0", "leave it out for the default")
    documents = gather_documentation(int(arguments.max_mb * 1e6), workers=arguments.workers)
    if not documents:
        raise DataError.of("--output", arguments.output, "this Python installation comes without documentation strings",
                           "use a text of your own")
    if arguments.held_out:
        _write(arguments.held_out, [document for document in documents if document.is_held_out], "--held-out")
        documents = [document for document in documents if not document.is_held_out]
    _write(arguments.output, documents, "--output")
    print(f"next: python -m bert_ds.build_vocab --input {arguments.output} --output data/vocab.txt --size 8192",
          flush=True)
    return EXIT_DONE


def _write(path: str, documents: Sequence[CorpusDocument], flag: str) -> None:
    try:
        with atomic_text_file(path) as file:
            for document in documents:
                file.write(json.dumps({"text": document.text, "source": document.source}) + "\n")
    except OSError as error:
        raise DataError.of(flag, path, f"cannot be written ({error.strerror})",
                           "choose a file in a folder that you may write to") from error
    print(f"wrote {path}: {sum(len(document.text) for document in documents) / 1e6:.2f} MB of text, "
          f"{len(documents):,} documents, {sum(document.sentences for document in documents):,} sentences")


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m bert_ds.gather_text",
                           description="Gathers English text from the documentation strings of Python and of the "
                                       "installed packages; the same installation gives the same text.")
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON lines with the keys text and source")
    parser.add_argument("--held-out", metavar="FILE", help="keeps one document in a hundred apart, in this file")
    parser.add_argument("--max-mb", type=float, default=6.0, metavar="MB",
                        help="about how much text to take (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=min(len(os.sched_getaffinity(0)), _MOST_WORKERS), metavar="N",
                        help="processes; the output is the same for any number of them (default: %(default)s here)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
