"""A run that is made longer reads on in its order, through the whole program."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import launch, make_data, outputs, records

PORT = 29577


@pytest.mark.long
def test_a_longer_run_goes_on_as_one_that_planned_the_same(tmp_path: Path) -> None:
    run = [*make_data(tmp_path), "--lr-decay-style", "constant"]
    longer = [*run, "--train-iters", "30"]
    straight = launch(1, [*longer, *outputs(tmp_path / "straight"), "--planned-samples", "160"], tmp_path, port=PORT)
    assert straight.returncode == 0, straight.stdout + straight.stderr
    for arguments in ([*run, "--train-iters", "10"], [*longer, "--exit-interval", "20"], longer):
        part = launch(1, [*arguments, *outputs(tmp_path / "parts")], tmp_path, port=PORT)
        assert part.returncode == 0, part.stdout + part.stderr
    both = [[(record["iteration"], record["lm_loss"], record["grad_norm"]) for record in records(tmp_path / name)]
            for name in ("straight", "parts")]
    assert both[0] == both[1]
    assert len(both[0]) == 30
    other = launch(1, [*longer, *outputs(tmp_path / "parts"), "--planned-samples", "480"], tmp_path, port=PORT)
    assert other.returncode != 0
    assert "data.planned_samples=480: the samples of the checkpoint's run came in the order drawn for 160" in (
        other.stdout + other.stderr)
