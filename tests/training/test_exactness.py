"""Interrupted and straight runs are equal to the bit, through the whole program: data, evaluation, signals, saving."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launched import ROOT, SMALL, make_data, outputs, records, tensor_hashes
from ranks import run_ranks
from tiny_runs import allow_fp16_on_cpu

from bert_ds.checkpoint.reader import Checkpoint, find_latest
from bert_ds.data.loader import WindowLoader
from bert_ds.data.samples import SampleBatch

STOPPED_AT = 4


def trained(arguments: list[str], stopped: bool) -> int:
    """Trains on this rank; the exit code. With `stopped`, rank 0 gets SIGTERM amid the micro-batches of a step."""
    allow_fp16_on_cpu()
    from bert_ds.cli.launcher import process_place  # noqa: PLC0415
    from bert_ds.cli.resolve import resolve_run  # noqa: PLC0415
    from bert_ds.training import trainer  # noqa: PLC0415
    from bert_ds.training.job import prepare, run_job  # noqa: PLC0415

    place = process_place(os.environ)
    step_of, steps = trainer.train_step, 0

    def with_a_signal(micro_batches: Iterator[Any]) -> Iterator[Any]:
        for number, micro_batch in enumerate(micro_batches):
            if number == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield micro_batch

    def step(engine: Any, micro_batches: Iterator[Any] | None) -> bool:
        nonlocal steps
        steps += 1
        if stopped and place.rank == 0 and steps == STOPPED_AT:
            assert micro_batches is not None
            micro_batches = with_a_signal(micro_batches)
        return step_of(engine, micro_batches)

    trainer.train_step = step
    return run_job(prepare(resolve_run(arguments, world_size=place.world_size).config, place))


def everything_told(folder: Path) -> list[tuple[object, ...]]:
    """Iteration, losses, norm and learning rate of all steps and evaluations, each as it was told last."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return sorted({tuple(str(line.get(key)) for key in ("iteration", "split", "consumed_samples", "lm_loss", "sop_loss",
                                                        "grad_norm", "learning_rate")) for line in lines})


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two corpora with weights, packed into rows."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    flags, _ = [make_data(folder) for folder in folders]
    prefixes = [str(folder / "corpus_text_sentence") for folder in folders]
    return ["--data-path", "0.7", prefixes[0], "0.3", prefixes[1], *flags[2:], "--pack-sequences", "--seq-length", "96",
            "--max-position-embeddings", "96"]


ALONE: list[str] = ["--pipeline-model-parallel-size", "1"]
"""On one rank; every other layout of the test takes two."""
SMALLEST = ["--deepspeed_config", str(ROOT / "ds_configs" / "tiny.json"), *SMALL, "--train-iters", "7",
            "--eval-interval", "3", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]


@pytest.mark.proves("a signal in the middle of an accumulation window", "EXACT")
@pytest.mark.parametrize(("precision", "layout"), [
    ("--fp32", ALONE),
    pytest.param("--fp32", ["--pipeline-model-parallel-size", "2"], marks=pytest.mark.long),
    pytest.param("--bf16", ["--pipeline-model-parallel-size", "2"], marks=pytest.mark.long),
    pytest.param("--fp16", ["--pipeline-model-parallel-size", "2"], marks=pytest.mark.long),
    pytest.param("--fp16", ["--tensor-model-parallel-size", "2"], marks=pytest.mark.long),
    pytest.param("--bf16", [], marks=pytest.mark.long)])
def test_a_signal_amid_a_window_changes_nothing(
    blend: list[str], tmp_path: Path, precision: str, layout: list[str]
) -> None:
    run, ranks = [*SMALLEST, *blend, precision, *layout], 1 if layout is ALONE else 2
    assert set(run_ranks(trained, ranks, [*run, *outputs(tmp_path / "straight")], False, join=False)) == {0}
    broken = [*run, *outputs(tmp_path / "broken")]
    assert set(run_ranks(trained, ranks, broken, True, join=False)) == {128 + signal.SIGTERM}
    found = find_latest(tmp_path / "broken" / "checkpoints")
    assert found is not None
    manifest = Checkpoint.open(found).manifest
    # The window in which the signal came is finished, then saved.
    assert (manifest.step, manifest.consumed_samples) == (STOPPED_AT, STOPPED_AT * 16)
    assert set(run_ranks(trained, ranks, [*broken, "--num-workers", "2"], False, join=False)) == {0}
    assert everything_told(tmp_path / "broken") == everything_told(tmp_path / "straight")
    assert [record["iteration"] for record in records(tmp_path / "broken")] == list(range(1, 8))
    assert tensor_hashes(tmp_path / "broken") == tensor_hashes(tmp_path / "straight")


class ManySamples:
    """Two billion samples that are made up, and a note of which were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 2 * 10**9

    def build_batch(self, indices: np.ndarray) -> SampleBatch:
        self.asked += indices.tolist()
        batch = SampleBatch.empty(len(indices), 4, 8)
        for field in batch:
            field[:] = 0
        batch.input_ids[:] = indices[:, None] % 10_000
        return batch


@pytest.mark.parametrize("first", [0, 10**9])
def test_the_place_in_the_data_is_found_at_once(first: int) -> None:
    samples = ManySamples()
    with WindowLoader(samples, first_sample=first, num_samples=2 * 10**9, micro_batch_size=4, accumulation=2, dp_rank=0,
                      dp_size=2, num_workers=1) as loader:
        window = next(loader)
    assert window.consumed_samples_after == first + 16
    # Nothing before the first sample is looked at, and no more than the windows that are built ahead.
    assert min(samples.asked) == first and len(samples.asked) <= 3 * 8
