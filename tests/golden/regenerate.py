"""Writes the golden curves anew: `python tests/golden/regenerate.py`. On purpose only; the commit says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent / "support")]

from tiny_runs import Case, reference  # noqa: E402

CURVES = HERE / "curves.json"
CASES = {
    "pre-LN": Case(steps=12),
    "post-LN": Case(steps=12, norm="post"),
    "masked LM only": Case(steps=12, binary_head=False),
    "mean of micro-batch means": Case(steps=12, normalization="micro_batch", micro_batch=4),
}


def curves() -> dict[str, dict[str, list[float]]]:
    """Losses and gradient norms of every case, in plain torch in one process."""
    found = {name: reference(case)[0] for name, case in CASES.items()}
    return {name: {"losses": outcome.losses, "norms": outcome.norms} for name, outcome in found.items()}


if __name__ == "__main__":
    CURVES.write_text(json.dumps(curves(), indent=1) + "\n")
