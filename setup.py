"""Packaging of bert_ds. Recipes and DeepSpeed configurations travel inside the wheel as `bert_ds/_shipped`."""

from __future__ import annotations

import ast
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SHIPPED = {"recipes": ("*.yaml", "*.sh", "*.py"), "recipes/finetuning": ("*.py",), "ds_configs": ("*.json",)}


def version() -> str:
    """`__version__` of the package, read without importing it."""
    for line in (ROOT / "bert_ds" / "__init__.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            return str(ast.literal_eval(line.partition("=")[2].strip()))
    raise RuntimeError("bert_ds/__init__.py has no __version__")


def shipped_files() -> list[Path]:
    """Recipes and DeepSpeed configurations, relative to the checkout."""
    return [
        path.relative_to(ROOT)
        for folder, patterns in SHIPPED.items()
        for pattern in patterns
        for path in sorted((ROOT / folder).glob(pattern))
    ]


class BuildWithShippedFiles(build_py):
    """Copies the files beside the package into the wheel; an editable install reads them where they are."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for path in shipped_files():
            target = Path(self.build_lib) / "bert_ds" / "_shipped" / path
            self.mkpath(str(target.parent))
            self.copy_file(str(ROOT / path), str(target))

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *map(str, shipped_files())]


# Needs nothing beyond torch, numpy and packaging; its wheels hold the compiled helpers.
ORACLE = 'megatron-core==0.16.1; sys_platform == "linux" and platform_machine == "x86_64"'

EXTRAS = {
    "te": ["transformer_engine[pytorch]>=2.12"],
    "hf": ["transformers>=4.57"],
    "zstd": ["zstandard>=0.22"],
    "parquet": ["pyarrow>=14"],
    "oracle": [ORACLE],
    "dev": [
        ORACLE,
        "hypothesis",
        "import-linter>=2.1",
        "mypy>=1.11",
        "pyarrow>=14",
        "pytest>=8",
        "pytest-timeout",
        "ruff>=0.12",
        "types-PyYAML",
        "zstandard>=0.22",
    ],
}

setup(
    name="bert_ds",
    version=version(),
    description="BERT pretraining on DeepSpeed's pipeline engine",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=find_packages(include=["bert_ds", "bert_ds.*"]),
    package_data={"bert_ds.reporting": ["page.css", "page.js"]},
    install_requires=[
        "deepspeed>=0.19.8,<0.20",
        "hjson",
        "matplotlib>=3.7",
        "numba>=0.60",
        "numpy>=1.26",
        "packaging",
        "pyyaml",
        "safetensors>=0.4.3",
        "sentencex>=1.0",
        "tensorboard",
        "tokenizers>=0.20",
        "torch>=2.6",
        "tqdm",
    ],
    extras_require=EXTRAS,
    cmdclass={"build_py": BuildWithShippedFiles},
)
