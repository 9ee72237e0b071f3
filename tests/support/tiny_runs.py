"""Tiny runs on made-up batches: through DeepSpeed's engine in any layout, and in plain torch as the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bert_ds.cli.deepspeed_json import engine_json
from bert_ds.config.data import DataConfig
from bert_ds.config.engine import EngineConfig
from bert_ds.config.model import ModelConfig
from bert_ds.config.output import OutputConfig
from bert_ds.config.parallel import ParallelConfig
from bert_ds.config.run import RunConfig
from bert_ds.config.schedule import ScheduleConfig
from bert_ds.model.bert import BertModel, ComputeSettings
from bert_ds.model.dropout import BatchKey
from bert_ds.model.loss import LossSums, PretrainingLoss
from bert_ds.parallel.context import ParallelContext, build_context

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Case:
    """One way to run the same training."""

    tp: int = 1
    pp: int = 1
    micro_batch: int = 2
    zero: int = 1
    precision: str = "fp32"
    recompute: int = 0
    clipping: float = 1.0
    normalization: str = "global_batch"
    binary_head: bool = True
    norm: str = "pre"
    dropout: float = 0.0
    backend: str = "unfused"
    steps: int = 3
    loss_scale: float = 0.0
    sequence_parallel: bool = False
    packed: bool = False
    compile: bool = False
    schedule: str = "1f1b"
    layers: int = 5
    model: dict[str, Any] = field(default_factory=dict)
    """Other settings of the model."""


ADAM_EPS = 1e-3
"""Large, so that an update is a smooth function of the gradient: the bias of the keys has a gradient of exactly 0 in
exact arithmetic, and g / (|g| + 1e-8) would make a whole step of its rounding."""
GLOBAL_BATCH, SEQUENCE, PREDICTIONS, VOCABULARY, SEQUENCES_OF_PACKED = 16, 16, 8, 100, 3


def run_config(case: Case, save: str | None = None) -> RunConfig:
    """The run of a case: 5 layers, unless it says otherwise, so that no pipeline cuts them evenly."""
    return RunConfig(
        name="test",
        model=ModelConfig(
            num_layers=case.layers, hidden_size=32, num_attention_heads=8, seq_length=SEQUENCE,
            max_position_embeddings=SEQUENCE, vocab_size=VOCABULARY, make_vocab_size_divisible_by=32,
            hidden_dropout=case.dropout, attention_dropout=case.dropout, norm_placement=case.norm,
            binary_head=case.binary_head, attention_backend=case.backend, compile=case.compile, **case.model),
        parallel=ParallelConfig(tensor_model_parallel_size=case.tp, pipeline_model_parallel_size=case.pp,
                                pipeline_schedule=case.schedule, sequence_parallel=case.sequence_parallel),
        data=DataConfig(pack_sequences=case.packed, max_sequences_per_row=SEQUENCES_OF_PACKED),
        schedule=ScheduleConfig(train_iters=100, seed=7, loss_normalization=case.normalization),
        engine=EngineConfig(
            micro_batch_size=case.micro_batch, global_batch_size=GLOBAL_BATCH, precision=case.precision,
            zero_stage=case.zero, gradient_clipping=case.clipping, lr=1e-2, eps=ADAM_EPS, weight_decay=0.1,
            activation_checkpoint_interval=case.recompute),
        output=OutputConfig(save=save, load=save))


@dataclass(frozen=True)
class Batch:
    """A global batch of made-up rows, some of them short."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    labels: tuple[Tensor, Tensor]

    @classmethod
    def draw(cls, step: int, case: Case) -> Batch:
        generator = torch.Generator().manual_seed(step)

        def integers(high: int, *shape: int) -> Tensor:
            return torch.randint(high, shape, generator=generator)

        lengths = SEQUENCE - integers(6, GLOBAL_BATCH, 1)
        places, sequences = torch.arange(SEQUENCE), SEQUENCES_OF_PACKED if case.packed else 1
        segments = (places < lengths).int()
        if case.packed:
            starts = (3 + integers(4, GLOBAL_BATCH, 1), 8 + integers(6, GLOBAL_BATCH, 1))
            segments = segments * (1 + sum((places >= start).int() for start in starts))
        masked = integers(VOCABULARY, GLOBAL_BATCH, PREDICTIONS)
        kept = 1 + integers(PREDICTIONS, GLOBAL_BATCH, 1)
        masked = masked.masked_fill(torch.arange(PREDICTIONS) >= kept, -100)
        order = integers(2, GLOBAL_BATCH, sequences).masked_fill(
            (torch.arange(sequences) >= segments.max(dim=1, keepdim=True).values) | (not case.binary_head), -100)
        return cls((integers(VOCABULARY, GLOBAL_BATCH, SEQUENCE), integers(2, GLOBAL_BATCH, SEQUENCE), segments,
                    integers(SEQUENCE - 6, GLOBAL_BATCH, PREDICTIONS)), (masked, order))

    @property
    def denominators(self) -> Tensor:
        return torch.tensor([float((label != -100).sum()) for label in self.labels])

    def rows(self, rows: slice) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return tuple(x[rows] for x in self.inputs), (*(x[rows] for x in self.labels), self.denominators)

    def micro_batches(self, size: int, dp_rank: int, dp_size: int) -> Iterator[Any]:
        """This rank's micro-batches, in Megatron's order."""
        for start in range(dp_rank * size, GLOBAL_BATCH, size * dp_size):
            yield self.rows(slice(start, start + size))


