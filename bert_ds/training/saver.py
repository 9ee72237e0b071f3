"""Saving while training goes on: a fast copy of this rank's part in host memory, which a thread then writes."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from bert_ds.checkpoint.format import KINDS, Manifest, VocabularyRecord, rank_file, tag_for
from bert_ds.checkpoint.writer import TensorSlice, check_room, incomplete_folder, remove_leftovers, size_text
from bert_ds.config.run import RunConfig
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import CheckpointError, SaveError
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.coordination import Coordinator
from bert_ds.training.disks import Disks
from bert_ds.training.host_memory import available_bytes
from bert_ds.training.save import Target, draft_manifest, own_slices, write_checkpoint
from bert_ds.training.state import TrainingState

log = logging.getLogger(__name__)
_PROGRESS_S = 10.0
_LAST_WAIT_S = 120.0
"""How long a rank that has failed waits for a checkpoint that is being written before it lets the others know."""
_WORTH_TELLING_S = 0.5
_SHARE_OF_MEMORY = 0.8
"""Of the available host memory, what copies may take."""


class Saver:
    """Saves the checkpoints of one run. All ranks make one, and call its methods in the same order.

    A save that the disk refuses is told and does not end the run; the next one is tried in full. `finish` raises when
    the last one has failed.
    """

    def __init__(
        self, run: RunConfig, ctx: ParallelContext, coordinator: Coordinator, engine: Any, vocabulary: Vocabulary,
        disks: Disks, after_save: Callable[[int], None] | None = None,
    ) -> None:
        """
        Args:
            run, ctx, coordinator, engine, vocabulary, disks: the run on this rank.
            after_save: called on rank 0 with the iteration of a checkpoint that is complete, by the thread that writes.

        Raises:
            CheckpointError: the disk has no room for one checkpoint, or refuses.
        """
        self._after_save = after_save
        self._run, self._ctx, self._engine = run, ctx, engine
        self._ranks = coordinator.beside("save")
        kinds = len(KINDS) if run.output.save_optim else 1
        own = sum(4 * kinds * (piece.stop - piece.start)
                  for piece in own_slices(engine, ctx, disks, with_moments=False))
        sizes = coordinator.gather("the sizes of the checkpoint", own)
        text = Path(run.data.vocab_file).read_bytes()
        self._target = Target(run.output, disks, text, sum(sizes[rank] for rank in disks.ranks_with(ctx.rank)))
        self._vocabulary = VocabularyRecord(hashlib.sha256(text).hexdigest(), len(vocabulary.tokens),
                                            run.data.tokenizer_type)
        coordinator.attempt("looking for room for checkpoints", self._make_room, CheckpointError)
        self._copy = _copy_in_host_memory(run, ctx, coordinator, disks, sizes)
        self._thread: threading.Thread | None = None
        self._tag = ""
        self._refused: CheckpointError | None = None
        self._broken: BaseException | None = None

    def save(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Saves the run as it stands; returns when training may go on, which is before the checkpoint is written."""
        asked = time.monotonic()
        self.wait()
        started = time.monotonic()
        manifest = draft_manifest(self._run, self._ctx, self._engine, state, self._vocabulary, metrics)
        slices = list(own_slices(self._engine, self._ctx, self._target.disks,
                                 with_moments=self._run.output.save_optim))
        self._tag = tag_for(state.step)
        if self._copy is None:
            self._write(manifest, slices, started, None)
            self.wait()
            return
        slices = self._copy.of(slices)
        waited = f"{time.monotonic() - started:.2f} s"
        if started - asked > _WORTH_TELLING_S:
            waited += f" after {started - asked:.1f} s for the checkpoint before"
        self._thread = threading.Thread(target=self._write, args=(manifest, slices, started, waited), name="save",
                                        daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Returns when the last save has ended: whether it has succeeded.

        Raises:
            BaseException: what ended the thread that writes, unless the disk refused.
        """
        if self._thread is not None:
            self._join(None)
        if self._broken is not None:
            raise self._broken
        return self._refused is None

    def finish(self) -> None:
        """Waits for the last save.

        Raises:
            SaveError: on all ranks, where the disk refused it.
        """
        if not self.wait():
            assert self._refused is not None
            raise SaveError(*self._refused.problems)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error, gives a checkpoint that is being written the time to be completed."""
        if self._thread is not None and self._thread.is_alive():
            log.error("this rank has failed; before it says why, checkpoint %s is completed", self._tag)
            self._join(_LAST_WAIT_S)
        if self._copy is not None and not (self._thread and self._thread.is_alive()):
            self._copy.release()

    def _join(self, limit_s: float | None) -> None:
        """Waits for the thread, and says so as long as it takes."""
        assert self._thread is not None
        started, pause = time.monotonic(), 1.0
        while self._thread.is_alive() and (limit_s is None or time.monotonic() - started < limit_s):
            self._thread.join(pause)
            if self._thread.is_alive():
                log.info("waiting for checkpoint %s: %s", self._tag, self._progress())
            pause = _PROGRESS_S

    def _progress(self) -> str:
        path = incomplete_folder(self._target.folder, self._tag) / rank_file(self._ctx.rank)
        try:
            return f"rank {self._ctx.rank} has written {size_text(path.stat().st_size)}"
        except OSError:
            return "it is being published"

    def _make_room(self) -> None:
        if self._target.disks.leads(self._ctx.rank):
            self._target.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._target.folder)
            check_room(self._target.folder, self._target.needed_bytes)

    def _write(self, manifest: Manifest, slices: list[TensorSlice], started: float, waited: str | None) -> None:
        """Writes one checkpoint; `waited` tells how long training did, None that it still does."""
        try:
            size = write_checkpoint(self._target, self._ranks, manifest, slices)
        except CheckpointError as error:
            self._refused = error
            if self._ctx.rank == 0:
                log.error("checkpoint %s is NOT saved, training goes on: %s", self._tag, error)
        except BaseException as error:  # noqa: BLE001 - it goes on in `wait`, on the thread that can end the run
            self._broken = error
        else:
            self._refused = None
            seconds = time.monotonic() - started
            log.info("saved checkpoint %s (%s in %.1f s, %.2f GB/s; training waited %s)",
                     self._target.folder / self._tag, size_text(size), seconds, size / 1e9 / max(seconds, 1e-9),
                     waited or f"{seconds:.2f} s")
            if self._after_save is not None and self._ctx.rank == 0:
                self._after_save(manifest.step)


