"""Exports to Hugging Face's format while training goes on."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import bert_ds
from bert_ds.checkpoint.format import tag_for

log = logging.getLogger(__name__)


@dataclass
class _Export:
    out: Path
    process: subprocess.Popen[bytes]
    errors: IO[bytes]


class PeriodicExport:
    """Exports checkpoints of a run, each by a process of its own that reads the files: training neither waits nor
    lends it memory of its device. Whatever goes wrong is told and ends nothing. For the rank that leads the run.
    """

    def __init__(self, save_dir: Path, every: int) -> None:
        self._save_dir, self._every = save_dir, every
        self._running: _Export | None = None

    def after_save(self, step: int) -> None:
        """To be called when the checkpoint of `step` is complete; starts its export where it is due."""
        if step % self._every:
            return
        tag = tag_for(step)
        out = self._save_dir / f"hf_{tag}"
        if self._running is not None and self._running.process.poll() is None:
            log.warning("checkpoint %s is not exported: %s is still being written", tag, self._running.out)
            return
        self._tell()
        try:
            self._running = _start(self._save_dir / tag, out)
        except OSError as error:
            log.warning("checkpoint %s is not exported: %s", tag, error)

    def finish(self) -> None:
        """Waits for an export that is under way."""
        if self._running is not None:
            if self._running.process.poll() is None:
                log.info("waiting for the export %s", self._running.out)
            self._running.process.wait()
        self._tell()

    def _tell(self) -> None:
        """Says how the export that has ended came out."""
        ended, self._running = self._running, None
        if ended is None:
            return
        ended.errors.seek(0)
        text = " ".join(ended.errors.read().decode(errors="replace").split())
        ended.errors.close()
        if ended.process.returncode == 0:
            log.info("exported %s", ended.out)
        else:
            log.warning("the export %s has failed, training goes on: %s", ended.out,
                        text or f"exit code {ended.process.returncode}")


def _start(checkpoint: Path, out: Path) -> _Export:
    """The command that exports `checkpoint`, without devices, in a session that signals to the run do not reach."""
    root = str(Path(bert_ds.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "",
                   "OMP_NUM_THREADS": "1"}
    errors = tempfile.TemporaryFile()
    command = [sys.executable, "-m", "bert_ds.convert", "to-hf", str(checkpoint), str(out), "--force", "--no-verify"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=errors, start_new_session=True)
    return _Export(out, process, errors)
