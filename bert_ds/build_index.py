"""Builds the sample index of a run in advance, so that none of its many devices waits for it.

    python -m bert_ds.build_index --deepspeed_config ds_configs/340m.json --data-path PREFIX --world-size 128

Takes the arguments of pretrain.py, and --world-size where batch sizes depend on the number of ranks. The run finds
what this has written when it is given the same arguments and the same --data-cache-path.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bert_ds.checkpoint.reader import Checkpoint
from bert_ds.checkpoint.saved_settings import saved_settings
from bert_ds.checkpoint.starting_point import folder_to_start_from
from bert_ds.cli.data_files import data_prefixes, missing_data
from bert_ds.cli.resolve import resolve_run
from bert_ds.config.data import DataConfig
from bert_ds.config.run import RunConfig
from bert_ds.data.run_datasets import datasets_of_run
from bert_ds.data.sample_order import planned_samples
from bert_ds.data.splits import SPLITS
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import EXIT_DONE, DataError, raise_if_any, run_command
from bert_ds.log import configure_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(argv):
        print(f"{__doc__.strip()}\n\nFlags: python bert_ds/pretrain.py --help")
        return EXIT_DONE
    configure_logging()
    # A dry run is what takes --world-size: nothing is started here.
    resolved = resolve_run([*argv, "--dry-run"], world_size=1, saved_settings=saved_settings)
    run = _with_planned_order(resolved.config)
    raise_if_any(DataError, missing_data(run.data))
    before = _cached(run.data)
    datasets = datasets_of_run(run, Vocabulary.of_run(run.data))
    for split in SPLITS:
        dataset = getattr(datasets, split)
        print(f"{split}: {'not used by this run' if dataset is None else f'{len(dataset):,} samples are ready'}")
    written = [path for path, stamp in _cached(run.data).items() if before.get(path) != stamp]
    for path in written:
        print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")
    if not written:
        print("nothing was left to do: " + " ".join(str(folder) for folder in _cache_folders(run.data)))
    sys.stdout.flush()
    return EXIT_DONE


def _with_planned_order(run: RunConfig) -> RunConfig:
    """The run with the sample order of the checkpoint that it goes on from, if any."""
    start = folder_to_start_from(replace(run.output, exit_on_missing_checkpoint=False))
    saved = Checkpoint.open(start[0]).manifest.config if start and start[1] else None
    return replace(run, data=replace(run.data, planned_samples=planned_samples(run, saved)))


def _cache_folders(data: DataConfig) -> list[Path]:
    if data.data_cache_path is not None:
        return [Path(data.data_cache_path)]
    return list(dict.fromkeys(Path(prefix).parent / "cache" for prefix in data_prefixes(data)))


def _cached(data: DataConfig) -> dict[Path, int]:
    """The cached arrays with the time of their last change."""
    return {path: path.stat().st_mtime_ns for folder in _cache_folders(data) for path in sorted(folder.glob("*.npy"))}


if __name__ == "__main__":
    sys.exit(main())