class HostCopy:
    """Host memory for what one rank saves, page-locked where it is filled from a GPU; made once, made again only where
    layers have come to hold more than at the start."""

    def __init__(self, numel: int, device: torch.device) -> None:
        """
        Raises:
            RuntimeError: the memory is not to be had.
        """
        self._device = device
        self._flat = self._allocate(numel)

    def _allocate(self, numel: int) -> Tensor:
        flat = torch.empty(numel, dtype=torch.float32)
        if self._device.type == "cuda" and numel:
            # Registered, not allocated as pinned: torch would round it up to a power of two.
            code = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), 4 * numel, 0))
            if code:
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=self._device)  # CUDA reports a failure once more with the next kernel
                raise RuntimeError(f"cudaHostRegister: error {code}")
        return flat

    def release(self) -> None:
        """Lets go of the memory; not to be filled again."""
        if self._device.type == "cuda" and self._flat.numel():
            torch.cuda.cudart().cudaHostUnregister(self._flat.data_ptr())

    def of(self, slices: Sequence[TensorSlice]) -> list[TensorSlice]:
        """The same slices with their numbers as they are now."""
        needed = sum(piece.stop - piece.start for piece in slices)
        if needed > self._flat.numel():
            self.release()
            self._flat = self._allocate(needed)
        copied, start = [], 0
        for piece in slices:
            stop = start + piece.stop - piece.start
            copied.append(replace(piece, tensor=self._flat[start:stop].copy_(piece.tensor, non_blocking=True)))
            start = stop
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copied


def _copy_in_host_memory(
    run: RunConfig, ctx: ParallelContext, coordinator: Coordinator, disks: Disks, sizes: list[int]
) -> HostCopy | None:
    """Memory for copies on every rank; None on all of them where the run, or a machine's memory, has no room for it."""
    host, available = disks.hosts[ctx.rank], available_bytes()
    needed = sum(size for size, other in zip(sizes, disks.hosts, strict=True) if other == host)
    reason = None
    if not run.output.async_save:
        reason = "output.async_save is off"
    elif available is not None and needed > _SHARE_OF_MEMORY * available:
        reason = f"{host} has {size_text(available)} of memory available, copies need {size_text(needed)}"
    obstacle = next(filter(None, coordinator.gather("memory for copies", reason)), None)
    copy = None
    if obstacle is None:
        try:
            copy = HostCopy(sizes[ctx.rank] // 4, ctx.device)
        except (RuntimeError, MemoryError) as error:
            reason = f"{host} refuses {size_text(sizes[ctx.rank])} of memory for a copy ({error})"
        obstacle = next(filter(None, coordinator.gather("memory for copies", reason)), None)
    if obstacle is not None:
        log.info("a checkpoint has %s; training waits while one is written: %s", size_text(sum(sizes)), obstacle)
        return None
    log.info("a checkpoint has %s and is written while training goes on, from a copy that takes %s of the %s of memory "
             "available on %s", size_text(sum(sizes)), size_text(needed),
             "unknown amount" if available is None else size_text(available), host)
    return copy
