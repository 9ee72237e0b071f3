"""One self-contained page: curves, a summary, and the settings in which runs differ. Nothing is loaded from a network.

The page's script (page.js) draws what stands in the page as JSON; its format is that of `page_data`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from bert_ds.data.atomic_file import atomic_text_file
from bert_ds.errors import DataError
from bert_ds.reporting.panels import PARTS, differing_settings, not_finite, shown_panels
from bert_ds.reporting.runs import Part, Run
from bert_ds.reporting.summary import summary

_DIGITS = 6
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<script id="data" type="application/json">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def write_page(runs: Sequence[Run], output: Path) -> None:
    """Writes the page of `runs`; it appears complete or not at all.

    Raises:
        DataError: it cannot be written there.
    """
    try:
        with atomic_text_file(output) as file:
            file.write(page(runs))
    except OSError as error:
        raise DataError.of("--output", output, f"cannot be written ({error.strerror})",
                           "name a file in a folder that you may write to") from error


def page(runs: Sequence[Run]) -> str:
    """The page's text."""
    here = files("bert_ds.reporting")
    # Within a script element, no name may close it.
    data = json.dumps(page_data(runs), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return _PAGE.format(title="Training report", style=(here / "page.css").read_text(encoding="utf-8"), data=data,
                        script=(here / "page.js").read_text(encoding="utf-8"))


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """All that the page shows, of JSON's own types; a value that is not finite is null, which is a gap."""
    panels = shown_panels(runs)
    keys = [panel.key for panel in panels]
    return {
        "panels": [asdict(panel) for panel in panels],
        "runs": [{"name": run.name, "restarts": run.restarts, "notFinite": list(not_finite(run)),
                  **{part: _columns(run, part, keys) for part in PARTS}} for run in runs],
        "summary": summary(runs),
        "settings": [[name, *map(_shown, values)] for name, values in differing_settings(runs)],
        "withoutSettings": [run.name for run in runs if not run.settings],
    }


def _columns(run: Run, part: Part, keys: Sequence[str]) -> dict[str, Any]:
    """Columns of equal length by key, and the places on both axes; a key that is absent throughout is left out.

    In a column, null is a gap and false is a value that was not logged, over which the curve goes on.
    """
    records = run.records(part)
    columns = {key: [_number(record.get(key)) for record in records] for key in keys}
    return {"iteration": [record["iteration"] for record in records],
            "samples": [record.get("consumed_samples") for record in records],
            "values": {key: column for key, column in columns.items() if any(value is not False for value in column)}}


def _number(value: float | None) -> float | bool | None:
    if value is None:
        return False
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _shown(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)
