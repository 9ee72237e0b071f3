"""The steps from text to a model that fills in words, each as the command that a user would type."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from bert_ds.cli.resolve import resolve_run
from bert_ds.cli.shipped_files import PACKAGE, display, find_file
from bert_ds.demo.files import DemoFiles
from bert_ds.demo.steps import Step
from bert_ds.errors import ConfigError

TEXT_MB = 4
VOCABULARY_SIZE = 8192
DS_CONFIG, RECIPE = "ds_configs/tiny.json", "recipes/tiny.yaml"
CPU_RANKS = 2
_LAUNCHER_PORT = 29500


def gather_text(files: DemoFiles) -> Step:
    return Step("gather-text", "English text that is here already: the documentation of Python and of its packages",
                _module("gather_text", "--output", files.text, "--held-out", files.held_out, "--max-mb", TEXT_MB),
                outputs=(files.text, files.held_out))


def build_vocab(files: DemoFiles) -> Step:
    return Step("build-vocab", "a vocabulary of words and of pieces of words",
                _module("build_vocab", "--input", files.text, "--output", files.vocabulary, "--size", VOCABULARY_SIZE),
                outputs=(files.vocabulary,))


def preprocess_data(files: DemoFiles) -> Step:
    prefix = files.data_prefix
    return Step("preprocess-data", "documents cut into sentences, sentences into tokens",
                _module("preprocess_data", "--input", files.text, "--output-prefix", files.output_prefix,
                        "--vocab-file", files.vocabulary, "--split-sentences", "--workers", os.cpu_count() or 1),
                outputs=tuple(prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")))


def pretrain(files: DemoFiles, gpus: int) -> tuple[Step, int]:
    """The step and its number of ranks: copies of the model on GPUs, or without one a pipeline of two CPU ranks."""
    config, recipe = _shipped(DS_CONFIG), _shipped(RECIPE)
    ranks, layout = _on_gpus(config, gpus) if gpus else (CPU_RANKS, ("--pipeline-model-parallel-size", str(CPU_RANKS)))
    where = f"{ranks} GPU(s)" if gpus else "two processes, each with half of the layers"
    step = Step("pretrain", f"BERT learns to fill in masked words and to tell the order of sentences, on {where}",
                (display(PACKAGE / "pretrain.py"), "--deepspeed_config", display(config), *layout,
                 "--data-path", str(files.data_prefix), "--vocab-file", str(files.vocabulary),
                 "--save", str(files.checkpoints), "--load", str(files.checkpoints),
                 "--tensorboard-dir", str(files.run)),
                outputs=(files.checkpoints, files.run), sources=(config, recipe), resumes=True,
                environment={} if gpus else {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
                # Without --num_gpus the launcher takes all GPUs, or those that CUDA_VISIBLE_DEVICES names.
                launcher=(*_deepspeed(), *_master_port(), *(() if ranks == gpus else ("--num_gpus", str(ranks)))))
    return step, ranks


def export(files: DemoFiles) -> Step:
    return Step("convert", "the checkpoint as a Hugging Face model, checked against what transformers computes",
                _module("convert", "to-hf", files.checkpoints, files.model), outputs=(files.model,))


def fill_mask(files: DemoFiles, texts: Sequence[str]) -> Step:
    return Step("fill-mask", "Hugging Face transformers loads it and guesses [words] of sentences it has never seen",
                _module("fill_mask", files.model, *(word for text in texts for word in ("--text", text))))


def report(files: DemoFiles) -> Step:
    return Step("report", "the curves of the training",
                _module("report", files.run, "--output", files.picture), outputs=(files.picture,))


def _module(name: str, *arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-m", f"bert_ds.{name}", *map(str, arguments))


def _shipped(name: str) -> Path:
    found = find_file(name)
    if found is None:
        raise ConfigError.of("bert_ds", name, "is neither beside the package nor in it", "install bert_ds again")
    return found


def _on_gpus(config: Path, gpus: int) -> tuple[int, tuple[str, ...]]:
    """As many GPUs as the global batch can be shared by, and the flags that share it."""
    engine = resolve_run(("--deepspeed_config", str(config)), world_size=1).config.engine
    ranks = max(count for count in range(1, gpus + 1) if engine.global_batch_size % count == 0)
    micro = math.gcd(engine.micro_batch_size, engine.global_batch_size // ranks)
    return ranks, () if micro == engine.micro_batch_size else ("--micro-batch-size", str(micro))


def _deepspeed() -> tuple[str, ...]:
    """DeepSpeed's launcher: the script beside this interpreter, else the module behind it."""
    script = Path(sys.executable).with_name("deepspeed")
    return (str(script),) if script.exists() else (sys.executable, "-m", "deepspeed.launcher.runner")


def _master_port() -> tuple[str, ...]:
    """Nothing while the launcher's own port is free, else a flag with another one."""
    with socket.socket() as usual, contextlib.suppress(OSError):
        usual.bind(("", _LAUNCHER_PORT))
        return ()
    with socket.socket() as any_free:
        any_free.bind(("", 0))
        return ("--master_port", str(any_free.getsockname()[1]))
