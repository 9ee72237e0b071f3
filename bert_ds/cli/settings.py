"""Values on their way to a RunConfig, each with the place it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

from bert_ds.cli.coerce import WrongTypeError, coerce
from bert_ds.cli.fields import REQUIRED, default_of, type_of
from bert_ds.cli.nearest import nearest
from bert_ds.errors import Problem

DEFAULT = "default"
"""Origin of a value that nobody gave."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """One value that somebody gave."""

    value: Any
    origin: str
    """File or flag."""
    written: str
    """Name of the setting there: `schedule.train_iters`, `optimizer.params.lr`, `--lr`."""


@dataclass
class Settings:
    """Values by dotted name, what is wrong with them, and the remarks that the log shows."""

    values: dict[str, Given] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    rejected: set[str] = field(default_factory=set)
    """Settings whose value in a file is of the wrong type."""

    def give(self, setting: str, value: object, *, origin: str, written: str) -> None:
        """Sets a value coming from a file; one of the wrong type becomes a problem."""
        try:
            good = coerce(value, type_of(setting))
        except WrongTypeError as wrong:
            self.rejected.add(setting)
            self.problems.append(wrong_type(f"{origin}: {written}", value, wrong, setting))
        else:
            self.values[setting] = Given(value=good, origin=origin, written=written)

    def override(self, setting: str, value: Any, flag: str) -> None:
        """Sets a value coming from a flag, with a remark when it differs from what a file says."""
        before = self.values.get(setting)
        if before is not None and before.value != value:
            self.remarks.append(f"{flag} {show(value)} overrides {before.written}={show(before.value)} "
                                f"of {before.origin}")
        self.values[setting] = Given(value=value, origin=flag, written=flag)

    def is_from_flag(self, setting: str) -> bool:
        given = self.values.get(setting)
        return given is not None and given.origin == given.written


def wrong_type(written: str, value: object, wrong: WrongTypeError, setting: str | None = None) -> Problem:
    """The problem of a value that is not what `wrong` expected; the repair adds what stands there otherwise.

    written: name of the setting as it was given; setting: its dotted name, None for what is no setting of a run.
    """
    repair = "correct it"
    if setting is not None:
        default = default_of(setting)
        match = nearest(str(value), map(str, get_args(type_of(setting))))
        if match:
            repair = f"did you mean {match}"
        elif default is not REQUIRED:
            repair += ", or leave it out" + (f" for {show(default)}" if default not in (None, ()) else "")
    return Problem(written, value, f"is not {wrong}", repair)


def show(value: object) -> str:
    """A value as a user would write it."""
    if isinstance(value, tuple | list):
        return " ".join(map(show, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
