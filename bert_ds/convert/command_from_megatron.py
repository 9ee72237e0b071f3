"""`python -m bert_ds.convert from-megatron`."""

from __future__ import annotations

import argparse
from pathlib import Path

from bert_ds.config.data import TOKENIZER_TYPES
from bert_ds.config.model import ACTIVATIONS
from bert_ds.convert.from_megatron import MegatronImportOptions, MegatronImportReport, import_from_megatron
from bert_ds.convert.megatron_args import StatedByUser
from bert_ds.errors import EXIT_DONE


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command and its arguments."""
    parser = commands.add_parser(
        "from-megatron", help="make a checkpoint of a BERT that Megatron-LM trained",
        description="Reads the weights of Megatron-LM's BERT, legacy and core, formats torch and torch_dist, of any "
                    "tensor- and pipeline-parallel size. Pickles are read as data and never executed.")
    parser.set_defaults(run=_run)
    parser.add_argument("folder", type=Path, metavar="FOLDER",
                        help="what Megatron's --save named (then its latest), or an iter_... folder in it")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make, for --load OUT --finetune")
    parser.add_argument("--vocab-file", type=Path, required=True, metavar="PATH", help="the run's vocabulary")
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="default: the checkpoint's")
    parser.add_argument("--vocab-extra-bos-eos", action="store_true",
                        help="count [BOS] and [EOS], which Megatron-LM's tokenizer up to 0.16 appends")
    parser.add_argument("--num-attention-heads", type=int, metavar="N",
                        help="only for a checkpoint without Megatron's arguments")
    parser.add_argument("--activation", choices=ACTIVATIONS,
                        help="of the feed-forward layers; only for a checkpoint without Megatron's arguments")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a folder of checkpoints")


def _run(arguments: argparse.Namespace) -> int:
    options = MegatronImportOptions(
        vocab_file=arguments.vocab_file, tokenizer_type=arguments.tokenizer_type,
        vocab_extra_bos_eos=arguments.vocab_extra_bos_eos, force=arguments.force,
        stated=StatedByUser(num_attention_heads=arguments.num_attention_heads, activation=arguments.activation))
    print(_summary(import_from_megatron(arguments.folder, arguments.out, options), options))
    return EXIT_DONE


def _summary(report: MegatronImportReport, options: MegatronImportOptions) -> str:
    model = report.config
    parts = [f"{model.num_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads",
             f"vocabulary {model.vocab_size} ({report.tokenizer_type})",
             f"activation {model.activation}"
             + (f", {model.head_activation} in the head" if model.head_activation else ""),
             "with the binary head" if model.binary_head else "without a binary head"]
    return "\n".join([
        f"converted {report.source} ({report.format}), iteration {report.iteration}",
        f"       to {report.out}: {', '.join(parts)}",
        "Weights only: Megatron's optimizer state and place in the data stay behind.",
        "",
        "Go on training with:",
        f"    --load {report.out} --finetune --use-checkpoint-args"
        + (" --vocab-extra-bos-eos" if options.vocab_extra_bos_eos else ""),
    ])
