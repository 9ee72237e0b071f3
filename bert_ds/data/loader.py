"""Accumulation windows, built ahead of training by threads; the kernels release the interpreter lock.

Global batch k, micro-batch m, data-parallel rank r get the samples consumed + m x MBS x DP + r x MBS + [0, MBS), as in
Megatron-LM, so that the samples of a global batch do not depend on the layout.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from bert_ds.data.samples import UNUSED_LABEL, SampleBatch, SampleSource
from bert_ds.errors import DataError

_WINDOWS_AHEAD_PER_WORKER = 2


@dataclass(frozen=True)
class Window:
    """This rank's micro-batches of one optimizer step. B = MBS rows; S, P, M as in SampleBatch."""

    micro_batches: list[tuple[torch.Tensor, ...]]
    """Each (input_ids_BS, token_type_ids_BS, segment_ids_BS, masked_positions_BP, masked_labels_BP,
    sentence_order_labels_BM); segment_ids int32, the others int64."""
    masked_tokens: int
    """Masked tokens of this rank's window."""
    labelled_pairs: int
    """Sentence-order labels of this rank's window."""
    real_tokens: int
    """Tokens of this rank's window that are not padding."""
    consumed_samples_after: int
    """Samples that all ranks have consumed with this window; where a resumed run starts."""


class WindowLoader:
    """Iterates over the windows of one rank, in order and the same for any number of workers.

    Starts anywhere at once. An incomplete last global batch is left out. What fails in a thread is raised by the
    iteration. To be closed, or used as a context manager.
    """

    def __init__(self, dataset: SampleSource, *, first_sample: int, num_samples: int,  # noqa: PLR0913
                 micro_batch_size: int, accumulation: int, dp_rank: int, dp_size: int, num_workers: int,
                 rows_are_full: bool = False) -> None:
        """Windows over the samples from `first_sample` to `num_samples` (exclusive) of the dataset.

        accumulation: micro-batches of an optimizer step on each rank.
        rows_are_full: refuse rows with padding (DataError).
        """
        assert num_samples <= len(dataset), f"{num_samples} samples wanted of {len(dataset)}"
        self._dataset = dataset
        self._end = num_samples
        self._next = first_sample
        self._global_batch = micro_batch_size * accumulation * dp_size
        self._micro_batch_size = micro_batch_size
        self._rows_are_full = rows_are_full
        self._offsets = _sample_offsets(micro_batch_size, accumulation, dp_rank, dp_size)
        self._ahead = _WINDOWS_AHEAD_PER_WORKER * num_workers
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="loader")
        self._pending: deque[Future[Window]] = deque()

    def __iter__(self) -> WindowLoader:
        return self

    def __next__(self) -> Window:
        while len(self._pending) < self._ahead and self._next + self._global_batch <= self._end:
            self._pending.append(self._threads.submit(self._build, self._next))
            self._next += self._global_batch
        if not self._pending:
            self.close()
            raise StopIteration
        return self._pending.popleft().result()

    def __enter__(self) -> WindowLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stops the threads; windows that are not handed out are dropped."""
        self._next = self._end
        self._pending.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _build(self, first_sample: int) -> Window:
        indices = first_sample + self._offsets
        batch = self._dataset.build_batch(indices)
        real_tokens = int(np.count_nonzero(batch.segment_ids))
        if self._rows_are_full and real_tokens < batch.segment_ids.size:
            raise _padded_row(batch, indices)
        return Window(
            micro_batches=_micro_batches(batch, self._micro_batch_size),
            masked_tokens=int(np.count_nonzero(batch.masked_labels != UNUSED_LABEL)),
            labelled_pairs=int(np.count_nonzero(batch.sentence_order_labels != UNUSED_LABEL)),
            real_tokens=real_tokens,
            consumed_samples_after=first_sample + self._global_batch,
        )


def _sample_offsets(micro_batch_size: int, accumulation: int, dp_rank: int, dp_size: int) -> NDArray[np.int64]:
    """[accumulation x MBS], the samples of this rank relative to the first of the global batch."""
    micro_batches = np.arange(accumulation, dtype=np.int64)[:, None] * (micro_batch_size * dp_size)
    rows = dp_rank * micro_batch_size + np.arange(micro_batch_size, dtype=np.int64)
    return (micro_batches + rows).reshape(-1)


def _micro_batches(batch: SampleBatch, micro_batch_size: int) -> list[tuple[torch.Tensor, ...]]:
    tensors = (
        torch.from_numpy(batch.input_ids).long(),
        torch.from_numpy(batch.token_type_ids).long(),
        torch.from_numpy(batch.segment_ids),
        torch.from_numpy(batch.masked_positions).long(),
        torch.from_numpy(batch.masked_labels).long(),
        torch.from_numpy(batch.sentence_order_labels).long(),
    )
    return list(zip(*(tensor.split(micro_batch_size) for tensor in tensors), strict=True))


def _padded_row(batch: SampleBatch, indices: NDArray[np.int64]) -> Exception:
    tokens_of_rows = np.count_nonzero(batch.segment_ids, axis=1)
    row = int(np.argmin(tokens_of_rows))
    return DataError.of("data.rows_are_full", True, f"sample {indices[row]} has {tokens_of_rows[row]} tokens of "
                        f"{batch.segment_ids.shape[1]}", "set rows_are_full to false")
