"""The only place that knows differences between versions of torch, DeepSpeed and Transformer Engine."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.version import Version

from bert_ds.errors import ConfigError

DEEPSPEED_FROM = Version("0.19.8")
DEEPSPEED_BELOW = Version("0.20")
TRANSFORMER_ENGINE = "pip install transformer_engine[pytorch], which needs an NVIDIA GPU"


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


def import_deepspeed(*, any_version: bool = False) -> ModuleType:
    """DeepSpeed, quiet, and without the CPU communication op that it would compile with a C++ compiler at start.

    Args:
        any_version: take one that this package does not train on, too.
    """
    if not any_version:
        check_deepspeed_version()
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor.* is deprecated",
                            category=FutureWarning)
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


def transformer_engine_version() -> Version | None:
    """Version of the installed Transformer Engine, without importing it; None where there is none."""
    found = installed_version("transformer_engine")
    return None if found is None else Version(found)


def check_transformer_engine(device_type: str) -> None:
    """Refuses to use Transformer Engine where it cannot run.

    Raises:
        ConfigError: it is not installed, does not load, or the run has no GPU.
    """
    import_transformer_engine()
    if device_type != "cuda":
        raise _transformer_engine_refused(f"Transformer Engine needs an NVIDIA GPU, and this run is on a {device_type}")


def import_transformer_engine() -> ModuleType:
    """`transformer_engine.pytorch`.

    Raises:
        ConfigError: it is not installed, or built for another PyTorch or CUDA than those here.
    """
    if transformer_engine_version() is None:
        raise _transformer_engine_refused("Transformer Engine is not installed")
    _share_cudnn()
    try:
        import transformer_engine.pytorch as te  # noqa: PLC0415
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise _transformer_engine_refused(
            f"Transformer Engine {transformer_engine_version()} does not load here ({error})") from error
    return te


def _share_cudnn() -> None:
    """Lets Transformer Engine load the cuDNN that PyTorch brought along, unless the user has named another.

    It would take the system's first, and parts of two versions in one process end in undefined symbols.
    """
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        cudnn = Path(folder) / "cudnn"
        if cudnn.is_dir() and not {"CUDNN_HOME", "CUDNN_PATH"} & set(os.environ):
            os.environ["CUDNN_HOME"] = str(cudnn)


def _transformer_engine_refused(reason: str) -> ConfigError:
    return ConfigError.of("model.transformer_impl", "transformer_engine", reason,
                          f"set it to local, or {TRANSFORMER_ENGINE}")


def attention_switches(names: Iterable[str]) -> dict[str, str]:
    """Those of the variables `names` that are set; they tell Transformer Engine which attention backends it may use."""
    return {name: os.environ[name] for name in names if name in os.environ}


def set_attention_switches(values: Mapping[str, str]) -> None:
    """Sets them for this process, which trains one model."""
    os.environ.update(values)


def fp8_autocast(
    te: ModuleType, *, enabled: bool, recipe: Any = None, group: Any = None
) -> AbstractContextManager[None]:
    """Transformer Engine's context in which its layers compute in FP8, by its name in this version."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe, fp8_group=group)


def missing_compiler(device_type: str) -> str | None:
    """What torch.compile lacks on this machine for `device_type`; None where it can compile."""
    if device_type == "cpu":
        return None if any(map(shutil.which, ("c++", "g++", "clang++"))) else "a C++ compiler (c++, g++ or clang++)"
    if importlib.util.find_spec("triton") is None:
        return "the package triton"
    return None if any(map(shutil.which, ("cc", "gcc", "clang"))) else "a C compiler (cc, gcc or clang)"
