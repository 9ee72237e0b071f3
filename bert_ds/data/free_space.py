"""Whether a disk has room for what is to be written."""

from __future__ import annotations

import shutil
from pathlib import Path

from bert_ds.errors import DataError


def check_free_space(output_prefix: str, needed: float, *, repair: str) -> None:
    """Raises DataError when the disk of `output_prefix` has less than `needed` bytes free."""
    folder = Path(output_prefix).absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError.of("--output-prefix", output_prefix, f"needs about {_size(needed)} where "
                           f"{_size(free)} are free on the disk of {folder}", repair)


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
