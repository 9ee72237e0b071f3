"""One run: all sections together, checked as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bert_ds.config.data import DataConfig
from bert_ds.config.engine import EngineConfig
from bert_ds.config.model import ModelConfig
from bert_ds.config.output import OutputConfig
from bert_ds.config.parallel import ParallelConfig
from bert_ds.config.schedule import ScheduleConfig
from bert_ds.errors import ConfigError, Problem, raise_if_any


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run is made of; nothing is looked up elsewhere."""

    name: str
    """Name of the recipe."""
    model: ModelConfig
    parallel: ParallelConfig
    data: DataConfig
    schedule: ScheduleConfig
    engine: EngineConfig
    output: OutputConfig

    @property
    def recompute_interval(self) -> int:
        """The k of `model.recompute_method`; 0 where no whole layers are recomputed."""
        whole_layers = self.model.recompute_granularity == "full"
        return self.engine.activation_checkpoint_interval or int(whole_layers)

    def validate(self, world_size: int) -> None:
        """Raises ConfigError with all problems of this run on `world_size` ranks."""
        raise_if_any(ConfigError, self.problems(world_size))

    def problems(self, world_size: int) -> Iterator[Problem]:
        """All problems of this run on `world_size` ranks."""
        yield from self.model.problems()
        yield from self.data.problems()
        yield from self.schedule.problems(self.engine.lr)
        yield from self.output.problems()
        layout = list(self.parallel.problems(self.model, world_size))
        yield from layout
        yield from self._accumulation_problems()
        yield from self._recompute_problems()
        if self.parallel.pipeline_model_parallel_size > 1:
            yield from self._pipeline_problems()
        if layout:
            yield from self.engine.layout_free_problems()
        else:
            yield from self.engine.problems(self.parallel.data_parallel_size(world_size))
            yield from self._sequence_problems()

    def _sequence_problems(self) -> Iterator[Problem]:
        tokens, tensor = self.engine.micro_batch_size * self.model.seq_length, self.parallel.tensor_model_parallel_size
        if self.parallel.sequence_parallel and tokens % tensor:
            yield Problem("parallel.sequence_parallel", True,
                          f"cannot cut the {tokens} tokens of a micro-batch over {tensor} tensor-parallel ranks",
                          f"choose micro batch and seq_length so that their product is a multiple of {tensor}")

    def _recompute_problems(self) -> Iterator[Problem]:
        interval = self.engine.activation_checkpoint_interval
        if self.model.recompute_granularity == "selective" and interval:
            yield Problem("model.recompute_granularity", "selective",
                          f"contradicts pipeline.activation_checkpoint_interval={interval}, which recomputes whole layers",
                          "set the interval to 0, or recompute_granularity to full")
        if self.model.recompute_method == "block" and not self.recompute_interval:
            yield Problem("model.recompute_method", "block", "says which whole layers to recompute, and none are",
                          "set recompute_granularity to full, or leave recompute_method out")

    def _accumulation_problems(self) -> Iterator[Problem]:
        summed = self.parallel.pipeline_model_parallel_size > 1 or self.parallel.sequence_parallel
        if self.engine.precision == "fp16" and self.engine.accumulation_dtype == "fp32" and summed:
            yield Problem("data_types.grad_accum_dtype", "fp32",
                          "hides fp16 gradients from the sums over stages and over the shares of a sequence",
                          "leave it out, or train in bf16, which sums in fp32 on every layout")

    def _pipeline_problems(self) -> Iterator[Problem]:
        """Settings that DeepSpeed's pipeline engine would train wrongly with, and silently."""
        engine = self.engine
        if engine.precision == "fp32" and engine.zero_stage == 0 and engine.gradient_clipping > 0:
            yield Problem("zero_optimization.stage", 0, "with fp32 in a pipeline clips by the first stage's norm only",
                          "use stage 1, or switch clipping off")
