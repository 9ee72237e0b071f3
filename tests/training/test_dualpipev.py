"""DualPipeV: what it asks of a run, which rank holds what, and that checkpoints go from one schedule to the other.

That it trains as one process does is shown where every layout is: test_layout_parity.py, test_precision.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.pipe import schedule
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from tiny_runs import GLOBAL_BATCH, Case, EngineRun, Outcome, run_config, write_vocabulary
from tolerances import REDUCTION_ORDER

from bert_ds.cli.dry_run import dry_run_text
from bert_ds.cli.resolve import resolve_run
from bert_ds.config.memory import predict_memory, stage_parameters
from bert_ds.config.model import ModelConfig
from bert_ds.config.parallel import ParallelConfig
from bert_ds.config.run import RunConfig
from bert_ds.config.stages import dualpipev_stage_layers, head_flops, layer_flops, stage_bounds
from bert_ds.errors import ConfigError
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.batches import TrainingSource


def problems_of(case: Case, world_size: int = 2, **evaluation: int) -> list[str]:
    run = run_config(case)
    scheduled = replace(run.schedule, eval_interval=1, **evaluation)
    return [str(problem) for problem in replace(run, schedule=scheduled).problems(world_size)]


@pytest.mark.parametrize(("case", "evaluation", "told"), [
    (Case(pp=2, micro_batch=8), {}, "needs 4 micro-batches or more on each rank, and train_micro_batch_size_per_gpu=8 "
     "of a global batch of 16 over data-parallel size 1 makes 2. Fix: use a global batch of 32, or a micro batch of at "
     "most 4, or schedule 1f1b"),
    (Case(pp=2), {"eval_micro_batch_size": 8}, "needs 4 micro-batches or more on each rank, and "
     "schedule.eval_micro_batch_size=8 of a global batch of 16"),
    (Case(pp=1), {}, "needs a pipeline of at least 2 ranks. Fix: use 1f1b"),
    (Case(pp=2, layers=3), {}, "the model has 3 layers. Fix: use 1f1b on at most 3"),
    (Case(pp=2, zero=0), {}, "clips by the first stage's norm only"),
], ids=["training", "evaluation", "one rank", "too few layers", "fp32 without ZeRO"])
def test_what_cannot_run_is_told_before_it_starts(case: Case, evaluation: dict[str, int], told: str) -> None:
    found = problems_of(replace(case, schedule="dualpipev"), case.pp, **evaluation)
    assert len(found) == 1 and told in found[0], found


def test_what_fits_has_no_problems() -> None:
    case = Case(pp=2, micro_batch=4, schedule="dualpipev")
    assert problems_of(case, eval_micro_batch_size=2, eval_seq_length=8) == []
    by_hand = replace(run_config(case).parallel, stage_layers="2,1,1,1")
    assert list(by_hand.problems(run_config(case).model, 2)) == []
    assert stage_bounds(run_config(case).model, by_hand) == ((0, 2), (2, 3), (3, 4), (4, 5))
    (problem,) = replace(by_hand, stage_layers="3,2").problems(run_config(case).model, 2)
    assert "gives 5 layers to 2 stages, not 5 to 4; dualpipev has two stages a pipeline rank" in str(problem)


@given(st.integers(1, 64), st.integers(1, 32), st.sampled_from([64, 256, 1024]))
def test_no_rank_could_be_cheaper_and_no_stage_is_empty(layers: int, ranks: int, hidden: int) -> None:
    model = ModelConfig(num_layers=max(layers, 2 * ranks), hidden_size=hidden, num_attention_heads=1)
    counts = dualpipev_stage_layers(model, ranks)
    assert sum(counts) == model.num_layers and len(counts) == 2 * ranks and min(counts) >= 1
    layer, head = layer_flops(model), head_flops(model)
    costs = [(counts[rank] + counts[-1 - rank]) * layer + head * (rank == 0) for rank in range(ranks)]
    cheapest = min(max(first * layer + head, -(-(model.num_layers - first) // (ranks - 1)) * layer if ranks > 1 else 0)
                   for first in range(2, model.num_layers - 2 * (ranks - 1) + 1))
    assert max(costs) == cheapest or ranks == 1
    assert all(abs(counts[rank] - counts[-1 - rank]) <= 1 for rank in range(1, ranks))


def peaks(ranks: int, micro_batches: int, rank: int) -> list[int]:
    """The most micro-batches that each of a rank's two stages holds for its backward pass, in DeepSpeed's schedule."""
    held, most = [0, 0], [0, 0]
    for step in schedule.DualPipeVSchedule(micro_batches, ranks, rank).steps():
        for instruction in step:
            change = {schedule.ForwardPass: 1, schedule.BackwardPass: -1}.get(type(instruction))
            if change:
                held[instruction.phase] += change
                most[instruction.phase] = max(most[instruction.phase], held[instruction.phase])
    return most


def idle_share(ranks: int, micro_batches: int) -> float:
    """Of DeepSpeed's schedule played through, with a backward pass as long as two forward passes."""
    passes = [[instruction for step in schedule.DualPipeVSchedule(micro_batches, ranks, rank).steps()
               for instruction in step if type(instruction) in (schedule.ForwardPass, schedule.BackwardPass)]
              for rank in range(ranks)]
    last, clock, ended = 2 * ranks - 1, [0] * ranks, {}
    while any(passes):
        for rank, left in enumerate(passes):
            while left:
                forward, phase = type(left[0]) is schedule.ForwardPass, left[0].phase
                micro_batch, stage = left[0].buffer_id % micro_batches, rank if phase == 0 else last - rank
                before = stage - 1 if forward else min(stage + 1, last)
                needed = (forward or stage == last, before, micro_batch)
                if needed not in ended and not (forward and stage == 0):
                    break
                clock[rank] = max(clock[rank], ended.get(needed, 0)) + (1 if forward else 2)
                ended[forward, stage, micro_batch] = clock[rank]
                left.pop(0)
    return 1 - 6 * micro_batches / max(clock)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 7), (4, 16), (8, 16)])
