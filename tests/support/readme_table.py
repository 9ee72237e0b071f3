"""Tables of a README that are made of the code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReadmeTable:
    """The part of a README between two markers."""

    readme: Path
    begin: str
    end: str
    """Each marker is a line of its own, with its line break."""

    def shown(self) -> str:
        """What the README shows."""
        return self.readme.read_text(encoding="utf-8").split(self.begin)[1].split(self.end)[0]

    def write(self, text: str) -> None:
        """Lets the README show `text`."""
        before, _, rest = self.readme.read_text(encoding="utf-8").partition(self.begin)
        self.readme.write_text(before + self.begin + text + self.end + rest.partition(self.end)[2], encoding="utf-8")
