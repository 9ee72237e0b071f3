"""The tables of all flags, made of the code that reads them.

`python tests/support/flag_table.py` writes them into recipes/README.md; tests/cli/test_megatron_flags.py fails where
they differ.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from readme_table import ReadmeTable

from bert_ds.cli.argument_files import ARGUMENT_FILES
from bert_ds.cli.flags import GROUPS, TAKES_VALUE, Flag
from bert_ds.cli.megatron_flags import (
    ONLY,
    PREPROCESSING_IDLE,
    PREPROCESSING_REFUSED,
    REFUSED,
    VALUE_WITHOUT_EFFECT,
    WITHOUT_EFFECT,
    Only,
)
from bert_ds.cli.settings import show
from bert_ds.cli.virtual_stages import FLAG as VIRTUAL_STAGES

IN_README = ReadmeTable(
    Path(__file__).resolve().parents[2] / "recipes" / "README.md",
    "<!-- flags: python tests/support/flag_table.py -->\n", "<!-- end of flags -->\n")


def tables() -> str:
    """The tables in Markdown; flags of one outcome share a row."""
    settings = [(flag.name, _outcome(flag)) for flags in GROUPS.values() for flag in flags]
    settings += [(VIRTUAL_STAGES, "`parallel.pipeline_schedule` = dualpipev where it makes two stages of a rank")]
    settings += [(name, "the file's words stand for `--data-path`, or for `--train-data-path` and its like")
                 for name in ARGUMENT_FILES]
    idle = [*WITHOUT_EFFECT.items(), *VALUE_WITHOUT_EFFECT.items(), *_idle(ONLY)]
    return "\n".join([
        "| flag | setting |", "|---|---|", *_rows(settings), "",
        "| without effect | since |", "|---|---|", *_rows(idle), "",
        "| refused | since | instead |", "|---|---|---|", *_rows(_refused(REFUSED)), "",
        "Of those of its `tools/preprocess_data.py`, `bert_ds.preprocess_data` has the same and", "",
        "| without effect | since |", "|---|---|", *_rows(_idle(PREPROCESSING_IDLE)), "",
        "| refused | since | instead |", "|---|---|---|", *_rows(_refused(PREPROCESSING_REFUSED)), ""])


def _outcome(flag: Flag) -> str:
    if flag.constant is not TAKES_VALUE:
        return f"`{flag.setting}` = {show(flag.constant)}"
    item = "" if flag.item is None else f", value {flag.item + 1}"
    implied = "".join(f", `{setting}` = {show(value)}" for setting, value in flag.implies)
    return f"`{flag.setting}`{item}{implied}"


def _idle(flags: Mapping[str, Only]) -> list[tuple[str, str]]:
    return [(f"{name} {only.values[0]}", f"{only.why}; other values are refused") if only.values else (name, only.why)
            for name, only in flags.items()]


def _refused(flags: Mapping[str, tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, f"{why} | {instead}") for name, (why, instead) in flags.items()]


def _rows(outcomes: Iterable[tuple[str, str]]) -> list[str]:
    names = defaultdict(list)
    for name, outcome in outcomes:
        names[outcome].append(f"`{name}`")
    return [f"| {' '.join(flags)} | {outcome} |" for outcome, flags in names.items()]


if __name__ == "__main__":
    IN_README.write(tables())
