"""Turns raw text into the indexed datasets that training reads.

    python -m bert_ds.preprocess_data --input corpus.jsonl --vocab-file data/vocab.txt --output-prefix data/corpus \\
        --split-sentences --workers 8

writes data/corpus_text_sentence.bin, .idx and .json (how they were made). A Wikipedia dump goes through an extractor
first:

    python -m wikiextractor.WikiExtractor enwiki-latest-pages-articles.xml.bz2 --json -o extracted
    python -m bert_ds.preprocess_data --input 'extracted/*/wiki_*' --json-keys text ...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bert_ds.cli.command_parser import CommandParser
from bert_ds.cli.megatron_flags import PREPROCESSING_IDLE, PREPROCESSING_REFUSED
from bert_ds.config.data import TOKENIZER_TYPES
from bert_ds.data.dataset_metadata import DatasetMetadata
from bert_ds.data.document_encoder import EncoderSettings
from bert_ds.data.preprocess import PreprocessedDataset, PreprocessSettings, preprocess
from bert_ds.data.sentences import SPLITTERS
from bert_ds.data.text_sources import INPUT_FORMATS, LARGEST_DOCUMENT_MB, ON_ERROR
from bert_ds.data.tokenizer import MAX_WORD_LENGTH
from bert_ds.errors import EXIT_DONE, run_command
from bert_ds.log import configure_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    arguments = parser.parse_command(argv)
    configure_logging()
    for remark in parser.remarks(arguments):
        print(f"note: {remark}", flush=True)
    if not arguments.split_sentences:
        print("note: without --split-sentences each document is one sequence, which BERT's sentence pairs cannot be "
              "made of", flush=True)
    for dataset in preprocess(_settings(arguments)):
        _print_summary(dataset)
    return EXIT_DONE


def _settings(arguments: argparse.Namespace) -> PreprocessSettings:
    return PreprocessSettings(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix,
        input_format=arguments.input_format,
        workers=arguments.workers,
        on_error=arguments.on_error,
        largest_document_mb=arguments.max_document_mb,
        drop_duplicates=arguments.drop_duplicates,
        check_free_space=not arguments.no_space_check,
        log_interval=arguments.log_interval,
        encoder=EncoderSettings(
            vocab_file=arguments.vocab_file,
            tokenizer_type=arguments.tokenizer_type,
            max_word_length=arguments.max_word_length,
            sentence_splitter=arguments.sentence_splitter if arguments.split_sentences else None,
            json_keys=tuple(arguments.json_keys),
            append_eod=arguments.append_eod,
            vocab_extra_bos_eos=arguments.vocab_extra_bos_eos,
        ),
    )


def _print_summary(dataset: PreprocessedDataset) -> None:
    metadata = dataset.metadata
    has_pairs = metadata.documents_of_two_sentences > 0
    if metadata.sentence_splitter and not has_pairs:
        print(f"warning: no document of {dataset.prefix} has two sentences, so that no sentence pairs can be made: "
              "training needs --bert-no-binary-head, or documents that hold more than one sentence (in plain text, "
              "blank lines separate documents)", flush=True)
    print(f"wrote {dataset.prefix}.bin and .idx: {metadata.documents:,} documents "
          f"({metadata.documents_of_two_sentences:,} of at least two sentences), {metadata.sentences:,} sentences, "
          f"{metadata.tokens:,} tokens, {metadata.unknown_tokens / metadata.tokens:.2%} of them [UNK]; "
          f"{_exceptions(metadata)}")
    if metadata.sentence_splitter:
        print(f"next: deepspeed bert_ds/pretrain.py --recipe tiny --data-path {dataset.prefix} "
              f"--vocab-file {metadata.vocab_file} --tokenizer-type {metadata.tokenizer_type}"
              + ("" if has_pairs else " --bert-no-binary-head"), flush=True)


def _exceptions(metadata: DatasetMetadata) -> str:
    parts = [f"{metadata.skipped_records:,} records skipped"]
    if metadata.replaced_records:
        parts.append(f"characters replaced in {metadata.replaced_records:,}")
    if metadata.duplicate_documents:
        parts.append(f"{metadata.duplicate_documents:,} exact duplicates "
                     + ("left out" if metadata.duplicates_dropped else "kept (--drop-duplicates leaves them out)"))
    return ", ".join(parts)


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m bert_ds.preprocess_data",
                           description="Turns raw text into the indexed datasets that training reads.")
    files = parser.add_argument_group("files")
    files.add_argument("--input", nargs="+", required=True, metavar="FILE",
                       help="JSON lines, plain text (blank lines separate documents), both also as .gz or .zst, or "
                            "parquet; patterns in quotes such as 'text/*.jsonl'; - reads standard input")
    files.add_argument("--input-format", choices=INPUT_FORMATS, default="auto",
                       help="auto (the default) looks at name and content")
    files.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY",
                       help="keys, or columns, whose texts are used, each for a dataset of its own (default: text)")
    files.add_argument("--output-prefix", required=True, metavar="PREFIX",
                       help="writes PREFIX_KEY_sentence.bin, .idx and .json (_document without --split-sentences)")
    files.add_argument("--on-error", choices=ON_ERROR, default="stop",
                       help="what to do with a record that cannot be used: broken JSON, a missing key, no UTF-8 "
                            "(default: %(default)s); replace uses those that are no UTF-8, without the bad characters")
    files.add_argument("--max-document-mb", type=float, default=LARGEST_DOCUMENT_MB, metavar="MB",
                       help="larger documents are refused, which bounds the memory (default: %(default)s)")
    files.add_argument("--drop-duplicates", action="store_true",
                       help="leave out documents that equal an earlier one; otherwise they are only counted")
    files.add_argument("--no-space-check", action="store_true",
                       help="start even where the output, by estimate, does not fit onto the disk")

    tokens = parser.add_argument_group("tokens")
    tokens.add_argument("--vocab-file", required=True, metavar="FILE", help="WordPiece vocabulary, one token a line")
    tokens.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, default=TOKENIZER_TYPES[0],
                        help="the first, which is the default, lowers case and strips accents")
    tokens.add_argument("--max-word-length", type=int, default=MAX_WORD_LENGTH, metavar="N",
                        help="longer words become [UNK]; Megatron-LM up to 0.16 used 200 (default: %(default)s)")
    tokens.add_argument("--split-sentences", action="store_true", help="split documents into sentences, as BERT needs")
    tokens.add_argument("--sentence-splitter", choices=SPLITTERS, default=SPLITTERS[0],
                        help="newline takes every line for a sentence (default: %(default)s)")
    tokens.add_argument("--append-eod", action="store_true", help="close every document with [SEP]")
    tokens.add_argument("--vocab-extra-bos-eos", action="store_true",
                        help="extend the vocabulary by [BOS] and [EOS] and close documents with [EOS], as Megatron-LM "
                             "up to 0.16 does; train with the same flag")

    work = parser.add_argument_group("work")
    work.add_argument("--workers", type=int, default=1, metavar="N",
                      help="processes; the output is the same for any number of them (default: %(default)s)")
    work.add_argument("--log-interval", type=int, default=1000, metavar="N",
                      help="documents between progress lines, at most one line every five seconds "
                           "(default: %(default)s)")
    parser.take_over(PREPROCESSING_IDLE, PREPROCESSING_REFUSED)
    return parser


if __name__ == "__main__":
    sys.exit(main())
