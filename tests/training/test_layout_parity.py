"""Every layout trains the same model: losses, norms, gradients and parameters agree with plain torch in one process.

Gradients are read off Adam's first moment after one step, which is 0.1 x the gradient that the optimizer was given; so
they are compared after accumulation, data-parallel averaging, the tied embedding's sum and clipping.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny_runs import Case, EngineRun, Outcome, reference, write_vocabulary
from tolerances import ADAM_STEPS, EXACT, REDUCTION_ORDER

from bert_ds.checkpoint.reader import Checkpoint, find_latest

DROPOUT = {"dropout": 0.1, "backend": "local"}
"""Dropout that follows an element's place, whatever the layout; kernels of libraries draw from a rank's generator."""

DUALPIPEV = {"schedule": "dualpipev"}
ROPE = {"position_embedding_type": "rope"}
UNTIED = {"untie_embeddings_and_output_weights": True}

EIGHT_RANKS = [
    Case(tp=1, pp=1, micro_batch=2, **DROPOUT),
    Case(tp=1, pp=2, micro_batch=2, **DROPOUT),
    Case(tp=1, pp=4, micro_batch=4),
    Case(tp=2, pp=1, micro_batch=1, **DROPOUT),
    Case(tp=2, pp=2, micro_batch=2, **DROPOUT),
    Case(tp=2, pp=4, micro_batch=2, recompute=1, **DROPOUT),
    Case(tp=4, pp=1, micro_batch=4, norm="post", **DROPOUT),
    Case(tp=4, pp=2, micro_batch=1, recompute=2),
    Case(tp=8, pp=1, micro_batch=8),
    Case(tp=4, pp=2, micro_batch=2, sequence_parallel=True, recompute=2, **DROPOUT),
    Case(tp=2, pp=2, micro_batch=2, sequence_parallel=True, recompute=1, **DUALPIPEV, **DROPOUT),
    Case(tp=1, pp=4, micro_batch=1, layers=9, **DUALPIPEV),
]
"""All products of tensor and pipeline sizes on 8 ranks that 5 layers allow, and two that hold two stages a rank; the
rest is data parallel."""

SIXTEEN_RANKS = [
    Case(tp=2, pp=4, micro_batch=2, recompute=1, **DROPOUT),
    Case(tp=4, pp=2, micro_batch=1, sequence_parallel=True, packed=True, **DROPOUT),
]

TWO_RANKS = [
    Case(tp=2, zero=1),
    Case(tp=2, sequence_parallel=True),
    Case(tp=2, sequence_parallel=True, micro_batch=4, recompute=2, **DROPOUT),
    Case(tp=2, sequence_parallel=True, norm="post", clipping=0.0, micro_batch=4),
    Case(tp=2, micro_batch=4, binary_head=False, backend="local"),
    Case(pp=2, zero=1, micro_batch=1),
    Case(pp=2, norm="post", recompute=3, micro_batch=4),
    Case(zero=1, micro_batch=8),
    Case(zero=0, micro_batch=4, clipping=0.0),
    Case(pp=2, binary_head=False, clipping=0.0, micro_batch=8),
    Case(normalization="micro_batch", micro_batch=2),
    Case(pp=2, normalization="micro_batch", micro_batch=4),
    Case(tp=2, packed=True),
    Case(pp=2, packed=True, normalization="micro_batch", micro_batch=4),
    Case(packed=True, micro_batch=1, **DROPOUT),
    Case(tp=2, model={**ROPE, **UNTIED, "kv_channels": 6}),
    Case(tp=2, sequence_parallel=True, packed=True, binary_head=False, model={**ROPE, "rotary_percent": 0.5},
         **DROPOUT),
    Case(pp=2, packed=True, micro_batch=4, model={**ROPE, **UNTIED}),
    Case(pp=2, norm="post", model={"kv_channels": 6, "ffn_hidden_size": 48, "recompute_granularity": "selective"},
         **DROPOUT),
    Case(pp=2, recompute=2, model={**UNTIED, "recompute_method": "block"}, micro_batch=4, **DROPOUT),
    Case(pp=2, micro_batch=4, **DUALPIPEV),
    Case(pp=2, micro_batch=1, packed=True, norm="post", normalization="micro_batch", recompute=2, **DUALPIPEV,
         **DROPOUT),
    Case(pp=2, micro_batch=2, binary_head=False, clipping=0.0, model={**ROPE, **UNTIED}, **DUALPIPEV),
]


def train_and_save(cases: list[Case], root: str, vocab_file: str) -> list[tuple[Outcome, list[float]]]:
    """Runs on every rank: outcome of each case, and how far each copy of a parameter is from the saved one."""
    results = []
    for index, case in enumerate(cases):
        run = EngineRun(case, Path(root) / f"{index}")
        first = run.steps(1)
        run.save(Path(vocab_file), Path(root) / f"{index}_gradient")
        outcome = first.then(run.steps(case.steps - 1))
        run.save(Path(vocab_file))
        results.append((outcome, copies_against_saved(run)))
        run.close()
    return results


def copies_against_saved(run: EngineRun) -> list[float]:
    """Largest difference of every parameter of this rank, copies included, from what its owner has saved."""
    folder = find_latest(Path(run.run.output.save))
    checkpoint = Checkpoint.open(folder)
    differences = []
    for local in run.pipeline.local_parameters():
        full = checkpoint.read_full("weight", local.name)
        own = getattr(local.parameter, "tensor_parallel_sharding", None)
        wanted = own.cut(full) if own else full
        differences.append(float((local.parameter.detach().float() - wanted).abs().max()))
    return differences


@pytest.mark.proves(
    "every tensor x pipeline x data layout of 1, 2, 8 and 16 ranks, DualPipeV too, trains as one "
    "process of plain torch: losses, norms, every gradient / parameters after three steps / "
    "copies are equal; micro-batches, accumulation, recomputation, sequence parallelism, "
    "pre/post-LN, packed rows, options of the model, dropout, with and without the binary head, "
    "both loss normalisations",
    "REDUCTION_ORDER", "ADAM_STEPS", "EXACT")
@pytest.mark.parametrize(("world_size", "cases"), [
    pytest.param(2, TWO_RANKS, id="two-ranks"), pytest.param(8, EIGHT_RANKS, id="eight-ranks"),
    pytest.param(16, SIXTEEN_RANKS, id="sixteen-ranks", marks=pytest.mark.long)])
def test_every_layout_agrees_with_one_process(world_size: int, cases: list[Case], tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    ranks = run_ranks(train_and_save, world_size, cases, str(tmp_path), str(vocab_file))
    for index, case in enumerate(cases):
        wanted, tensors = reference(case)
        for rank in range(world_size):
            outcome, copies = ranks[rank][index]
            assert_close(outcome.losses, wanted.losses, f"{case} rank {rank} losses")
            if case.zero:  # without ZeRO, DeepSpeed keeps no norm of fp32 gradients
                assert_close(outcome.norms, wanted.norms, f"{case} rank {rank} gradient norms")
            assert_close(outcome.sums, wanted.sums, f"{case} rank {rank} sums")
            assert max(copies) == EXACT["atol"], f"{case} rank {rank}: copies of a parameter differ by {max(copies)}"
        gradients = reference(replace(case, steps=1))[1]
        compare(tmp_path / f"{index}_gradient", "exp_avg", gradients, REDUCTION_ORDER, str(case))
        compare(tmp_path / f"{index}", "weight", tensors, ADAM_STEPS, str(case))


def compare(save: Path, kind: str, tensors: dict[str, dict[str, torch.Tensor]], tolerance: dict[str, float],
            what: str) -> None:
    folder = find_latest(save)
    assert folder is not None
    checkpoint = Checkpoint.open(folder, verify_hashes=True)
    assert set(checkpoint.manifest.parameters) == set(tensors)
    for name, wanted in tensors.items():
        found = checkpoint.read_full(kind, name)
        scale = float(wanted[kind].abs().max())
        torch.testing.assert_close(
            found, wanted[kind], rtol=tolerance["rtol"], atol=max(tolerance["atol"], tolerance["rtol"] * scale),
            msg=lambda text, name=name: f"{what}: {kind} of {name}: {text}")


def assert_close(found: object, wanted: object, what: str) -> None:
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64),
                               **REDUCTION_ORDER, msg=lambda text: f"{what}: {text}")
