"""Evaluation in another shape than training: the same samples, the same losses, and training as if it had not been.

Data that fail, or that a split hardly has, end a run on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from launched import launch, make_data, outputs
from numpy.typing import NDArray
from ranks import run_ranks
from tiny_runs import GLOBAL_BATCH, PREDICTIONS, SEQUENCE, VOCABULARY, Case, EngineRun, run_config
from tolerances import REDUCTION_ORDER

from bert_ds.config.run import RunConfig
from bert_ds.data.samples import UNUSED_LABEL, SampleBatch
from bert_ds.errors import DataError, UserError

EVAL_ITERS = 2


@dataclass
class MadeUpSamples:
    """Sample i is drawn from the seed i; rows hold what `seq_length` leaves of it."""

    seq_length: int
    broken: int = -1
    """A sample that cannot be read."""
    read: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return EVAL_ITERS * GLOBAL_BATCH

    def build_batch(self, indices: NDArray[np.int64]) -> SampleBatch:
        if self.broken in indices:
            raise DataError.of("--data-path", "made up", f"sample {self.broken} is broken", "repair it")
        self.read.update(indices.tolist())
        batch = SampleBatch.empty(len(indices), self.seq_length, PREDICTIONS)
        for row, index in enumerate(indices.tolist()):
            draw = np.random.default_rng(index)
            tokens = draw.integers(VOCABULARY, size=SEQUENCE)
            length, kept = draw.integers(5, 9), draw.integers(1, 5)
            batch.input_ids[row] = tokens[: self.seq_length]
            batch.token_type_ids[row] = np.arange(self.seq_length) > 3
            batch.segment_ids[row] = np.arange(self.seq_length) < length
            batch.masked_positions[row] = np.arange(PREDICTIONS) % 5
            batch.masked_labels[row] = np.where(np.arange(PREDICTIONS) < kept, tokens[:PREDICTIONS], UNUSED_LABEL)
            batch.sentence_order_labels[row] = index % 2
        return batch


@dataclass(frozen=True)
class Shape:
    """Micro-batch and row length of an evaluation; None is that of training."""

    micro_batch_size: int | None = None
    seq_length: int | None = None


def of_shape(run: RunConfig, shape: Shape) -> RunConfig:
    return replace(run, schedule=replace(run.schedule, eval_interval=1, eval_iters=EVAL_ITERS,
                                         eval_micro_batch_size=shape.micro_batch_size,
                                         eval_seq_length=shape.seq_length))


Found = tuple[list[dict[str, float | None]], list[object], list[bytes], bool]


def train_with_evaluations(case: Case, shapes: list[Shape]) -> Found:
    """Two steps, one evaluation of each shape, two steps.

    Returns the losses of the evaluations, those of the steps, the bits of the final weights, and whether each
    evaluation read the same samples.
    """
    from bert_ds.training.evaluate import evaluate  # noqa: PLC0415

    run = EngineRun(case)
    steps = [run.steps(2)]
    losses, samples = [], []
    for shape in shapes:
        shaped = of_shape(run.run, shape)
        shaped.validate(run.ctx.world_size)
        dataset = MadeUpSamples(shaped.eval_seq_length)
        losses.append(evaluate(shaped, run.ctx, run.engine, run.sums, dataset).__dict__)
        samples.append(dataset.read)
    steps.append(run.steps(2))
    weights = [local.parameter.detach().numpy().tobytes() for local in run.pipeline.local_parameters()]
    run.close()
    expected = set(range(EVAL_ITERS * GLOBAL_BATCH)) if run.ctx.reads_data else set()
    return losses, steps, weights, all(read == expected for read in samples)


SHAPES = [Shape(), Shape(micro_batch_size=4), Shape(micro_batch_size=1), Shape(seq_length=10),
          Shape(micro_batch_size=4, seq_length=10)]


def runs_of_cases(cases: list[Case]) -> list[tuple[Found, Found]]:
    """Each case with and without evaluations."""
    return [(train_with_evaluations(case, SHAPES), train_with_evaluations(case, [])) for case in cases]


@pytest.mark.proves("evaluation in any shape: its losses / training afterwards", "REDUCTION_ORDER", "EXACT")
def test_any_shape_gives_the_same_losses_and_leaves_training_as_it_was() -> None:
    stages = {1: [Case(dropout=0.1, backend="local")],
              2: [Case(pp=2, dropout=0.1, backend="local"), Case(pp=2, dropout=0.1, backend="local",
                                                                 schedule="dualpipev")]}
    of_one_stage = None
    for world_size, cases in stages.items():
        for ranks in run_ranks(runs_of_cases, world_size, cases):
            for case, (evaluated, plain) in zip(cases, ranks, strict=True):
                losses, steps, weights, same_samples = evaluated
                assert same_samples, case
                assert steps == plain[1], case
                assert weights == plain[2], case
                of_one_stage = of_one_stage or losses
                # Positions that rows are cut to are read by no loss: the length changes nothing but padding.
                for shape, found in zip(SHAPES, losses, strict=True):
                    close(found, of_one_stage[0], f"{case} {shape}")


def close(found: dict[str, float | None], wanted: dict[str, float | None], what: str) -> None:
    torch.testing.assert_close(torch.tensor(list(found.values())), torch.tensor(list(wanted.values())),
                               **REDUCTION_ORDER, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize(("shape", "told"), [
    (Shape(micro_batch_size=3), "does not divide the 16 rows of a global batch that each data-parallel rank evaluates. "
                                "Fix: use 2"),
    (Shape(micro_batch_size=0), "does not divide"),
    (Shape(seq_length=SEQUENCE + 1), "is not between 8 and model.max_position_embeddings=16. Fix: use at most 16"),
    (Shape(seq_length=7), "is not between 8 and")])
def test_shapes_that_do_not_fit(shape: Shape, told: str) -> None:
    (problem,) = of_shape(run_config(Case()), shape).problems(1)
    assert told in str(problem)


class LargestValues:
    """Stands for what layers in FP8 remember: every forward pass adds to it."""

    def __init__(self) -> None:
        self.passes = torch.zeros(1)

    @contextmanager
    def computing(self) -> Iterator[None]:
        self.passes += 1
        yield

    def state(self) -> dict[str, torch.Tensor]:
        return {"passes": self.passes}

    def restore(self, saved: dict[str, torch.Tensor]) -> None:
        self.passes.copy_(saved["passes"])


def passes_seen(case: Case) -> list[float]:
    """After a step, after an evaluation, and after another step."""
    from bert_ds.training.evaluate import evaluate  # noqa: PLC0415

    run = EngineRun(case)
    run.pipeline.fp8 = LargestValues()
    seen = []
    for act in (lambda: run.steps(1), lambda: evaluate(of_shape(run.run, Shape(1)), run.ctx, run.engine, run.sums,
                                                       MadeUpSamples(SEQUENCE)), lambda: run.steps(1)):
        act()
        seen.append(float(run.pipeline.fp8.passes))
    run.close()
    return seen


def test_what_fp8_layers_have_seen_in_training_is_not_mixed_with_evaluation() -> None:
    assert run_ranks(passes_seen, 1, Case(micro_batch=4)) == [[4.0, 4.0, 8.0]]


def meet_a_broken_sample(case: Case, broken: int) -> str:
    from bert_ds.training.evaluate import evaluate  # noqa: PLC0415

    run = EngineRun(case)
    try:
        evaluate(of_shape(run.run, Shape()), run.ctx, run.engine, run.sums, MadeUpSamples(SEQUENCE, broken))
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.close()
    return "went on"


@pytest.mark.parametrize(("case", "reader"), [
    (Case(pp=2, schedule="dualpipev"), 0), (Case(micro_batch=2), 1)], ids=["dualpipev", "data parallel"])
def test_data_that_fail_on_one_rank_end_the_run_on_all(case: Case, reader: int) -> None:
    # The second rank of two data-parallel ones reads samples 2 and 3 of every four.
    told = run_ranks(meet_a_broken_sample, 2, case, GLOBAL_BATCH + 3)
    assert told[reader].startswith("DataError: ") and "sample 19 is broken" in told[reader]
    assert told[1 - reader].startswith("PeerError: ") and "another rank could not read its part" in told[1 - reader]


@pytest.mark.long
def test_a_split_is_read_again_and_again_and_broken_data_end_with_one_message(tmp_path: Path) -> None:
    """Validation has a single document and wants 32 samples of it; a token in the middle of training is unknown."""
    data = make_data(tmp_path)
    tokens = np.memmap(f"{data[1]}.bin", dtype=np.uint16, mode="r+")
    tokens[200] = 60000
    tokens.flush()
    done = launch(2, [*data[:5], "98,1,1", *outputs(tmp_path), "--train-iters", "100", "--eval-interval", "100",
                      "--pipeline-model-parallel-size", "2", "--pipeline-schedule", "dualpipev",
                      "--eval-micro-batch-size", "4"], tmp_path)
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert "validation loss at iteration 0" in text
    assert "Traceback" not in text
    assert text.count("error: ") == 1, text
    assert "holds the token id 60000" in text


@pytest.mark.long
def test_a_split_without_documents_is_refused_on_all_ranks(tmp_path: Path) -> None:
    done = launch(2, [*make_data(tmp_path)[:5], "1000,1,0", *outputs(tmp_path), "--train-iters", "4",
                      "--eval-interval", "2", "--pipeline-model-parallel-size", "2"], tmp_path)
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert "Traceback" not in text
    assert text.count("error: ") == 1, text
    assert "leaves none of the 120 documents" in text