def test_the_idle_share_is_that_of_the_schedule(ranks: int, micro_batches: int) -> None:
    waiting = 4 * ranks - 5
    assert idle_share(ranks, micro_batches) == pytest.approx(waiting / (6 * micro_batches + waiting))
    told = dry_run_text(resolve_run(
        ["--recipe", "340m", "--pipeline-model-parallel-size", str(ranks), "--pipeline-schedule", "dualpipev",
         "--micro-batch-size", "1", "--global-batch-size", str(micro_batches), "--dry-run", "--world-size", str(ranks)],
        world_size=1))
    assert f"with {micro_batches} micro-batches: {idle_share(ranks, micro_batches):.0%} of the time idle" in told


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_predicted_memory_counts_the_micro_batches_that_the_schedule_holds(ranks: int) -> None:
    run = resolve_run(["--recipe", "340m", "--pipeline-model-parallel-size", str(ranks), "--pipeline-schedule",
                       "dualpipev", "--num-layers", str(2 * ranks), "--micro-batch-size", "1", "--global-batch-size",
                       str(4 * ranks), "--dry-run", "--world-size", str(ranks)], world_size=1).config
    memory = predict_memory(run, ranks)
    layer = predict_memory(replace(run, parallel=ParallelConfig()), 1)[0].activations // run.model.num_layers
    for rank, of_rank in enumerate(memory):
        assert of_rank.stages == (rank, 2 * ranks - 1 - rank)
        assert of_rank.activations == sum(peaks(ranks, 4 * ranks, rank)) * layer
    assert sum(of_rank.parameters for of_rank in memory) == run.model.num_parameters
    assert sum(stage_parameters(run, stage) for stage in range(2 * ranks)) == run.model.num_parameters
    assert [of_rank.logits > 0 for of_rank in memory] == [True] + [False] * (ranks - 1)


