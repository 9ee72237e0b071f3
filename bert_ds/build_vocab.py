"""Trains a WordPiece vocabulary on a text.

    python -m bert_ds.build_vocab --input corpus.jsonl --output data/vocab.txt --size 30522
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bert_ds.cli.command_parser import CommandParser
from bert_ds.data.atomic_file import atomic_text_file
from bert_ds.data.text_sources import INPUT_FORMATS, ON_ERROR, BadRecords, TextSources, require_repeatable
from bert_ds.data.vocabulary_training import train_vocabulary
from bert_ds.errors import EXIT_DONE, ConfigError, DataError, Problem, raise_if_any, run_command
from bert_ds.log import configure_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_command(argv)
    configure_logging()
    raise_if_any(ConfigError, _problems(arguments))
    sources = TextSources(arguments.input, arguments.input_format)
    require_repeatable(sources)
    texts = _Texts(sources, arguments.json_keys, arguments.on_error)
    tokens = train_vocabulary(
        texts, size=arguments.size, lower_case=arguments.lower_case, min_frequency=arguments.min_frequency,
        alphabet_limit=arguments.alphabet_limit,
    )
    content = "".join(token + "\n" for token in tokens)
    _write(arguments.output, content, force=arguments.force)
    _print_summary(arguments, tokens, content, skipped_records=texts.skipped_records)
    return EXIT_DONE


def _problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    for flag, value in (("--size", arguments.size), ("--min-frequency", arguments.min_frequency),
                        ("--alphabet-limit", arguments.alphabet_limit)):
        if value < 1:
            yield Problem(flag, value, "must be at least 1", "leave it out for the default")


class _Texts:
    """The texts of the sources, anew at every call; what is skipped is reported at the first."""

    def __init__(self, sources: TextSources, keys: Sequence[str], on_error: str) -> None:
        self._sources = sources
        self._keys = keys
        self._on_error = on_error
        self._report = True
        self.skipped_records = 0

    def __call__(self) -> Iterator[str]:
        bad_records = BadRecords(self._on_error, report=self._report)
        self._report = False
        for document in self._sources.documents(self._keys, bad_records):
            yield from document.texts
        self.skipped_records = bad_records.count


def _write(path: str, content: str, *, force: bool) -> None:
    try:
        if Path(path).exists():
            if Path(path).read_bytes() == content.encode():
                return
            if not force:
                raise ConfigError.of("--output", path, "exists and holds another vocabulary; data made with it would "
                                     "no longer fit", "choose another name, or replace it with --force")
        with atomic_text_file(path) as file:
            file.write(content)
    except OSError as error:
        raise DataError.of("--output", path, f"cannot be written ({error.strerror})",
                           "choose a file in a folder that you may write to") from error


def _print_summary(arguments: argparse.Namespace, tokens: Sequence[str], content: str, *,
                   skipped_records: int) -> None:
    if skipped_records:
        print(f"note: {skipped_records:,} records were skipped")
    if len(tokens) < arguments.size:
        print(f"note: the text holds {len(tokens):,} pieces where {arguments.size:,} were asked for; more text, or a "
              f"--min-frequency below {arguments.min_frequency}, gives more")
    digest = hashlib.sha256(content.encode()).hexdigest()
    print(f"wrote {arguments.output}: {len(tokens):,} tokens, sha256 {digest}")
    tokenizer_type = "BertWordPieceLowerCase" if arguments.lower_case else "BertWordPieceCase"
    print(f"next: python -m bert_ds.preprocess_data --input {' '.join(arguments.input)} --vocab-file "
          f"{arguments.output} --tokenizer-type {tokenizer_type} --output-prefix data/corpus --split-sentences",
          flush=True)


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m bert_ds.build_vocab",
                           description="Trains a WordPiece vocabulary on a text; the same text gives the same file.")
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE",
                        help="text in JSON lines or plain text, gzipped or not")
    parser.add_argument("--input-format", choices=INPUT_FORMATS, default="auto",
                        help="auto (the default) looks at name and content")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY",
                        help="keys whose texts are used (default: text)")
    parser.add_argument("--on-error", choices=ON_ERROR, default="stop",
                        help="what to do with a record that cannot be used (default: %(default)s)")
    parser.add_argument("--output", required=True, metavar="FILE", help="the vocabulary, one token a line")
    parser.add_argument("--force", action="store_true", help="replace a file that holds another vocabulary")
    parser.add_argument("--size", type=int, default=30522, metavar="N",
                        help="entries, special tokens included (default: %(default)s)")
    case = parser.add_mutually_exclusive_group()
    case.add_argument("--lower-case", dest="lower_case", action="store_true", default=True,
                      help="lower case, without accents (the default)")
    case.add_argument("--cased", dest="lower_case", action="store_false", help="keep case and accents")
    parser.add_argument("--min-frequency", type=int, default=2, metavar="N",
                        help="rarer pieces are left out (default: %(default)s)")
    parser.add_argument("--alphabet-limit", type=int, default=1000, metavar="N",
                        help="characters kept; rarer ones become [UNK] (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
