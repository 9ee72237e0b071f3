"""Whether torch.compile works here."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from bert_ds.compat import missing_compiler
from bert_ds.diagnosis.finding import Finding, Settings


def check_compiler(_settings: Settings) -> Sequence[Finding]:
    """One row: a small function is compiled and compared with itself."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if missing := missing_compiler(device):
        return [Finding(check="compiler", verdict="warning", found=f"torch.compile lacks {missing}",
                        repair="install it (apt-get install g++, pip install triton), or train without --compile")]
    started = time.monotonic()
    x = torch.linspace(-3, 3, 4096, device=device)
    try:
        with tempfile.TemporaryDirectory() as cache:  # a cached result would hide a compiler that has gone
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            result = torch.compile(_function)(x)
    except Exception as error:  # noqa: BLE001 - a broken tool chain raises whatever it likes
        reason = str(error).strip().partition("\n")[0][:200]
        return [Finding(check="compiler", verdict="warning", repair="train without --compile, or mend the compiler",
                        found=f"torch.compile fails: {type(error).__name__}: {reason}")]
    seconds = time.monotonic() - started
    if not torch.allclose(result, _function(x), atol=1e-5):
        return [Finding(check="compiler", verdict="problem", found="torch.compile computes something else",
                        repair="train without --compile; another version of torch or of the compiler may do")]
    return [Finding(check="compiler", verdict="fine", found=f"torch.compile works on {device} ({seconds:.0f} s)",
                    figures={"seconds": round(seconds, 1)})]


def _function(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) * x + 1
