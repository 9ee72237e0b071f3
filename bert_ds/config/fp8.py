"""Whether a run can multiply matrices in FP8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bert_ds.config.engine import EngineConfig
from bert_ds.config.model import ModelConfig
from bert_ds.config.parallel import ParallelConfig
from bert_ds.errors import Problem

MULTIPLE = 16
"""FP8 matrix products want every dimension to be a multiple of this (cuBLAS, alignment of 16 bytes)."""


def fp8_problems(
    model: ModelConfig, parallel: ParallelConfig, engine: EngineConfig, tokens: Mapping[str, int]
) -> Iterator[Problem]:
    """Everything that keeps the layers from computing in FP8; nothing where they are not asked to.

    Call `problems` of the three first.

    Args:
        model: the model.
        parallel: the layout.
        engine: precision.
        tokens: those of a micro-batch, for training and for evaluation, by the setting that decides.
    """
    if model.fp8_format is None:
        return
    if model.transformer_impl != "transformer_engine":
        yield Problem("model.fp8_format", model.fp8_format, "is computed by Transformer Engine only",
                      "set model.transformer_impl to transformer_engine, or leave fp8_format out")
    if engine.precision == "fp32":
        yield Problem("model.fp8_format", model.fp8_format, "would cut the matrices of an fp32 run to 8 bits",
                      "train in bf16 (--bf16), which FP8 goes with, or leave fp8_format out")
    tensor = parallel.tensor_model_parallel_size
    widths = {"model.hidden_size": model.hidden_size,
              "heads x their dimension / tensor_model_parallel_size": model.projection_size // tensor,
              "model.ffn_hidden_size / tensor_model_parallel_size": model.ffn_size // tensor}
    for name, width in widths.items():
        if width % MULTIPLE:
            yield Problem(name, width, f"is no multiple of {MULTIPLE}, as FP8 matrix products want",
                          f"use {-(-width // MULTIPLE) * MULTIPLE}, or leave fp8_format out")
    ranks = tensor if parallel.sequence_parallel else 1
    for name, count in tokens.items():
        if count % (MULTIPLE * ranks):
            yield Problem(name, f"{count} tokens of a micro-batch",
                          f"is no multiple of {MULTIPLE * ranks}, as FP8 matrix products want",
                          f"choose rows, or a length, that are a multiple of {MULTIPLE * ranks}")
