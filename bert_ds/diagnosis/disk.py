"""Room and speed of the disk that checkpoints go to."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bert_ds.diagnosis.finding import Finding, Settings

MIB, GB = 2**20, 10**9
SLOW_MB_S = 100
CHECKPOINT_340M_GB = 4.0
"""12 bytes a parameter: fp32 weight and both moments."""
_BLOCK = 4 * MIB
_BLOCKS = 64
_WRITING_S = 5.0


def check_disk(settings: Settings) -> Sequence[Finding]:
    """One row: whether the folder can be written, what is free, how fast it is written and read."""
    folder = Path(settings.save_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        write_mb_s, read_mb_s = _speed(folder, shutil.disk_usage(folder).free)
    except OSError as error:
        return [Finding(check="disk", verdict="problem", found=f"{folder} cannot be written ({error.strerror})",
                        repair="give --save a folder that you may write to, on a disk with room")]
    free = shutil.disk_usage(folder).free
    text = f"{folder}: {free / GB:,.1f} GB free, writes {write_mb_s:,.0f} MB/s, reads {read_mb_s:,.0f} MB/s"
    figures = {"free_gb": round(free / GB, 2), "write_mb_s": round(write_mb_s), "read_mb_s": round(read_mb_s)}
    if free < 2 * CHECKPOINT_340M_GB * GB:
        return [Finding(check="disk", verdict="warning", figures=figures,
                        found=f"{text}; two checkpoints of 340m take {2 * CHECKPOINT_340M_GB:.0f} GB",
                        repair="make room, give --save another disk, or keep fewer checkpoints (keep_last)")]
    if write_mb_s < SLOW_MB_S:
        seconds = CHECKPOINT_340M_GB * 1e3 / write_mb_s
        return [Finding(check="disk", verdict="warning", figures=figures,
                        found=f"{text}: a checkpoint of 340m takes {seconds:.0f} s",
                        repair="give --save a faster disk, or save less often with --save-interval")]
    return [Finding(check="disk", verdict="fine", found=text, figures=figures)]


def _speed(folder: Path, free: int) -> tuple[float, float]:
    """MB/s of synced writing, and of reading back past the page cache.

    The file has no name, so that nothing is left behind, however this process ends.
    """
    block = os.urandom(_BLOCK)
    blocks = max(1, min(_BLOCKS, free // (4 * _BLOCK)))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started, written = time.monotonic(), 0
        for _ in range(blocks):
            file.write(block)
            os.fsync(file.fileno())
            written += _BLOCK
            if time.monotonic() - started > _WRITING_S:
                break
        writing_s = time.monotonic() - started
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started = time.monotonic()
        while file.read(_BLOCK):
            pass
        reading_s = time.monotonic() - started
    return written / 1e6 / writing_s, written / 1e6 / reading_s
