"""`python -m bert_ds.convert to-megatron`."""

from __future__ import annotations

import argparse
from pathlib import Path

from bert_ds.convert.hf_model import DTYPES
from bert_ds.convert.megatron_names import TRANSFORMER_ENGINE, TRANSFORMER_IMPLS
from bert_ds.convert.to_megatron import MegatronExportOptions, MegatronExportReport, export_to_megatron
from bert_ds.errors import EXIT_DONE


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command and its arguments."""
    parser = commands.add_parser(
        "to-megatron", help="write a folder that Megatron-LM loads",
        description="Writes the weights as a checkpoint of Megatron core's BertModel, in the format torch.")
    parser.set_defaults(run=_run)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT",
                        help="an iter_... folder, or the folder of a run's checkpoints (then its latest)")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make, for Megatron's --load")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="T", help="(%(default)s)")
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="P", help="(%(default)s)")
    parser.add_argument("--transformer-impl", choices=TRANSFORMER_IMPLS, default=TRANSFORMER_ENGINE,
                        help="whose layers read it; local is Megatron's `--spec local` (%(default)s)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="type of the weights (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a folder of Megatron's checkpoints")


def _run(arguments: argparse.Namespace) -> int:
    options = MegatronExportOptions(
        tensor_parallel=arguments.tensor_model_parallel_size, pipeline_parallel=arguments.pipeline_model_parallel_size,
        transformer_impl=arguments.transformer_impl, dtype=arguments.dtype, force=arguments.force)
    print(_summary(export_to_megatron(arguments.checkpoint, arguments.out, options), options))
    return EXIT_DONE


def _summary(report: MegatronExportReport, options: MegatronExportOptions) -> str:
    model = report.config
    fusion = "" if model.activation == "gelu_tanh" else " --no-bias-gelu-fusion"
    head = "" if model.binary_head else " --bert-no-binary-head"
    spec = "" if options.transformer_impl == TRANSFORMER_ENGINE else " --spec local"
    return "\n".join([
        f"exported {report.source}",
        f"      to {report.out}: iteration {report.iteration}, {report.files} files, word table of "
        f"{report.padded_vocab_size} rows",
        "",
        "Load it with Megatron-LM's pretrain_bert.py:",
        f"    --load {report.out} --use-checkpoint-args --no-load-optim --no-load-rng --ckpt-format torch{spec} "
        f"--norm-epsilon {model.layernorm_epsilon}{fusion}{head} --tensor-model-parallel-size "
        f"{options.tensor_parallel} --pipeline-model-parallel-size {options.pipeline_parallel}",
    ])
