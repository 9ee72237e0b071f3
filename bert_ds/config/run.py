"""One run: all sections together, checked as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from bert_ds.config.batch_sizes import BatchSizes
from bert_ds.config.data import DataConfig
from bert_ds.config.engine import EngineConfig
from bert_ds.config.fp8 import fp8_problems
from bert_ds.config.guards import GuardConfig
from bert_ds.config.model import SHORTEST_ROW, ModelConfig
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
    guards: GuardConfig = field(default_factory=GuardConfig)

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batches of training; call `problems` first."""
        size, schedule = self.engine.global_batch_size, self.schedule
        if schedule.rampup_batch_size:
            return BatchSizes.ramp(schedule.rampup_batch_size, size)
        if schedule.step_batch_size_schedule:
            return BatchSizes.stepwise(schedule.step_batch_size_schedule, self.model.seq_length)
        return BatchSizes.constant(size)

    @property
    def recompute_interval(self) -> int:
        """The k of `model.recompute_method`; 0 where no whole layers are recomputed."""
        whole_layers = self.model.recompute_granularity == "full"
        return self.engine.activation_checkpoint_interval or int(whole_layers)

    @property
    def eval_micro_batch_size(self) -> int:
        """Rows in one forward pass of one rank in evaluation."""
        own = self.schedule.eval_micro_batch_size
        return self.engine.micro_batch_size if own is None else own

    @property
    def eval_seq_length(self) -> int:
        """Tokens in a row of validation and test data."""
        own = self.schedule.eval_seq_length
        return self.model.seq_length if own is None else own

    def eval_accumulation(self, data_parallel_size: int) -> int:
        """Micro-batches of one rank in one global batch of an evaluation; call `problems` first."""
        return self.engine.global_batch_size // (self.eval_micro_batch_size * data_parallel_size)

    def validate(self, world_size: int) -> None:
        """Raises ConfigError with all problems of this run on `world_size` ranks."""
        raise_if_any(ConfigError, self.problems(world_size))

    def problems(self, world_size: int) -> Iterator[Problem]:
        """All problems of this run on `world_size` ranks."""
        yield from self.model.problems()
        yield from self.data.problems()
        if self.schedule.eval_interval is not None:
            yield from self.data.evaluation_problems()
        yield from self.schedule.problems(self.engine.lr)
        yield from self.output.problems()
        yield from self.guards.problems(
            saves=None not in (self.output.save, self.output.save_interval) and self.output.save_optim)
        if self.output.export_hf_interval is not None:
            yield from self.model.export_problems()
        if self.output.save_deepspeed is not None:
            yield from self._deepspeed_problems()
        layout = list(self.parallel.problems(self.model, world_size))
        yield from layout
        yield from self._accumulation_problems()
        yield from self._recompute_problems()
        if self.parallel.pipeline_model_parallel_size > 1:
            yield from self._pipeline_problems()
        if layout:
            yield from self.engine.layout_free_problems()
            return
        copies = self.parallel.data_parallel_size(world_size)
        yield from self.engine.problems(copies)
        micro, total = self.engine.micro_batch_size, self.engine.global_batch_size
        if micro >= 1 and total >= 1 and total % (micro * copies) == 0:
            yield from self._shape_problems("train_micro_batch_size_per_gpu", micro, self.model.seq_length, copies)
            yield from self._batch_size_problems(copies)
            if self.schedule.eval_interval is not None:
                yield from self._evaluation_problems(copies)
        yield from fp8_problems(self.model, self.parallel, self.engine, self._tokens_of_micro_batches())

    def _batch_size_problems(self, copies: int) -> Iterator[Problem]:
        """What is wrong with a global batch that grows, `copies` being the data-parallel size."""
        ramp, steps = self.schedule.rampup_batch_size, self.schedule.step_batch_size_schedule
        if not ramp and not steps:
            return
        name = "rampup_batch_size" if ramp else "step_batch_size_schedule"
        given = " ".join(ramp or steps)
        if ramp and steps:
            yield Problem("schedule.rampup_batch_size", given, "contradicts schedule.step_batch_size_schedule",
                          "give one of the two")
            return
        try:
            sizes = self.batch_sizes.sizes
        except ValueError as error:
            yield Problem(f"schedule.{name}", given, str(error), "see --help")
            return
        unit = self.engine.micro_batch_size * copies
        if sizes[-1] != self.engine.global_batch_size:
            yield Problem(f"schedule.{name}", given, "does not end with the global batch "
                          f"{self.engine.global_batch_size}", "make the two equal")
        if odd := [size for size in sizes if size % unit]:
            yield Problem(f"schedule.{name}", given, f"has global batches of {', '.join(map(str, odd))} rows, which "
                          f"are no multiples of micro batch x data-parallel size = {unit}",
                          f"use multiples of {unit}, or a smaller micro batch")
        elif min(sizes) // unit < self.parallel.least_accumulation:
            yield Problem(f"schedule.{name}", given, f"begins with too few micro-batches for pipeline schedule "
                          f"{self.parallel.pipeline_schedule}, which needs {self.parallel.least_accumulation}",
                          f"begin with {self.parallel.least_accumulation * unit} rows or more, or use schedule 1f1b")

    def _deepspeed_problems(self) -> Iterator[Problem]:
        """Runs whose files DeepSpeed's own converter does not read."""
        if self.engine.zero_stage != 1:
            yield Problem("output.save_deepspeed", self.output.save_deepspeed, "needs ZeRO's files, and "
                          f"zero_optimization.stage is {self.engine.zero_stage}", "use stage 1")
        if self.parallel.is_dualpipev:
            yield Problem("output.save_deepspeed", self.output.save_deepspeed, "does not know the stages of DualPipeV",
                          "use --pipeline-schedule 1f1b for the run that writes it")

    def _tokens_of_micro_batches(self) -> dict[str, int]:
        """In training and, where it is another number, in evaluation, by the settings that decide."""
        training = self.engine.micro_batch_size * self.model.seq_length
        tokens = {"train_micro_batch_size_per_gpu x model.seq_length": training}
        evaluated = self.eval_micro_batch_size * self.eval_seq_length
        if self.schedule.eval_interval is not None and evaluated != training:
            tokens["schedule.eval_micro_batch_size x eval_seq_length"] = evaluated
        return tokens

    def _evaluation_problems(self, copies: int) -> Iterator[Problem]:
        """What is wrong with the shape of evaluation, `copies` being the data-parallel size."""
        if self.schedule.eval_micro_batch_size is None and self.schedule.eval_seq_length is None:
            return
        micro, seq_length = self.eval_micro_batch_size, self.eval_seq_length
        if not SHORTEST_ROW <= seq_length <= self.model.max_position_embeddings:
            yield Problem("schedule.eval_seq_length", seq_length, f"is not between {SHORTEST_ROW} and "
                          f"model.max_position_embeddings={self.model.max_position_embeddings}",
                          f"use at most {self.model.max_position_embeddings}, or leave it out")
        rows = self.engine.global_batch_size // copies
        if micro < 1 or rows % micro:
            nearest = max(size for size in range(1, max(micro, 1) + 1) if rows % size == 0)
            yield Problem("schedule.eval_micro_batch_size", micro,
                          f"does not divide the {rows} rows of a global batch that each data-parallel rank evaluates",
                          f"use {nearest}, or leave it out")
            return
        yield from self._shape_problems("schedule.eval_micro_batch_size", micro, seq_length, copies)

    def _shape_problems(self, name: str, micro_batch_size: int, seq_length: int, copies: int) -> Iterator[Problem]:
        """What the layout asks of micro-batches; `name` is the setting that gives their size."""
        total, least = self.engine.global_batch_size, self.parallel.least_accumulation
        accumulation = total // (micro_batch_size * copies)
        if accumulation < least:
            smaller = total // (least * copies)
            yield Problem("parallel.pipeline_schedule", self.parallel.pipeline_schedule,
                          f"needs {least} micro-batches or more on each rank, and {name}={micro_batch_size} of a "
                          f"global batch of {total} over data-parallel size {copies} makes {accumulation}",
                          f"use a global batch of {least * micro_batch_size * copies}" +
                          (f", or a micro batch of at most {smaller}" if smaller else "") + ", or schedule 1f1b")
        tokens, tensor = micro_batch_size * seq_length, self.parallel.tensor_model_parallel_size
        if self.parallel.sequence_parallel and tokens % tensor:
            yield Problem("parallel.sequence_parallel", True,
                          f"cannot cut the {tokens} tokens of {name}={micro_batch_size} rows of {seq_length} over "
                          f"{tensor} tensor-parallel ranks",
                          f"choose micro batch and sequence length so that their product is a multiple of {tensor}")

    def _recompute_problems(self) -> Iterator[Problem]:
        interval = self.engine.activation_checkpoint_interval
        if self.model.recompute_granularity == "selective" and interval:
            yield Problem("model.recompute_granularity", "selective",
                          f"contradicts pipeline.activation_checkpoint_interval={interval}: that is for whole layers",
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
