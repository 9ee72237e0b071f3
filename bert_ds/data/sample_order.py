"""The order of the training samples, kept over resumed runs.

In Megatron-LM the number of samples that a run wants decides how many epochs are shuffled together, so that a resumed
run with another --train-iters reads its text in another order, silently. Here a run plans once and its checkpoints
remember: DataConfig.planned_samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bert_ds.config.run import RunConfig
from bert_ds.errors import ConfigError

DECIDES = {
    "data": ("data_path", "train_data_path", "valid_data_path", "test_data_path", "split", "short_seq_prob",
             "mid_level_dataset_surplus", "pack_sequences", "max_sequences_per_row"),
    "model": ("seq_length", "binary_head"),
    "schedule": ("seed",),
}
"""Settings that decide which sample comes when, beside planned_samples."""


def planned_samples(run: RunConfig, saved: Mapping[str, Any] | None) -> int:
    """Samples that the order of `run` is drawn for, to be put into `run.data.planned_samples`.

    saved: the configuration in the checkpoint that the run goes on from (Manifest.config); None for a new run.
    Raises ConfigError when the run asks for another plan than its checkpoint followed.
    """
    own = run.data.planned_samples
    before = None if saved is None else _plan_of(saved)
    if before is None:
        return own or run.batch_sizes.after(0, run.schedule.train_iters)
    if own not in {None, before}:
        raise ConfigError.of("data.planned_samples", own, "the samples of the checkpoint's run came in the order drawn "
                             f"for {before}", f"leave it out or set it to {before}")
    return before


def _plan_of(saved: Mapping[str, Any]) -> int | None:
    """None for a checkpoint that no training made."""
    planned: int | None = (saved.get("data") or {}).get("planned_samples")
    if planned is not None:
        return planned
    schedule, engine = saved.get("schedule"), saved.get("engine")
    if not schedule or not engine:
        return None
    return int(schedule["train_iters"] * engine["global_batch_size"])
