"""Versions of what the package is built on, against those that it wants."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from bert_ds.compat import check_deepspeed_version, installed_version
from bert_ds.diagnosis.finding import Finding, Settings
from bert_ds.errors import ConfigError

PYTHON = ">=3.10"
REQUIRED = {"deepspeed": ">=0.19.8,<0.20", "hjson": "", "matplotlib": ">=3.7", "numba": ">=0.60", "numpy": ">=1.26",
            "packaging": "", "pyyaml": "", "safetensors": ">=0.4.3", "sentencex": ">=1.0", "tensorboard": "",
            "tokenizers": ">=0.20", "torch": ">=2.6", "tqdm": ""}
OPTIONAL = {"transformers": (">=4.57", "exports are not compared with it"),
            "transformer_engine": (">=2.12", "FP8 and its kernels are not to be had")}
"""What setup.py asks for, and what its absence means."""


def check_versions(_settings: Settings) -> Sequence[Finding]:
    """Rows for Python, torch, DeepSpeed, transformers and Transformer Engine, and one for all others."""
    return [_python(), _required("torch"), _deepspeed(), *map(_optional, OPTIONAL), _others()]


def _python() -> Finding:
    found = platform.python_version()
    if SpecifierSet(PYTHON).contains(found, prereleases=True):
        return Finding(check="Python", verdict="fine", found=found)
    return Finding(check="Python", verdict="problem", found=f"{found}, and {PYTHON} is needed",
                   repair="make the environment with a newer python3")


def _complaint(package: str, wanted: str) -> str | None:
    """What is wrong with a package that the package needs, or None."""
    found = installed_version(package)
    if found is None:
        return f"{package} is not installed"
    return None if _suits(found, wanted) else f"{package} {found} is installed, and {wanted} is needed"


def _suits(found: str, wanted: str) -> bool:
    # A local label, as in 2.11.0a0+nv25.10, says where it was built; NVIDIA's images carry pre-releases.
    return SpecifierSet(wanted).contains(Version(found).base_version)


def _required(package: str) -> Finding:
    complaint = _complaint(package, REQUIRED[package])
    if complaint is None:
        return Finding(check=package, verdict="fine", found=str(installed_version(package)))
    return Finding(check=package, verdict="problem", found=complaint,
                   repair=f'pip install "{package}{REQUIRED[package]}"')


def _deepspeed() -> Finding:
    try:
        check_deepspeed_version()
    except ConfigError as error:
        [problem] = error.problems
        return Finding(check="DeepSpeed", verdict="problem", found=f"{problem.value}: {problem.reason}",
                       repair=problem.repair)
    return Finding(check="DeepSpeed", verdict="fine", found=str(installed_version("deepspeed")))


def _optional(package: str) -> Finding:
    wanted, consequence = OPTIONAL[package]
    found = installed_version(package)
    if found is None:
        return Finding(check=package, verdict="fine", found=f"not installed: {consequence}")
    if _suits(found, wanted):
        return Finding(check=package, verdict="fine", found=found)
    return Finding(check=package, verdict="warning", found=f"{found}, tested from {wanted.removeprefix('>=')} on",
                   repair=f'pip install "{package}{wanted}"')


def _others() -> Finding:
    names = [name for name in REQUIRED if name not in ("torch", "deepspeed")]
    bad = {name: text for name in names if (text := _complaint(name, REQUIRED[name]))}
    versions = ", ".join(f"{name} {installed_version(name)}" for name in names)
    if not bad:
        return Finding(check="other packages", verdict="fine", found=versions)
    return Finding(check="other packages", verdict="problem", found="; ".join(bad.values()),
                   repair="pip install " + " ".join(f'"{name}{REQUIRED[name]}"' for name in bad))
