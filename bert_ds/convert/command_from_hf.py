"""`python -m bert_ds.convert from-hf`."""

from __future__ import annotations

import argparse
from pathlib import Path

from bert_ds.checkpoint.format import VOCABULARY_FILE
from bert_ds.config.data import TOKENIZER_TYPES
from bert_ds.convert.from_huggingface import ImportOptions, ImportReport, import_from_huggingface
from bert_ds.convert.hf_source import ModelChoices
from bert_ds.errors import EXIT_DONE


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command and its arguments."""
    parser = commands.add_parser("from-hf", help="make a checkpoint of a Hugging Face BERT, to train on from")
    parser.set_defaults(run=_run)
    parser.add_argument("model", type=Path, metavar="MODEL",
                        help="folder of a model of type bert or megatron-bert, with its tokenizer")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of checkpoints to make")
    parser.add_argument("--bert-no-binary-head", action="store_true",
                        help="leave the sentence head and token types out, for training by masked LM alone")
    parser.add_argument("--seed", type=int, default=ModelChoices.seed,
                        help="seed of the heads that the model lacks (%(default)s)")
    parser.add_argument("--make-vocab-size-divisible-by", type=_positive, metavar="N",
                        default=ModelChoices.make_vocab_size_divisible_by,
                        help="pad the word table to a multiple of this (%(default)s)")
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES,
                        help="how text becomes tokens; default: what the tokenizer's files say")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is an earlier output")
    parser.add_argument("--no-verify", action="store_true", help="do not compare logits with transformers")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _run(arguments: argparse.Namespace) -> int:
    report = import_from_huggingface(arguments.model, arguments.out, ImportOptions(
        model=ModelChoices(
            binary_head=not arguments.bert_no_binary_head, seed=arguments.seed, tokenizer_type=arguments.tokenizer_type,
            make_vocab_size_divisible_by=arguments.make_vocab_size_divisible_by),
        verify=not arguments.no_verify, force=arguments.force))
    print(_summary(report))
    return EXIT_DONE


def _summary(report: ImportReport) -> str:
    config, vocabulary = report.config, report.vocabulary
    lines = [
        f"converted {report.source} ({report.model_type})",
        f"       to {report.checkpoint}: {config.num_layers} layers x {config.hidden_size} x "
        f"{config.num_attention_heads} heads, {config.norm_placement}-LN, {config.num_parameters:,} parameters",
        f"vocabulary: {config.vocab_size} entries of {vocabulary.source.name}, {vocabulary.tokenizer_type} "
        f"({vocabulary.reason})",
    ]
    if report.initialized:
        lines.append("initialised, since the model lacks them:")
        lines += [f"    {name}" for name in report.initialized]
    lines += [f"left out: {text}" for text in report.left_out]
    lines += [report.verification, "", "Go on from it:", *(f"    {line}" for line in _next_steps(report))]
    return "\n".join(lines)


def _next_steps(report: ImportReport) -> tuple[str, ...]:
    cased = "" if report.vocabulary.tokenizer_type == TOKENIZER_TYPES[0] else f" --tokenizer-type {TOKENIZER_TYPES[1]}"
    return (
        f"python -m bert_ds.preprocess_data --input corpus.jsonl --vocab-file {report.out / VOCABULARY_FILE} "
        f"--output-prefix data/corpus --split-sentences{cased}",
        "deepspeed bert_ds/pretrain.py --deepspeed_config ds_configs/continue.json "
        f"--load {report.out}",
    )
