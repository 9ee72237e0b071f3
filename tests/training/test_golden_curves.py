"""Twelve steps against a stored curve: an edit that changes the mathematics cannot pass unseen, however consistent."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import run_ranks
from tiny_runs import losses_of
from tolerances import GOLDEN

sys.path.append(str(Path(__file__).resolve().parent.parent / "golden"))
from regenerate import CASES, CURVES, curves


@pytest.mark.proves("twelve-step curves are those stored", "GOLDEN")
def test_plain_torch_follows_the_stored_curves() -> None:
    found, stored = curves(), json.loads(CURVES.read_text())
    assert set(found) == set(stored)
    for name, curve in stored.items():
        for key, wanted in curve.items():
            assert found[name][key] == pytest.approx(wanted, **GOLDEN), (name, key)


@pytest.mark.proves("the engine follows the stored curves on two ranks", "GOLDEN")
def test_the_engine_follows_them_on_two_ranks() -> None:
    stored = json.loads(CURVES.read_text())
    layouts = [replace(case, pp=2) for case in CASES.values()]
    for results in run_ranks(losses_of, 2, layouts):
        for name, losses in zip(CASES, results, strict=True):
            assert losses == pytest.approx(stored[name]["losses"], **GOLDEN), name