@dataclass(frozen=True)
class Outcome:
    """What a run of a few steps came to; equal for every layout."""

    losses: list[float]
    norms: list[float]
    sums: list[list[float]]

    def then(self, later: Outcome) -> Outcome:
        """Both outcomes, one after the other."""
        return Outcome(self.losses + later.losses, self.norms + later.norms, self.sums + later.sums)


def reference(case: Case) -> tuple[Outcome, dict[str, dict[str, Tensor]]]:
    """The same training in plain torch, one process, no DeepSpeed: outcome and weight, exp_avg, exp_avg_sq by name."""
    run, ctx = run_config(case), ParallelContext.single_process()
    model = BertModel(run.model, ctx, ComputeSettings(rows=run.data.row_kind,
                                                      sequences_per_row=run.data.sequences_per_row))
    model.initialize(run.schedule.seed)
    sums = LossSums(ctx.device)
    chunks = GLOBAL_BATCH // case.micro_batch
    loss_of = PretrainingLoss(run.model, ctx, sums, chunks, per_micro_batch=case.normalization == "micro_batch")
    named = dict(model.named_logical_parameters())
    decayed = [p for name, p in named.items() if p.dim() > 1 and not name.endswith("bias")]
    kept = [p for name, p in named.items() if p.dim() == 1 or name.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}],
                                  lr=1e-2, eps=ADAM_EPS)
    outcome = Outcome([], [], [])
    for step in range(case.steps):
        batch, total = Batch.draw(step, case), 0.0
        optimizer.zero_grad()
        for index, (inputs, labels) in enumerate(batch.micro_batches(case.micro_batch, 0, 1)):
            key = BatchKey(run.schedule.seed, step, index * case.micro_batch) if case.dropout else None
            loss = loss_of(model(inputs, key), labels) / chunks
            loss.backward()
            total += float(loss.detach())
        limit = case.clipping or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(named.values(), limit)
        optimizer.step()
        outcome.losses.append(total)
        outcome.norms.append(float(norm))
        outcome.sums.append(sums.take().tolist())
    tensors = {name: {"weight": p.detach(), **{key: optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")}}
               for name, p in named.items()}
    return outcome, tensors


class EngineRun:
    """A case through DeepSpeed's engine on this rank; the process group has to be initialised."""

    started = 0

    def __init__(
        self, case: Case, folder: Path | None = None, *, device: torch.device = torch.device("cpu"), **model: Any
    ) -> None:
        """`model` changes settings of the case's model."""
        from bert_ds.training.coordination import Coordinator  # noqa: PLC0415
        from bert_ds.training.engine import build_engine, build_pipeline  # noqa: PLC0415
        from bert_ds.training.state import TrainingState  # noqa: PLC0415

        self.case = case
        run = run_config(case, str(folder) if folder else None)
        self.run = replace(run, model=replace(run.model, **model))
        self.ctx = build_context(tp_size=case.tp, pp_size=case.pp, device=device,
                                 timeout=timedelta(seconds=60), sequence_parallel=case.sequence_parallel,
                                 dualpipev=self.run.parallel.is_dualpipev)
        # Runs share one store; each has keys of its own in it.
        EngineRun.started += 1
        store = dist.PrefixStore(f"run {EngineRun.started}", dist.distributed_c10d._get_default_store())
        self.coordinator = Coordinator(self.ctx.rank, self.ctx.world_size, 60.0, store)
        self.sums = LossSums(self.ctx.device)
        self.pipeline = build_pipeline(self.run, self.ctx, self.sums)
        settings = engine_json(self.run, self.ctx.world_size)
        if case.loss_scale:
            settings["fp16"]["loss_scale"] = case.loss_scale
        self.engine = build_engine(self.run, self.ctx, self.pipeline, settings)
        self.state = TrainingState()
        self.saves = 0

    def step(self) -> tuple[float, float, list[float]]:
        """One optimizer step: loss, gradient norm, sums."""
        from bert_ds.training.metrics import reduce_sums  # noqa: PLC0415

        self.pipeline.begin_step(self.state.step)
        skips = self.engine.skipped_steps
        loss = self.engine.train_batch(self.micro_batches())
        self.state = self.state.after_step(GLOBAL_BATCH, skipped=self.engine.skipped_steps > skips)
        taken = self.sums.take()
        sums = reduce_sums(torch.cat([taken, taken.new_zeros(2)]), self.ctx)
        return float(loss), float(self.engine.get_global_grad_norm() or 0.0), list(sums.values())[:-2]

    def micro_batches(self) -> Iterator[Any]:
        """This rank's micro-batches of the next step."""
        return Batch.draw(self.state.step, self.case).micro_batches(
            self.case.micro_batch, self.ctx.dp_rank, self.ctx.dp_size)

    def steps(self, count: int) -> Outcome:
        """Several optimizer steps."""
        outcome = Outcome([], [], [])
        for _ in range(count):
            loss, norm, sums = self.step()
            outcome.losses.append(loss)
            outcome.norms.append(norm)
            outcome.sums.append(sums)
        return outcome

    def save(self, vocab_file: Path, folder: Path | None = None, *, save_optim: bool = True) -> None:
        """Saves a checkpoint into `folder`, or into the one given at the start."""
        from bert_ds.training.disks import find_disks  # noqa: PLC0415
        from bert_ds.training.saver import Saver  # noqa: PLC0415

        folder = folder or Path(str(self.run.output.save))
        run = replace(self.run, output=OutputConfig(save=str(folder), save_optim=save_optim))
        self.saves += 1
        ranks = self.coordinator.beside(f"save {self.saves}")
        with Saver(_with_vocabulary(run, vocab_file), self.ctx, ranks, self.engine, vocabulary(),
                   find_disks(folder, ranks)) as saver:
            saver.save(self.state, {})
            saver.finish()

    def load(self, vocab_file: Path, **settings: bool) -> None:
        """Goes on from the newest checkpoint in the folder given at the start, or as settings of `output` say."""
        from bert_ds.training.resume import find_starting_point, load_checkpoint  # noqa: PLC0415

        output = OutputConfig(load=self.run.output.load, **settings)
        run = _with_vocabulary(replace(self.run, output=output), vocab_file)
        start = find_starting_point(run, self.ctx, self.coordinator, vocabulary())
        assert start is not None
        self.state = load_checkpoint(start, self.ctx, self.coordinator, self.engine)

    def close(self) -> None:
        """Takes DeepSpeed's hooks off; rank 0, which keeps the store, leaves last."""
        self.engine.destroy()
        self.coordinator.leave("the end of the case")


def _with_vocabulary(run: RunConfig, vocab_file: Path) -> RunConfig:
    return replace(run, data=replace(run.data, vocab_file=str(vocab_file)))


def vocabulary() -> Any:
    """What checkpoints need to know of a vocabulary."""
    import hashlib  # noqa: PLC0415

    text = vocabulary_text()
    return SimpleNamespace(tokens=tuple(text.splitlines()), sha256=hashlib.sha256(text.encode()).hexdigest())


def vocabulary_text() -> str:
    """A vocabulary of VOCABULARY entries."""
    return "".join(f"{token}\n" for token in [*SPECIALS, *(f"w{i}" for i in range(VOCABULARY - len(SPECIALS)))])


def write_vocabulary(path: Path) -> Path:
    path.write_text(vocabulary_text())
    return path


def allow_fp16_on_cpu() -> None:
    """Lets DeepSpeed's fp16 code run on a CPU that says it cannot: scaler, overflow and skipped steps are real."""
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415

    get_accelerator().is_fp16_supported = lambda: True


def losses_of(cases: list[Case]) -> list[list[float]]:
    """The losses of each case's steps, one case after another; to be run on every rank."""
    allow_fp16_on_cpu()
    results = []
    for case in cases:
        run = EngineRun(case)
        results.append(run.steps(case.steps).losses)
        run.close()
    return results
