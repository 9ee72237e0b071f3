"""A checkpoint of any layout becomes one of Megatron core's format `torch`, cut for any tensor x pipeline layout."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import VOCABULARY_FILE, WEIGHT
from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.checkpoint.reader import Checkpoint, locate
from bert_ds.checkpoint.run_config import model_config_from
from bert_ds.config.model import ModelConfig
from bert_ds.convert.hf_model import DTYPES
from bert_ds.convert.megatron_args import args_of, inexpressible
from bert_ds.convert.megatron_layout import MODEL_FILE, RELEASE, TRACKER_FILE, iteration_folder, rank_folder
from bert_ds.convert.megatron_names import (
    OUTPUT_BIAS,
    OUTPUT_WEIGHT,
    TRANSFORMER_ENGINE,
    WORD_TABLE,
    core_name,
    extra_states,
    fit_rows,
    in_layer,
    layer_of,
)
from bert_ds.convert.megatron_source import NEWEST_VERSION
from bert_ds.convert.output_folder import output_folder
from bert_ds.errors import CheckpointError, Problem, raise_if_any

_VOCABULARY_TABLES = (WORD_TABLE, OUTPUT_WEIGHT, OUTPUT_BIAS)


@dataclass(frozen=True, kw_only=True)
class MegatronExportOptions:
    """What the user may choose; everything else comes from the checkpoint."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    transformer_impl: str = TRANSFORMER_ENGINE
    """Whose layers will read it, one of megatron_names.TRANSFORMER_IMPLS: they name the LayerNorms differently."""
    dtype: str = "float32"
    """Type of the weights, a key of hf_model.DTYPES."""
    force: bool = False
    """Replace an earlier output."""


@dataclass(frozen=True, kw_only=True)
class MegatronExportReport:
    """What was written."""

    source: Path
    out: Path
    iteration: int
    files: int
    padded_vocab_size: int
    config: ModelConfig


def export_to_megatron(checkpoint: Path, out: Path, options: MegatronExportOptions) -> MegatronExportReport:
    """Writes the weights of `checkpoint`, its own folder or one of a run's (then the latest), to the folder `out`.

    `out` appears whole or not at all, and `checkpoint` is only read.

    Raises:
        CheckpointError: the checkpoint cannot be used, Megatron's BERT cannot hold it, or `out` cannot be written.
    """
    source = Checkpoint.open(locate(checkpoint))
    config = model_config_from(source.manifest)
    raise_if_any(CheckpointError, _problems(config, options))
    cut = _Cut(source, config, options)
    step = source.manifest.step
    with output_folder(out, source=source.folder, force=options.force, marker=TRACKER_FILE) as folder:
        # Megatron takes no iteration 0; it calls weights without a history a release.
        iteration = folder / (iteration_folder(step) if step else RELEASE)
        for tensor_rank in range(options.tensor_parallel):
            for stage in range(options.pipeline_parallel):
                made = iteration / rank_folder(tensor_rank, stage, options.pipeline_parallel)
                made.mkdir(parents=True)
                torch.save(cut.rank_content(tensor_rank, stage), made / MODEL_FILE)
                files.sync_file(made / MODEL_FILE)
                files.sync_folder(made)
        files.sync_folder(iteration)
        files.copy_durably(source.vocabulary, folder / VOCABULARY_FILE)
        files.write_durably(folder / TRACKER_FILE, [iteration.name.removeprefix("iter_").lstrip("0").encode()])
    return MegatronExportReport(source=source.folder, out=out, iteration=step, config=config,
                                files=options.tensor_parallel * options.pipeline_parallel,
                                padded_vocab_size=cut.padded_vocab_size)


class _Cut:
    """Which rank of Megatron's holds what."""

    def __init__(self, source: Checkpoint, config: ModelConfig, options: MegatronExportOptions) -> None:
        self._source, self._config, self._options = source, config, options
        multiple = config.make_vocab_size_divisible_by * options.tensor_parallel
        self.padded_vocab_size = -(-config.vocab_size // multiple) * multiple
        self._layers_per_stage = config.num_layers // options.pipeline_parallel

    def rank_content(self, tensor_rank: int, stage: int) -> dict[str, Any]:
        """The object in one rank's file."""
        manifest, options = self._source.manifest, self._options
        args = args_of(
            self._config, transformer_impl=options.transformer_impl, tensor_parallel=options.tensor_parallel,
            pipeline_parallel=options.pipeline_parallel, padded_vocab_size=self.padded_vocab_size,
            tokenizer_type=manifest.vocabulary.tokenizer_type)
        args |= {"iteration": manifest.step, "consumed_train_samples": manifest.consumed_samples,
                 "params_dtype": DTYPES[options.dtype], "fp16": options.dtype == "float16",
                 "bf16": options.dtype == "bfloat16"}
        model = dict(self._state_dict(tensor_rank, stage))
        return {"args": argparse.Namespace(**args), "checkpoint_version": NEWEST_VERSION, "iteration": manifest.step,
                "model": model, "num_floating_point_operations_so_far": 0}

    def _state_dict(self, tensor_rank: int, stage: int) -> Iterator[tuple[str, Tensor | None]]:
        is_last = stage == self._options.pipeline_parallel - 1
        for name in parameter_shapes(self._config):
            layer = layer_of(name)
            if self._stage_of(name, layer) == stage:
                local = in_layer(name, (layer or 0) % self._layers_per_stage)
                yield core_name(local, self._options.transformer_impl), self._piece(name, tensor_rank)
        if is_last and stage > 0 and not self._config.untie_embeddings_and_output_weights:
            yield OUTPUT_WEIGHT, self._piece(WORD_TABLE, tensor_rank)
        for name in extra_states(range(self._layers_per_stage)):
            yield name, None
        if is_last:
            yield "output_layer._extra_state", None

    def _stage_of(self, name: str, layer: int | None) -> int:
        if layer is not None:
            return layer // self._layers_per_stage
        return 0 if name.startswith("embedding.") else self._options.pipeline_parallel - 1

    def _piece(self, name: str, tensor_rank: int) -> Tensor:
        parts = self._options.tensor_parallel
        if name in _VOCABULARY_TABLES:
            table = fit_rows(self._source.read_full(WEIGHT, name), self.padded_vocab_size)
            piece = table.chunk(parts)[tensor_rank]
        else:
            record = self._source.manifest.parameters[name]
            shape = list(record.shape)
            if record.cut_dim is not None:
                shape[record.cut_dim] //= parts
            piece = self._source.read(WEIGHT, name, tp_index=tensor_rank if record.cut_dim is not None else 0,
                                      tp_count=parts if record.cut_dim is not None else 1).view(shape)
        return piece.to(DTYPES[self._options.dtype]).clone()


def _problems(config: ModelConfig, options: MegatronExportOptions) -> Iterator[Problem]:
    yield from inexpressible(config)
    tensor, stages = options.tensor_parallel, options.pipeline_parallel
    for flag, size, name, whole in (
        ("--tensor-model-parallel-size", tensor, "attention heads", config.num_attention_heads),
        ("--tensor-model-parallel-size", tensor, "columns of the feed-forward layer", config.ffn_size),
        ("--pipeline-model-parallel-size", stages, "layers", config.num_layers),
    ):
        if size < 1 or whole % size:
            yield Problem(flag, size, f"does not divide the {whole} {name}", f"use a size that divides {whole}")
