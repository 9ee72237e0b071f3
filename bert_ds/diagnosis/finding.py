"""What a check says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Verdict = Literal["fine", "not applicable", "warning", "problem"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From the best to the worst."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row of the table."""

    check: str
    verdict: Verdict
    found: str
    """What was seen, in a line."""
    repair: str = ""
    """What to do about a warning or a problem."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What was measured, of JSON's own types; the unit ends the name."""

    def __post_init__(self) -> None:
        assert self.repair or self.verdict in ("fine", "not applicable"), self.check


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user says of the run to come."""

    save_dir: str
    """Where its checkpoints will go."""


Check = Callable[[Settings], Sequence[Finding]]


def worst(findings: Sequence[Finding]) -> Verdict:
    """The worst verdict of all."""
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default="fine")
