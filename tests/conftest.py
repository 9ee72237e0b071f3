"""What every test relies on."""

from __future__ import annotations

import logging
import os

import pytest

# Tests download nothing; whatever would try to says so at once.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def logging_not_set_up() -> None:
    """Commands that ran before, in fixtures too, have set the package's logger up; a test finds it as a library's."""
    logger = logging.getLogger("bert_ds")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
