import threading
import time

import numpy as np
import pytest
import torch

from bert_ds.data.loader import Window, WindowLoader
from bert_ds.data.samples import UNUSED_LABEL, SampleBatch
from bert_ds.errors import DataError


class NumberedSamples:
    """Sample i shows i in every token, has i % 5 + 1 real tokens of 5 and i % 3 masked ones; some indices fail."""

    def __init__(self, size: int, *, fails_at: int = -1, slow: bool = False) -> None:
        self.size = size
        self.fails_at = fails_at
        self.slow = slow

    def __len__(self) -> int:
        return self.size

    def build_batch(self, indices: np.ndarray) -> SampleBatch:
        if self.fails_at in indices:
            raise DataError.of("--data-path", "x", f"sample {self.fails_at} is broken", "repair it")
        if self.slow:
            time.sleep(float(indices[0] * 7919 % 5) / 1000)
        batch = SampleBatch.empty(len(indices), 5, 8)
        batch.input_ids[:] = indices[:, None]
        batch.token_type_ids[:] = 0
        batch.segment_ids[:] = np.arange(5) <= indices[:, None] % 5
        batch.masked_positions[:] = 0
        batch.masked_labels[:] = np.where(np.arange(8) < indices[:, None] % 3, 7, UNUSED_LABEL)
        batch.sentence_order_labels[:] = np.where(indices[:, None] % 2, 1, UNUSED_LABEL)
        return batch


def windows_of(dataset: NumberedSamples, *, first_sample: int = 0, num_samples: int = 100, dp_rank: int = 1,
               num_workers: int = 2, rows_are_full: bool = False) -> list[Window]:
    """Micro-batches of 2, 3 of them a step, data-parallel over 2: global batches of 12."""
    with WindowLoader(dataset, first_sample=first_sample, num_samples=num_samples, micro_batch_size=2, accumulation=3,
                      dp_rank=dp_rank, dp_size=2, num_workers=num_workers, rows_are_full=rows_are_full) as loader:
        return list(loader)


def samples_in(window: Window) -> list[list[int]]:
    return [batch[0][:, 0].tolist() for batch in window.micro_batches]


def test_samples_are_dealt_as_megatron_does() -> None:
    windows = windows_of(NumberedSamples(100))
    assert len(windows) == 8
    assert samples_in(windows[0]) == [[2, 3], [6, 7], [10, 11]]
    assert samples_in(windows[1]) == [[14, 15], [18, 19], [22, 23]]
    assert [window.consumed_samples_after for window in windows] == list(range(12, 97, 12))
    other = windows_of(NumberedSamples(100), dp_rank=0)
    for mine, theirs in zip(windows, other, strict=True):
        both = np.ravel(samples_in(mine) + samples_in(theirs))
        assert sorted(both) == list(range(mine.consumed_samples_after - 12, mine.consumed_samples_after))


def test_a_window_counts_its_own_rows() -> None:
    window = windows_of(NumberedSamples(12), num_samples=12)[0]
    samples = np.ravel(samples_in(window))
    assert window.masked_tokens == (samples % 3).sum()
    assert window.labelled_pairs == (samples % 2).sum()
    assert window.real_tokens == (samples % 5 + 1).sum()
    assert [tensor.dtype for tensor in window.micro_batches[0]] == [torch.int64] * 2 + [torch.int32] + [torch.int64] * 3
    assert [tuple(tensor.shape) for tensor in window.micro_batches[0]] == [(2, 5)] * 3 + [(2, 8)] * 2 + [(2, 1)]


def test_windows_do_not_depend_on_the_workers_or_the_start() -> None:
    reference = [samples_in(window) for window in windows_of(NumberedSamples(500), num_samples=500, num_workers=1)]
    slow = NumberedSamples(500, slow=True)
    assert [samples_in(window) for window in windows_of(slow, num_samples=500, num_workers=7)] == reference
    assert [samples_in(window) for window in windows_of(slow, first_sample=240, num_samples=500)] == reference[20:]


def test_a_failure_in_a_thread_reaches_the_consumer_in_its_turn() -> None:
    with WindowLoader(NumberedSamples(100, fails_at=30), first_sample=0, num_samples=100, micro_batch_size=4,
                      accumulation=1, dp_rank=0, dp_size=1, num_workers=3) as loader:
        for _ in range(7):
            next(loader)
        with pytest.raises(DataError, match="sample 30 is broken"):
            next(loader)


def test_close_stops_the_threads() -> None:
    loader = WindowLoader(NumberedSamples(10**6), first_sample=0, num_samples=10**6, micro_batch_size=2, accumulation=1,
                          dp_rank=0, dp_size=1, num_workers=3)
    next(loader)
    assert any(thread.name.startswith("loader") for thread in threading.enumerate())
    loader.close()
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())
    assert next(loader, None) is None


def test_a_promise_of_full_rows_is_checked() -> None:
    with pytest.raises(DataError, match="sample 10 has 1 tokens of 5"):
        windows_of(NumberedSamples(100), rows_are_full=True)
