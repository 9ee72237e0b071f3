"""`python -m bert_ds.convert to-hf`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from bert_ds.convert.hf_model import DTYPES
from bert_ds.convert.huggingface import ExportOptions, ExportReport, export_to_huggingface
from bert_ds.convert.model_card import usage_lines
from bert_ds.errors import EXIT_DONE

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the command and its arguments."""
    parser = commands.add_parser("to-hf", help="write a folder that Hugging Face transformers opens")
    parser.set_defaults(run=_run)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT",
                        help="an iter_... folder, or the folder of a run's checkpoints (then its latest)")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="type of the weights (%(default)s)")
    parser.add_argument("--max-shard-size", type=_bytes, default="5GB", metavar="SIZE",
                        help="largest weight file, as in 500MB or 5GB (%(default)s)")
    parser.add_argument("--untie", action="store_true",
                        help="write the output projection too, instead of leaving it tied to the word table")
    parser.add_argument("--license", metavar="NAME", help="license for the model card; left out if not given")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is an earlier export")
    parser.add_argument("--no-verify", action="store_true",
                        help="neither check the checkpoint's hashes nor compare logits with transformers")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500MB or 5GB")
    return size


def _run(arguments: argparse.Namespace) -> int:
    report = export_to_huggingface(arguments.checkpoint, arguments.out, ExportOptions(
        dtype=arguments.dtype, untie=arguments.untie, max_shard_bytes=arguments.max_shard_size,
        verify=not arguments.no_verify, force=arguments.force, license_name=arguments.license,
    ))
    print(_summary(report))
    return EXIT_DONE


def _summary(report: ExportReport) -> str:
    count = len(report.weight_files)
    weights = report.weight_files[0] if count == 1 else f"{count} shards"
    return "\n".join([
        f"exported {report.source}",
        f"      to {report.out}: {report.architecture}, {report.num_parameters:,} parameters in {weights}",
        report.verification,
        "",
        "Load it in Python:",
        *(f"    {line}" for line in usage_lines(str(report.out))),
    ])
