"""How a run is cut over processes; the data-parallel size is what is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bert_ds.config.model import ModelConfig
from bert_ds.errors import Problem


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the process grid."""

    tensor_model_parallel_size: int = 1
    """Ranks that share every layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Stages, each with consecutive layers."""

    stage_layers: str | None = None
    """Transformer layers of each pipeline stage, first to last, as in 7,6,6,5; None balances the stages by cost."""
    sequence_parallel: bool = False
    """Cut the tokens between the matrices over the tensor-parallel ranks: less memory, the same communication."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def layers_by_hand(self) -> tuple[int, ...] | None:
        """`stage_layers` as numbers; call `problems` first."""
        return None if self.stage_layers is None else tuple(map(int, self.stage_layers.split(",")))

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model among `world_size` ranks; call `problems` first."""
        return world_size // self.model_parallel_size

    def problems(self, model: ModelConfig, world_size: int) -> Iterator[Problem]:
        """Everything that keeps `model` from being cut this way over `world_size` ranks."""
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            if getattr(self, name) < 1:
                yield Problem(f"parallel.{name}", getattr(self, name), "must be at least 1", "give a positive number")
                return
        if world_size % (tp * pp):
            yield Problem("parallel", f"tensor {tp} x pipeline {pp} = {tp * pp}",
                          f"does not divide the world size {world_size}",
                          f"start a multiple of {tp * pp} ranks, or choose sizes whose product divides {world_size}")
        if model.num_attention_heads % tp:
            yield Problem("parallel.tensor_model_parallel_size", tp,
                          f"does not divide model.num_attention_heads={model.num_attention_heads}",
                          f"use a tensor_model_parallel_size that divides {model.num_attention_heads}")
        elif model.ffn_size % tp or model.padded_vocab_size % tp:
            yield Problem("parallel.tensor_model_parallel_size", tp,
                          f"does not divide the feed-forward width {model.ffn_size} and the padded vocabulary "
                          f"{model.padded_vocab_size}", "use a tensor_model_parallel_size that divides both")
        yield from self._stage_problems(model)
        if pp > model.num_layers:
            yield Problem("parallel.pipeline_model_parallel_size", pp,
                          f"leaves stages without a layer: the model has {model.num_layers}",
                          f"use at most {model.num_layers} stages")

    def _stage_problems(self, model: ModelConfig) -> Iterator[Problem]:
        if self.stage_layers is None:
            return
        parts, stages = self.stage_layers.split(","), self.pipeline_model_parallel_size
        counts = [int(part) for part in parts if part.strip().isdigit()]
        if len(counts) < len(parts) or 0 in counts:
            yield Problem("parallel.stage_layers", self.stage_layers, "is no list of positive numbers",
                          "write one number a stage, as in 7,6,6,5")
        elif len(counts) != stages or sum(counts) != model.num_layers:
            yield Problem("parallel.stage_layers", self.stage_layers,
                          f"gives {sum(counts)} layers to {len(counts)} stages, not {model.num_layers} to {stages}",
                          f"write {stages} numbers that sum to {model.num_layers}")