def test_the_dry_run_shows_both_stages_of_a_rank() -> None:
    told = dry_run_text(resolve_run(
        ["--recipe", "340m", "--pipeline-model-parallel-size", "4", "--num-layers-per-virtual-pipeline-stage", "3",
         "--eval-micro-batch-size", "2", "--dry-run", "--world-size", "4"], world_size=1))
    for expected in ("pipeline rank 0: stage 0: embeddings, layers 0-2; stage 7: layers 21-23, heads",
                     "pipeline rank 3: stage 3: layers 9-11; stage 4: layers 12-14",
                     "pipeline of 8 stages on 4 ranks with 8 micro-batches: 19% of the time idle",
                     "micro batch 2 x data parallel 1 x accumulation 16, rows of 512 tokens", "\n  0, 7   "):
        assert expected in told, expected


def resolved(*flags: str) -> RunConfig:
    return resolve_run(["--recipe", "340m", "--pipeline-model-parallel-size", "4", *flags, "--dry-run", "--world-size",
                        "4"], world_size=1).config


def test_megatrons_virtual_stages() -> None:
    layers, stages = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    assert resolved(layers, "3").parallel.is_dualpipev and resolved(stages, "2").parallel.is_dualpipev
    assert not resolved(layers, "6").parallel.is_dualpipev and not resolved(stages, "1").parallel.is_dualpipev
    for flags, told in (
        ((layers, "2"), f"{layers}=2: does not cut 24 layers into two stages for each of 4 pipeline ranks: DualPipeV "
                        "gives each rank two, and no schedule gives it more. Fix: give 3"),
        ((layers, "2", "--num-layers", "26"), "Fix: give --pipeline-schedule dualpipev, which balances uneven stages"),
        ((layers, "3", "--pipeline-schedule", "1f1b"), "means dualpipev and contradicts --pipeline-schedule 1f1b"),
        ((stages, "3"), f"{stages}=3: is not 1, or 2 as DualPipeV gives"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolved(*flags)
        assert told in str(caught.value)


class NoSamples:
    """A dataset that is not to be read."""

    def __len__(self) -> int:
        return GLOBAL_BATCH

    def build_batch(self, indices: object) -> None:
        raise AssertionError("read")


@pytest.mark.parametrize(("dualpipev", "readers"), [(False, [0, 3]), (True, [0])])
def test_the_loader_runs_only_where_it_is_read(dualpipev: bool, readers: list[int],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr("bert_ds.training.batches.WindowLoader", lambda *_, **__: started.append(rank) or iter(()))
    for rank in range(4):
        ctx = ParallelContext(pp_size=4, pp_rank=rank, dualpipev=dualpipev)
        TrainingSource(run_config(Case(pp=4, layers=9)), ctx, NoSamples(), 0, 1)
        assert ctx.reads_data == (rank in readers)
        assert (ctx.rank == ctx.last_stage_rank) == ctx.is_last_stage == (rank == readers[-1])
    assert started == readers


THERE_AND_BACK = [Case(pp=2, micro_batch=4), Case(pp=2, micro_batch=2, schedule="dualpipev"), Case(pp=2, micro_batch=1)]


def hand_over(cases: list[Case], root: str, vocab_file: str) -> tuple[list[Outcome], Outcome]:
    """Two steps of each case, each going on from the one before; and the same steps of the first case alone."""
    outcomes = []
    for index, case in enumerate(cases):
        run = EngineRun(case, Path(root) / "one after the other")
        if index:
            run.load(Path(vocab_file))
        outcomes.append(run.steps(2))
        run.save(Path(vocab_file))
        run.close()
    alone = EngineRun(cases[0])
    straight = alone.steps(2 * len(cases))
    alone.close()
    return outcomes, straight


@pytest.mark.proves("checkpoints go from one pipeline schedule to the other and back", "EXACT", "REDUCTION_ORDER")
def test_checkpoints_go_from_one_schedule_to_the_other_and_back(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    for outcomes, straight in run_ranks(hand_over, 2, THERE_AND_BACK, str(tmp_path), str(vocab_file)):
        for what in ("losses", "norms"):
            found = torch.tensor([getattr(outcome, what) for outcome in outcomes]).flatten()
            torch.testing.assert_close(found, torch.tensor(getattr(straight, what)), **REDUCTION_ORDER)
