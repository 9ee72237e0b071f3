"""A checkpoint goes on in any layout, precision and ZeRO stage, and comes back from there unharmed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny_runs import Case, EngineRun, Outcome, allow_fp16_on_cpu, write_vocabulary
from tolerances import BF16, EXACT, REDUCTION_ORDER

from bert_ds.checkpoint.format import KINDS, WEIGHT
from bert_ds.checkpoint.reader import Checkpoint, find_latest
from bert_ds.errors import CheckpointError
from bert_ds.training.engine import loss_scale
from bert_ds.training.state import TrainingState

EIGHT = Case(tp=2, pp=2)
"""On 8 ranks: tensor 2 x pipeline 2 x data 2."""


def saved_anew(case: Case, start: str | None, into: str, vocab_file: str) -> Outcome:
    """Two steps of a new run, or as far as the checkpoint in `start`; saves there and takes two more."""
    allow_fp16_on_cpu()
    run = EngineRun(case, Path(start) if start else None)
    if start:
        run.load(Path(vocab_file))
    else:
        run.steps(2)
    run.save(Path(vocab_file), Path(into))
    outcome = run.steps(2)
    run.close()
    return outcome


HEAD = {"embedding.tokentype_embeddings.weight", "pooler.dense.weight", "pooler.dense.bias", "binary_head.weight",
        "binary_head.bias"}
Weights = dict[str, np.ndarray]


def there_and_back(cases: list[tuple[Case, str | None, str]], vocab_file: str) -> list[Outcome]:
    return [saved_anew(*case, vocab_file) for case in cases]


def opened(folder: Path) -> Checkpoint:
    found = find_latest(folder)
    assert found is not None
    return Checkpoint.open(found)


def same_state(one: Path, other: Path) -> None:
    """Weights, moments and counts are equal, whichever layouts hold them."""
    first, second = opened(one), opened(other)
    for name in first.manifest.parameters:
        for kind in KINDS:
            torch.testing.assert_close(second.read_full(kind, name), first.read_full(kind, name), **EXACT,
                                       msg=lambda text, name=name: f"{other.name} {name}: {text}")
    for field in ("step", "consumed_samples", "successful_samples", "skipped_steps", "optimizer_step"):
        assert getattr(first.manifest, field) == getattr(second.manifest, field), field


def close(found: Outcome, wanted: Outcome, tolerance: dict[str, float], *, norms: bool = True) -> None:
    for what in ("losses", "norms") if norms else ("losses",):
        torch.testing.assert_close(torch.tensor(getattr(found, what)), torch.tensor(getattr(wanted, what)), **tolerance)


@pytest.mark.proves(
    "any layout resumes any checkpoint, and back: weights and moments / next losses",
    "EXACT", "REDUCTION_ORDER")
@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_any_layout_resumes_any_checkpoint_and_back(tmp_path: Path, precision: str) -> None:
    vocab_file = str(write_vocabulary(tmp_path / "vocab.txt"))
    folder = {name: str(tmp_path / name) for name in (
        "tp2 pp2 dp2", "tp4 dp2", "tp2 pp4", "pp4", "tp4 sp", "pp2 v", "alone", "back from pp4", "back from alone")}

    def on(ranks: int, *hops: tuple[Case, str | None, str]) -> list[Outcome]:
        cases = [(replace(case, precision=precision), start and folder[start], folder[into])
                 for case, start, into in hops]
        return run_ranks(there_and_back, ranks, cases, vocab_file)[0]

    wanted, *others = on(8, (EIGHT, None, "tp2 pp2 dp2"), (Case(tp=4, micro_batch=4), "tp2 pp2 dp2", "tp4 dp2"),
                         (Case(tp=2, pp=4, micro_batch=8), "tp2 pp2 dp2", "tp2 pp4"))
    others += on(4, (Case(pp=4), "tp4 dp2", "pp4"), (Case(tp=4, sequence_parallel=True), "tp2 pp2 dp2", "tp4 sp"),
                 (Case(pp=2, schedule="dualpipev"), "pp4", "pp2 v"))
    others += on(1, (Case(), "tp2 pp4", "alone"))
    back = on(8, (EIGHT, "pp4", "back from pp4"), (EIGHT, "alone", "back from alone"))
    for name in folder:
        same_state(tmp_path / "tp2 pp2 dp2", tmp_path / name)
    for other in others:
        close(other, wanted, REDUCTION_ORDER if precision == "fp32" else BF16)
    # The same layout again: whatever lay between, no order of a sum has changed.
    assert back == [wanted, wanted]


HOPS = [Case(precision="fp16", loss_scale=0.0), Case(precision="bf16"), Case(precision="fp32"),
        Case(precision="fp32", zero=0), Case(precision="fp32"), Case(precision="fp16")]


def through_precisions(root: str, vocab_file: str) -> list[tuple[Outcome, float | None]]:
    """Each case goes on from the state that the first one saved, as the one before handed it on."""
    allow_fp16_on_cpu()
    outcomes, start = [], None
    for index, case in enumerate(HOPS):
        folder = Path(root) / str(index)
        run = EngineRun(case, start)
        if start is None:
            run.engine.optimizer.loss_scaler.cur_scale = 2.0**11
            run.steps(2)
        else:
            run.load(Path(vocab_file))
        scale = loss_scale(run.engine)
        run.save(Path(vocab_file), folder)
        outcomes.append((run.steps(2), scale))
        run.close()
        start = folder
    return outcomes


def test_precision_and_zero_stage_may_change(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    outcomes = run_ranks(through_precisions, 2, str(tmp_path), str(vocab_file))[1]
    for index in range(1, len(HOPS)):
        same_state(tmp_path / "0", tmp_path / str(index))
    # A loss scale is remembered by fp16 runs alone; after another precision it starts afresh.
    assert [scale for _, scale in outcomes] == [2.0**11, None, None, None, None, 2.0**16]
    exact = outcomes[2][0]
    for outcome, _ in outcomes:
        close(outcome, exact, BF16, norms=False)
    # Without ZeRO, DeepSpeed clips by the norm of fp32 gradients and does not tell it.
    close(outcomes[3][0], exact, REDUCTION_ORDER, norms=False)
    assert outcomes[4][0] == exact


def taken(case: Case, start: Path, vocab_file: Path, **settings: bool) -> tuple[TrainingState, int, float, Weights]:
    """What a run takes of a checkpoint: its state, Adam's step, its largest first moment, the weights."""
    from bert_ds.training.fragments import fragments, moments  # noqa: PLC0415

    run = EngineRun(case, start)
    run.load(vocab_file, **settings)
    weights = {local.name: local.parameter.detach().numpy().copy() for local in run.pipeline.local_parameters()}
    (step,) = {int(moments(run.engine, fragment.master)["step"]) for fragment in fragments(run.engine)}
    largest = max(float(moments(run.engine, fragment.master)["exp_avg"].abs().max())
                  for fragment in fragments(run.engine))
    run.steps(1)
    run.close()
    return run.state, step, largest, weights


