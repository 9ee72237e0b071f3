"""How a run is cut over processes; the data-parallel size is what is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bert_ds.config.model import ModelConfig
from bert_ds.errors import Problem

PIPELINE_SCHEDULES = ("1f1b", "dualpipev")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the process grid."""

    tensor_model_parallel_size: int = 1
    """Ranks that share every layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers: each holds one stage of consecutive layers, or two under dualpipev."""
    pipeline_schedule: Literal["1f1b", "dualpipev"] = "1f1b"
    """1f1b: each pipeline rank holds one stage. dualpipev: two, one on the way out and one on the way back, so that
    less time is idle and the first rank holds both embeddings and loss; wants an accumulation of at least twice the
    pipeline size."""

    stage_layers: str | None = None
    """Transformer layers of each pipeline stage, first to last, as in 7,6,6,5; None balances the ranks by cost."""
    sequence_parallel: bool = False
    """Cut the tokens between the matrices over the tensor-parallel ranks: less memory, the same communication."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def is_dualpipev(self) -> bool:
        return self.pipeline_schedule == "dualpipev"

    @property
    def num_stages(self) -> int:
        """Pieces that the layers are cut into."""
        return self.pipeline_model_parallel_size * (2 if self.is_dualpipev else 1)

    @property
    def least_accumulation(self) -> int:
        """Micro-batches without which the schedule cannot run, in training as in evaluation."""
        return self.num_stages if self.is_dualpipev else 1

    @property
    def layers_by_hand(self) -> tuple[int, ...] | None:
        """`stage_layers` as numbers; call `problems` first."""
        return None if self.stage_layers is None else tuple(map(int, self.stage_layers.split(",")))

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Stages that a pipeline rank holds: its own, and under dualpipev the one as far from the end."""
        return (pp_rank, self.num_stages - 1 - pp_rank) if self.is_dualpipev else (pp_rank,)

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
        if self.pipeline_schedule not in PIPELINE_SCHEDULES:
            yield Problem("parallel.pipeline_schedule", self.pipeline_schedule, "is not a known choice",
                          f"use one of {', '.join(PIPELINE_SCHEDULES)}")
            return
        yield from self._stage_problems(model)
        yield from self._written_stage_problems(model)

    def _stage_problems(self, model: ModelConfig) -> Iterator[Problem]:
        layers, pp = model.num_layers, self.pipeline_model_parallel_size
        if self.is_dualpipev and pp == 1:
            yield Problem("parallel.pipeline_schedule", "dualpipev", "needs a pipeline of at least 2 ranks",
                          "use 1f1b, or a larger pipeline_model_parallel_size")
        elif self.is_dualpipev and self.num_stages > layers:
            fewer = f"at most {layers // 2} pipeline ranks, or " if layers // 2 > 1 else ""
            yield Problem("parallel.pipeline_schedule", "dualpipev",
                          f"leaves stages without a layer: {pp} ranks hold 2 each and the model has {layers} layers",
                          f"use {fewer}1f1b on at most {layers}")
        elif pp > layers:
            yield Problem("parallel.pipeline_model_parallel_size", pp,
                          f"leaves stages without a layer: the model has {layers}", f"use at most {layers} stages")

    def _written_stage_problems(self, model: ModelConfig) -> Iterator[Problem]:
        if self.stage_layers is None:
            return
        parts, stages = self.stage_layers.split(","), self.num_stages
        counts = [int(part) for part in parts if part.strip().isdigit()]
        if len(counts) < len(parts) or 0 in counts:
            yield Problem("parallel.stage_layers", self.stage_layers, "is no list of positive numbers",
                          "write one number a stage, as in 7,6,6,5")
        elif len(counts) != stages or sum(counts) != model.num_layers:
            of_two = "; dualpipev has two stages a pipeline rank" if self.is_dualpipev else ""
            yield Problem("parallel.stage_layers", self.stage_layers,
                          f"gives {sum(counts)} layers to {len(counts)} stages, not {model.num_layers} to {stages}"
                          f"{of_two}", f"write {stages} numbers that sum to {model.num_layers}")
