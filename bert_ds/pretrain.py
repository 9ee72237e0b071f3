"""Pretrains BERT: started by `deepspeed bert_ds/pretrain.py ...`, torchrun, srun, mpirun, or python for one process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Python put this file's folder on the path, where our modules would shadow others; its parent belongs there.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bert_ds.cli.data_files import missing_data, unusable_folders
from bert_ds.cli.dry_run import dry_run_text
from bert_ds.cli.launcher import ProcessPlace, process_place
from bert_ds.cli.resolve import ResolvedRun, resolve_run
from bert_ds.cli.saved_settings import SavedSettings
from bert_ds.compat import import_deepspeed
from bert_ds.config.output import OutputConfig
from bert_ds.errors import EXIT_DONE, ConfigError, DataError, UserError, raise_if_any, tell
from bert_ds.log import configure_logging

log = logging.getLogger("bert_ds.pretrain")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        place = process_place(os.environ)
    except ConfigError as error:
        tell(error)
        return error.exit_code
    configure_logging(rank=place.rank)
    try:
        # Settings are checked before torch is imported: a misspelt flag should not take seconds to be told.
        resolved = resolve_run(arguments, world_size=place.world_size, saved_settings=_saved_settings)
        if resolved.options.dry_run:
            print(dry_run_text(resolved))
            return EXIT_DONE
        return _train(resolved, place)
    except UserError as error:
        if place.local_rank == 0:
            tell(error)
        return error.exit_code


def _saved_settings(output: OutputConfig) -> SavedSettings:
    from bert_ds.checkpoint.saved_settings import saved_settings  # noqa: PLC0415 - imports torch

    return saved_settings(output)


def _train(resolved: ResolvedRun, place: ProcessPlace) -> int:
    raise_if_any(DataError, missing_data(resolved.config.data))
    raise_if_any(ConfigError, unusable_folders(resolved.config.output))
    import_deepspeed()
    from bert_ds.training.job import prepare, run_job  # noqa: PLC0415 - imports torch and DeepSpeed

    for remark in resolved.remarks:
        log.info(remark)
    return run_job(prepare(resolved.config, place))


if __name__ == "__main__":
    sys.exit(main())
