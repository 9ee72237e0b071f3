"""Logging, configured once by a command; the rank is a filter, not a condition at every call."""

from __future__ import annotations

import logging
import sys

FORMAT = "[%(asctime)s] %(message)s"
FORMAT_WITH_RANK = "[%(asctime)s] [rank %(rank)d] %(levelname)s: %(message)s"


class _RankFormatter(logging.Formatter):
    """Plain lines for INFO, lines with rank and level for warnings and errors."""

    def __init__(self, rank: int) -> None:
        super().__init__(FORMAT, "%Y-%m-%d %H:%M:%S")
        self._rank = rank
        self._with_rank = logging.Formatter(FORMAT_WITH_RANK, "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno < logging.WARNING:
            return super().format(record)
        record.rank = self._rank
        return self._with_rank.format(record)


class _OnRank(logging.Filter):
    """Keeps INFO from the reporting rank only, WARNING and above from every rank."""

    def __init__(self, keep_info: bool) -> None:
        super().__init__()
        self._keep_info = keep_info

    def filter(self, record: logging.LogRecord) -> bool:
        return self._keep_info or record.levelno >= logging.WARNING


def configure_logging(*, rank: int = 0, reporting_rank: int = 0) -> None:
    """Sends the package's log to stdout; INFO only from `reporting_rank`."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_RankFormatter(rank))
    handler.addFilter(_OnRank(keep_info=rank == reporting_rank))
    logger = logging.getLogger("bert_ds")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
