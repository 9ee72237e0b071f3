"""Lines that tell how fast the preprocessing goes and how long it will take."""

from __future__ import annotations

import logging
import time

_SECONDS_BETWEEN_REPORTS = 5.0

logger = logging.getLogger(__name__)


class Progress:
    """Logs a line when enough documents and seconds have passed since the last one."""

    def __init__(self, total_bytes: int | None, log_interval: int) -> None:
        """total_bytes: of the input as stored, None where unknown; log_interval: documents between two lines."""
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._start = self._reported_at = time.monotonic()
        self._text_bytes = 0
        self._reported_documents = 0

    def report(self, documents: int, *, text_bytes: int, bytes_read: int) -> None:
        """documents, bytes_read: so far, the latter as stored; text_bytes: since the last call."""
        self._text_bytes += text_bytes
        moment = time.monotonic()
        if (documents - self._reported_documents < self._log_interval
                or moment - self._reported_at < _SECONDS_BETWEEN_REPORTS):
            return
        seconds = moment - self._start
        logger.info("%s documents, %.0f MB of text, %.1f MB/s%s", f"{documents:,}", self._text_bytes / 1e6,
                    self._text_bytes / 1e6 / seconds, self._outlook(seconds, bytes_read))
        self._reported_at, self._reported_documents = moment, documents

    def _outlook(self, seconds: float, bytes_read: int) -> str:
        if not self._total_bytes or not bytes_read:
            return ""
        left = seconds * max(self._total_bytes - bytes_read, 0) / bytes_read
        return f", {bytes_read / self._total_bytes:.0%} read, {_duration(left)} left"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
