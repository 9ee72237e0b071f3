"""Copies that differ by one bit are noticed, on every rank that shares them."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tiny_runs import Case, EngineRun

from bert_ds.errors import GuardError
from bert_ds.training.consistency import check_copies

CASES = {"encoder.layers.1.input_layernorm.weight": Case(tp=2), "embedding.word_embeddings.weight": Case(pp=2)}


def disturb_the_last_rank(cases: dict[str, Case]) -> dict[str, str]:
    messages = {}
    for name, case in cases.items():
        run = EngineRun(case)
        run.steps(1)
        check_copies(run.engine, run.ctx)
        if run.ctx.rank == 1:
            victim = next(local.parameter for local in run.pipeline.local_parameters() if local.name == name)
            with torch.no_grad():
                victim.view(-1)[3] = torch.nextafter(victim.view(-1)[3], torch.tensor(9.0))
        try:
            check_copies(run.engine, run.ctx)
        except GuardError as error:
            messages[name] = str(error)
        run.close()
    return messages


@pytest.mark.proves("one bit that differs between copies stops the run on all ranks", "EXACT")
def test_one_bit_is_noticed_on_all_ranks() -> None:
    for messages in run_ranks(disturb_the_last_rank, 2, CASES):
        assert set(messages) == set(CASES)
        for name, message in messages.items():
            assert f"copies of={name}" in message
