"""The only place that knows differences between versions of torch and DeepSpeed."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from packaging.version import Version

from bert_ds.errors import ConfigError

DEEPSPEED_FROM = Version("0.19.8")
DEEPSPEED_BELOW = Version("0.20")


def installed_version(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_deepspeed_version() -> None:
    """Refuses a DeepSpeed whose pipeline engine is not the one this package is built on.

    Raises:
        ConfigError: DeepSpeed is missing, too old or too new.
    """
    found = installed_version("deepspeed")
    repair = f'pip install "deepspeed>={DEEPSPEED_FROM},<{DEEPSPEED_BELOW}"'
    if found is None:
        raise ConfigError.of("deepspeed", "not installed", "training runs on DeepSpeed's pipeline engine", repair)
    if Version(found) < DEEPSPEED_FROM:
        raise ConfigError.of("deepspeed", found, "is too old: versions before 0.19.3 scale the gradients of the early "
                             "stages wrongly under accumulation, without any error", repair)
    if not Version(found).release < DEEPSPEED_BELOW.release:
        raise ConfigError.of("deepspeed", found, "is newer than any version this package was tested with", repair)


def import_deepspeed() -> ModuleType:
    """DeepSpeed, quiet, and without the CPU communication op that it would compile with a C++ compiler at start."""
    check_deepspeed_version()
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.* is deprecated", category=FutureWarning)
    with quiet():
        import deepspeed  # noqa: PLC0415
        import deepspeed.ops  # noqa: PLC0415
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallows what libraries print to stdout while they are set up; errors still reach stderr."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
