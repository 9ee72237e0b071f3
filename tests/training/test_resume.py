"""An interrupted run goes on as if nothing had happened; in another layout it goes on from the very same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny_runs import Case, EngineRun, allow_fp16_on_cpu, losses_of, write_vocabulary
from tolerances import EXACT, REDUCTION_ORDER

from bert_ds.checkpoint.format import KINDS
from bert_ds.checkpoint.reader import Checkpoint, find_latest

SAME_LAYOUT = [
    Case(pp=2, dropout=0.1),
    Case(tp=2, dropout=0.1, precision="bf16", recompute=1),
    Case(micro_batch=4, dropout=0.1, precision="fp16"),
    Case(pp=2, dropout=0.1, precision="bf16"),
    Case(pp=2, dropout=0.1, precision="fp16"),
    Case(zero=0, dropout=0.1),
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


def test_resume_is_exact_to_the_bit(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    for rank, results in enumerate(run_ranks(interrupted_and_straight, 2, SAME_LAYOUT, str(tmp_path), str(vocab_file))):
        for case, (wanted, found, same_weights, before) in zip(SAME_LAYOUT, results, strict=True):
            assert found == wanted, f"{case} rank {rank}"
            assert same_weights, f"{case} rank {rank}"
            assert found.losses != before.losses


OTHER_LAYOUTS = [Case(tp=1, pp=4), Case(tp=4, pp=1, micro_batch=4), Case(tp=1, pp=1), Case(tp=2, pp=4, micro_batch=8)]


def save_in_one_layout_go_on_in_others(saved: Case, others: list[Case], root: str, vocab_file: str) -> list[object]:
    folder = Path(root) / "saved"
    first = EngineRun(saved, folder)
    first.steps(2)
    first.save(Path(vocab_file))
    outcomes = [first.steps(2)]
    first.close()
    for index, case in enumerate(others):
        run = EngineRun(case, folder)
        run.load(Path(vocab_file))
        run.save(Path(vocab_file), Path(root) / str(index))
        outcomes.append(run.steps(2))
        run.close()
    return outcomes


@pytest.mark.long
def test_any_layout_resumes_any_checkpoint(tmp_path: Path) -> None:
    vocab_file = write_vocabulary(tmp_path / "vocab.txt")
    saved = Case(tp=2, pp=2)
    ranks = run_ranks(save_in_one_layout_go_on_in_others, 8, saved, OTHER_LAYOUTS, str(tmp_path), str(vocab_file))
    original = opened(tmp_path / "saved")
    for index, case in enumerate(OTHER_LAYOUTS):
        again = opened(tmp_path / str(index))
        for name in original.manifest.parameters:
            for kind in KINDS:
                torch.testing.assert_close(again.read_full(kind, name), original.read_full(kind, name), **EXACT,
                                           msg=lambda text, name=name, case=case: f"{case} {name}: {text}")
        for outcomes in ranks:
            for what in ("losses", "norms"):
                torch.testing.assert_close(
                    torch.tensor(getattr(outcomes[index + 1], what)), torch.tensor(getattr(outcomes[0], what)),
                    **REDUCTION_ORDER, msg=lambda text, case=case: f"{case}: {text}")


def opened(folder: Path) -> Checkpoint:
    found = find_latest(folder)
    assert found is not None
    return Checkpoint.open(found)


DROPOUT_CASES = [Case(dropout=0.1, pp=1), Case(dropout=0.1, pp=1, recompute=2)]


def test_dropout_does_not_depend_on_stages_or_recomputation() -> None:
    one_stage = run_ranks(losses_of, 1, DROPOUT_CASES)[0]
    two_stages = run_ranks(losses_of, 2, [replace(case, pp=2) for case in DROPOUT_CASES])[1]
    assert one_stage[0] == one_stage[1] == two_stages[0] == two_stages[1]
    without = run_ranks(losses_of, 1, [Case()])[0]
    assert without[0] != one_stage[0]
