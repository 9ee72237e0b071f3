"""Makes several datasets into one, as if their texts had been preprocessed together.

    python -m bert_ds.merge_data --output-prefix data/all data/part1_text_sentence data/part2_text_sentence
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bert_ds.cli.command_parser import CommandParser
from bert_ds.data.indexed_dataset import IndexedDataset
from bert_ds.data.merging import merge
from bert_ds.errors import EXIT_DONE, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_command(argv)
    metadata = merge(arguments.prefixes, arguments.output_prefix)
    merged = IndexedDataset(arguments.output_prefix)
    print(f"wrote {merged.prefix}.bin and .idx: {merged.num_documents:,} documents, {len(merged):,} sentences, "
          f"{len(merged.tokens):,} tokens from {len(arguments.prefixes)} datasets")
    if metadata is None:
        print(f"note: not all of them have a .json that tells their vocabulary, so that {merged.prefix} has none; "
              "training cannot check that it gets the right vocabulary", flush=True)
    elif not metadata.duplicates_dropped or len(arguments.prefixes) > 1:
        print("note: documents that stand in several of them were neither looked for nor dropped", flush=True)
    return EXIT_DONE


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m bert_ds.merge_data",
                           description="Makes several datasets into one, their documents one after the other.")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="prefix of a .bin/.idx pair")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin, .idx and .json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
