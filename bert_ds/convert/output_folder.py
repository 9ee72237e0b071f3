"""An output folder that is there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import INCOMPLETE, REPLACED
from bert_ds.errors import CheckpointError


@contextmanager
def output_folder(out: Path, *, source: Path, force: bool, marker: str) -> Iterator[Path]:
    """Yields an empty folder beside `out`; it becomes `out` at the end, or goes if anything fails.

    Args:
        out: the folder to make.
        source: what is converted; `out` may neither be, hold nor lie in it.
        force: replace `out` where it exists and holds the file `marker`, that is, where it is an earlier output.
        marker: a file that only an earlier output has.

    Raises:
        CheckpointError: `out` exists and may not be replaced, overlaps `source`, or cannot be written.
    """
    out, source = out.resolve(), source.resolve()
    check_output(out, source, force=force, marker=marker)
    incomplete, replaced = out.with_name(out.name + INCOMPLETE), out.with_name(out.name + REPLACED)
    with files.os_errors_reported("OUT", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        files.remove_folder(incomplete)
        incomplete.mkdir()
        try:
            yield incomplete
            files.sync_folder(incomplete)
            if out.exists():
                files.remove_folder(replaced)
                files.rename_durably(out, replaced)
            files.rename_durably(incomplete, out)
            files.remove_folder(replaced)
        finally:
            files.remove_folder(incomplete)


def check_output(out: Path, source: Path, *, force: bool, marker: str) -> None:
    """What `output_folder` checks before it writes, for commands that write much later; takes resolved paths."""
    if out == source or out in source.parents or source in out.parents:
        raise CheckpointError.of("OUT", out, f"overlaps the checkpoint {source}", "write to a folder outside of it")
    if not out.exists():
        return
    if not force:
        raise CheckpointError.of("OUT", out, "exists already", "choose another folder, or replace it with --force")
    if not out.is_dir() or not ((out / marker).is_file() or not any(out.iterdir())):
        raise CheckpointError.of("OUT", out, f"is no earlier output (it has no {marker}); --force does not replace it",
                                 "choose another folder, or remove this one yourself")
