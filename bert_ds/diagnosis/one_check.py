"""Runs one check in this process: `python -m bert_ds.diagnosis.one_check bert_ds.diagnosis.disk:check_disk`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bert_ds.diagnosis.checks import Entry
from bert_ds.diagnosis.finding import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check that is named; writes its findings to --result, or prints them."""
    parser = argparse.ArgumentParser(prog="python -m bert_ds.diagnosis.one_check", description=__doc__)
    parser.add_argument("function", help="module:function")
    parser.add_argument("settings", nargs="?", default='{"save_dir": "."}', help="JSON")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args(argv)
    check = Entry("", options.function, 0, "").load()
    text = json.dumps([asdict(finding) for finding in check(Settings(**json.loads(options.settings)))], indent=1)
    if options.result is None:
        sys.stdout.write(text + "\n")
    else:
        options.result.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
