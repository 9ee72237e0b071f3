"""An interrupted run goes on as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny_runs import Case, EngineRun, allow_fp16_on_cpu, losses_of, write_vocabulary

SAME_LAYOUT = [
    Case(pp=2, dropout=0.1),
    Case(tp=2, dropout=0.1, precision="bf16", recompute=1),
    Case(micro_batch=4, dropout=0.1, precision="fp16"),
    Case(pp=2, dropout=0.1, precision="bf16"),
    Case(pp=2, dropout=0.1, precision="fp16"),
    Case(zero=0, dropout=0.1),
    Case(tp=2, dropout=0.1, packed=True),
    Case(pp=2, dropout=0.1, precision="bf16", schedule="dualpipev"),
    Case(pp=2, dropout=0.1, precision="bf16", model={
        "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True, "kv_channels": 6}),
]


def interrupted_and_straight(cases: list[Case], root: str, vocab_file: str) -> list[tuple[object, object]]:
    allow_fp16_on_cpu()
    results = []
    for index, case in enumerate(cases):
        folder = Path(root) / str(index)
        straight = EngineRun(case, folder)
        wanted = straight.steps(2)
        straight.save(Path(vocab_file))
        wanted_after = straight.steps(2)
        straight.close()
        resumed = EngineRun(case, folder)
        resumed.load(Path(vocab_file))
        found = resumed.steps(2)
        assert resumed.state == straight.state
        same = all(torch.equal(a.parameter, b.parameter) for a, b in zip(
            straight.pipeline.local_parameters(), resumed.pipeline.local_parameters(), strict=True))
        resumed.close()
        results.append((wanted_after, found, same, wanted))
    return results


@pytest.mark.proves("resume on the same layout, fp32, bf16, fp16, dropout on", "EXACT")
def test_resume_is_exact_to_the_bit(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    for rank, results in enumerate(run_ranks(interrupted_and_straight, 2, SAME_LAYOUT, str(tmp_path), str(vocab_file))):
        for case, (wanted, found, same_weights, before) in zip(SAME_LAYOUT, results, strict=True):
            assert found == wanted, f"{case} rank {rank}"
            assert same_weights, f"{case} rank {rank}"
            assert found.losses != before.losses


DROPOUT_CASES = [Case(dropout=0.1, pp=1), Case(dropout=0.1, pp=1, recompute=2)]


@pytest.mark.proves("dropout of a library's kernel depends on neither stages nor recomputation", "EXACT")
def test_dropout_does_not_depend_on_stages_or_recomputation() -> None:
    one_stage = run_ranks(losses_of, 1, DROPOUT_CASES)[0]
    two_stages = run_ranks(losses_of, 2, [replace(case, pp=2) for case in DROPOUT_CASES])[1]
    assert one_stage[0] == one_stage[1] == two_stages[0] == two_stages[1]
    without = run_ranks(losses_of, 1, [Case()])[0]
    assert without[0] != one_stage[0]