def parts_of_checkpoints(root: Path, vocab_file: Path) -> dict[str, Any]:
    run = EngineRun(Case())
    run.steps(3)
    run.save(vocab_file, root / "whole")
    run.save(vocab_file, root / "weights", save_optim=False)
    run.close()
    masked_words = EngineRun(Case(binary_head=False))
    masked_words.steps(2)
    masked_words.save(vocab_file, root / "masked words")
    masked_words.close()
    with pytest.raises(CheckpointError, match="--no-load-optim"):
        taken(Case(), root / "weights", vocab_file)
    with pytest.raises(CheckpointError, match=r"model.binary_head=True"):
        taken(Case(), root / "masked words", vocab_file)
    fresh = EngineRun(Case())
    initial = {local.name: local.parameter.detach().numpy().copy() for local in fresh.pipeline.local_parameters()}
    fresh.close()
    return {
        "initial": initial,
        "whole": taken(Case(), root / "whole", vocab_file),
        "no optimizer": taken(Case(), root / "whole", vocab_file, load_optim=False),
        "weights": taken(Case(), root / "weights", vocab_file, load_optim=False),
        "finetune": taken(Case(), root / "whole", vocab_file, finetune=True),
        "head gone": taken(Case(binary_head=False), root / "whole", vocab_file, finetune=True),
        "head added": taken(Case(), root / "masked words", vocab_file, finetune=True),
    }


def test_what_is_taken_of_a_checkpoint(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    found = run_ranks(parts_of_checkpoints, 1, tmp_path, vocab_file)[0]
    initial = found.pop("initial")
    steps = {name: (state.step, state.consumed_samples, step) for name, (state, step, _, _) in found.items()}
    assert steps == {"whole": (4, 64, 3), "no optimizer": (4, 64, 0), "weights": (4, 64, 0), "finetune": (1, 16, 0),
                     "head gone": (1, 16, 0), "head added": (1, 16, 0)}
    for name, (_, _, largest, weights) in found.items():
        assert (largest > 0) == (name == "whole"), name
        saved = opened(tmp_path / {"weights": "weights", "head added": "masked words"}.get(name, "whole"))
        for key, held in weights.items():
            lacks = key not in saved.manifest.parameters
            assert lacks == (name == "head added" and key in HEAD), (name, key)
            assert np.array_equal(held, initial[key] if lacks else saved.read_full(WEIGHT, key).numpy()), (name, key)
    sizes = [sum(file.bytes for file in opened(tmp_path / name).manifest.files) for name in ("whole", "weights")]
    assert sizes[1] < 0.4 * sizes[0]
