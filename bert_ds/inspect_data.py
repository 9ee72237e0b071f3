"""Tells what is in a dataset and what training will see of it.

    python -m bert_ds.inspect_data data/corpus_text_sentence --vocab-file data/vocab.txt --plot plots
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from bert_ds.cli.command_parser import CommandParser
from bert_ds.config.data import DataConfig
from bert_ds.data.bert_dataset import BertDataset
from bert_ds.data.checksums import checksum_file, verify_checksums, write_checksums
from bert_ds.data.dataset_metadata import DatasetMetadata, read_metadata
from bert_ds.data.indexed_dataset import IndexedDataset
from bert_ds.data.inspection import (
    CorpusStatistics,
    Lengths,
    SampleStatistics,
    corpus_statistics,
    sample_statistics,
    samples_of_an_epoch,
)
from bert_ds.data.inspection_plots import plot_statistics
from bert_ds.data.sample_mapping import LONGEST_SENTENCE
from bert_ds.data.sample_text import sample_text
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import EXIT_DONE, ConfigError, DataError, Problem, raise_if_any, run_command

_WIDTHS = range(60, 121)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_command(argv)
    raise_if_any(ConfigError, _problems(arguments))
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    prefix = arguments.prefix
    if arguments.verify:
        print(f"{', '.join(verify_checksums(prefix))}: as they were when {checksum_file(prefix)} was written")
        return EXIT_DONE
    corpus = IndexedDataset(prefix)
    if arguments.checksum:
        corpus.verify()
        print(f"wrote {checksum_file(prefix)} over {', '.join(write_checksums(prefix))}")
        return EXIT_DONE
    return _inspect(arguments, corpus)


def _inspect(arguments: argparse.Namespace, corpus: IndexedDataset) -> int:
    metadata = read_metadata(corpus.prefix)
    vocabulary = _vocabulary(arguments, metadata)
    binary_head = not arguments.bert_no_binary_head
    statistics = corpus_statistics(corpus, vocabulary, binary_head=binary_head)
    samples = seen = None
    if vocabulary is not None and statistics.unserving_documents < statistics.documents:
        data = DataConfig(mask_prob=arguments.mask_prob, short_seq_prob=arguments.short_seq_prob)
        samples = samples_of_an_epoch(corpus, vocabulary, data, seq_length=arguments.seq_length,
                                      binary_head=binary_head, seed=arguments.seed)
        seen = sample_statistics(samples, vocabulary, seq_length=arguments.seq_length,
                                 most_samples=arguments.statistics_samples)
    if arguments.json:
        print(json.dumps({"prefix": corpus.prefix, "corpus": _as_dict(statistics),
                          "samples": None if seen is None else _as_dict(seen)}, indent=2))
    else:
        _print_lines(_corpus_lines(corpus, metadata, statistics))
        if seen is None or samples is None or vocabulary is None:
            print("\nno samples: " + ("give --vocab-file" if vocabulary is None else "no document can serve"))
        else:
            _print_lines(_sample_lines(seen))
            _print_lines(_decoded(samples, vocabulary, min(arguments.samples, len(samples))))
    if arguments.plot is not None:
        _plot(arguments, statistics, seen)
    sys.stdout.flush()
    return EXIT_DONE


def _problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    if arguments.seq_length < 4:
        yield Problem("--seq-length", arguments.seq_length, "is too short for a row", "use 128 or 512")
    for flag, value in (("--samples", arguments.samples), ("--seed", arguments.seed),
                        ("--statistics-samples", arguments.statistics_samples - 1)):
        if value < 0:
            yield Problem(flag, value, "is too small", "leave it out for the default")
    yield from DataConfig(mask_prob=arguments.mask_prob, short_seq_prob=arguments.short_seq_prob).problems()


def _vocabulary(arguments: argparse.Namespace, metadata: DatasetMetadata | None) -> Vocabulary | None:
    """The vocabulary that was named, else the one that the data were made with, if it is still there."""
    if arguments.vocab_file is not None:
        vocabulary = Vocabulary.from_file(arguments.vocab_file, extra_bos_eos=arguments.vocab_extra_bos_eos)
        if metadata is not None:
            raise_if_any(DataError, metadata.problems(vocabulary, arguments.vocab_file, metadata.tokenizer_type))
        return vocabulary
    if metadata is None or not Path(metadata.vocab_file).is_file():
        return None
    vocabulary = Vocabulary.from_file(metadata.vocab_file, extra_bos_eos=arguments.vocab_extra_bos_eos)
    is_same = not list(metadata.problems(vocabulary, metadata.vocab_file, metadata.tokenizer_type))
    return vocabulary if is_same else None


def _corpus_lines(corpus: IndexedDataset, metadata: DatasetMetadata | None,
                  statistics: CorpusStatistics) -> Iterator[str]:
    documents = statistics.documents
    yield f"{corpus.prefix}: {Path(corpus.prefix + '.bin').stat().st_size / 1e6:,.1f} MB of {corpus.dtype} tokens"
    if metadata is not None:
        yield (f"  made with {metadata.vocab_file} ({metadata.vocab_size:,} entries), {metadata.tokenizer_type}, "
               f"sentences by {metadata.sentence_splitter or 'nobody: each document is one sequence'}")
        yield (f"  {metadata.skipped_records:,} records skipped, {metadata.duplicate_documents:,} exact duplicates"
               + (" left out" if metadata.duplicates_dropped else " among the documents"))
    yield f"  {documents:,} documents, {statistics.sentences:,} sentences, {statistics.tokens:,} tokens"
    if statistics.unknown_tokens is not None:
        yield f"  [UNK]: {statistics.unknown_tokens / statistics.tokens:.3%} of the tokens"
    yield f"  documents that cannot serve: {statistics.unserving_documents / documents:.2%}"
    for count, reason in ((statistics.empty_documents, "without a token"),
                          (statistics.too_few_sentences, "with a single sentence (--bert-no-binary-head uses them)"),
                          (statistics.too_long_sentence, f"with a sentence of more than {LONGEST_SENTENCE} tokens")):
        if count:
            yield f"    {count:,} {reason}"
    yield ""
    yield f"  {'lengths in tokens':<20}" + "".join(f"{name:>9}" for name in statistics.sentence_lengths.summary())
    for name, lengths in (("sentences", statistics.sentence_lengths), ("documents", statistics.document_lengths)):
        yield f"  {name:<20}" + "".join(f"{value:>9,.{1 if key == 'mean' else 0}f}"
                                        for key, value in lengths.summary().items())


def _sample_lines(seen: SampleStatistics) -> Iterator[str]:
    yield ""
    yield (f"rows of {seen.seq_length} tokens: {seen.samples_of_an_epoch:,} samples an epoch; over "
           f"{seen.samples_seen:,} of them")
    yield f"  padding {seen.padding_share:.1%}, rows that were cut {seen.truncated_share:.1%}"
    yield (f"  to predict {seen.masked_share:.2%} of the tokens; of these {seen.replaced_by_mask:.1%} became [MASK], "
           f"{seen.replaced_at_random:.1%} another token, {seen.kept:.1%} stayed")
    if seen.swapped_share is not None:
        yield f"  segments swapped in {seen.swapped_share:.1%} of the rows"


def _decoded(samples: BertDataset, vocabulary: Vocabulary, count: int) -> Iterator[str]:
    """Samples as text: [word→MASK], [word→other] and [word=] are to be predicted."""
    columns = max(min(shutil.get_terminal_size().columns, _WIDTHS[-1]), _WIDTHS[0])
    if not count:
        return
    batch = samples.build_batch(np.arange(count))
    for row in range(count):
        headline, segments = sample_text(batch, row, vocabulary)
        yield ""
        yield f"sample {row}: {headline}"
        for name, text in zip("AB", segments, strict=False):
            yield textwrap.fill(text, columns, initial_indent=f"  {name}  ", subsequent_indent="     ",
                                break_long_words=False, break_on_hyphens=False)


def _print_lines(lines: Iterator[str]) -> None:
    for line in lines:
        print(line)


def _as_dict(statistics: CorpusStatistics | SampleStatistics) -> dict[str, object]:
    values = {field.name: getattr(statistics, field.name) for field in fields(statistics)}
    return {name: value.summary() if isinstance(value, Lengths) else value for name, value in values.items()}


def _plot(arguments: argparse.Namespace, statistics: CorpusStatistics, seen: SampleStatistics | None) -> None:
    try:
        written = plot_statistics(Path(arguments.plot), statistics, seen, title=Path(arguments.prefix).name)
    except OSError as error:
        raise DataError.of("--plot", arguments.plot, f"cannot be written ({error.strerror})",
                           "name a folder that you may write to") from error
    print("\n".join(f"wrote {path}" for path in written), file=sys.stderr if arguments.json else sys.stdout)


def _parser() -> CommandParser:
    parser = CommandParser(prog="python -m bert_ds.inspect_data",
                           description="Tells what is in a dataset and what training will see of it.")
    parser.add_argument("prefix", metavar="PREFIX", help="prefix of a .bin/.idx pair")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--plot", metavar="FOLDER", help="writes lengths.png and padding.png there")
    parser.add_argument("--checksum", action="store_true", help="only writes PREFIX.sha256, as sha256sum does")
    parser.add_argument("--verify", action="store_true", help="only compares the files with PREFIX.sha256")

    samples = parser.add_argument_group("samples")
    samples.add_argument("--vocab-file", metavar="FILE", help="default: the one that the data were made with")
    samples.add_argument("--vocab-extra-bos-eos", action="store_true",
                         help="append [BOS] and [EOS], as Megatron-LM up to 0.16 does")
    samples.add_argument("--seq-length", type=int, default=512, metavar="N", help="tokens of a row (default: 512)")
    samples.add_argument("--samples", type=int, default=3, metavar="N", help="samples to print (default: 3)")
    samples.add_argument("--statistics-samples", type=int, default=20_000, metavar="N",
                         help="samples that statistics are taken over (default: 20000)")
    samples.add_argument("--bert-no-binary-head", action="store_true", help="samples without the sentence task")
    samples.add_argument("--mask-prob", type=float, default=DataConfig.mask_prob, metavar="P",
                         help="share of the tokens to predict (default: %(default)s)")
    samples.add_argument("--short-seq-prob", type=float, default=DataConfig.short_seq_prob, metavar="P",
                         help="share of short rows (default: %(default)s)")
    samples.add_argument("--seed", type=int, default=1234, metavar="N", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
