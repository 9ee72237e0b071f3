"""What every test relies on."""

from __future__ import annotations

import os

# Tests download nothing; whatever would try to says so at once.
os.environ["HF_HUB_OFFLINE"] = "1"
