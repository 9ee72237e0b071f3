"""What is declared is what is imported, the wheel carries the recipes, and run.sh sets up, repairs and refuses."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Distributions whose modules have another name.
MODULES = {"pyyaml": "yaml", "transformer_engine": "transformer_engine"}


def setup_keyword(name: str) -> ast.expr:
    call = next(node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup")
    return next(keyword.value for keyword in call.keywords if keyword.arg == name)


def imported_modules() -> set[str]:
    """Top-level modules that the package imports, wherever in a file."""
    found: set[str] = set()
    for path in (ROOT / "bert_ds").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            # torch.utils.tensorboard is a thin layer over the tensorboard package.
            found |= {"tensorboard" if name == "torch.utils.tensorboard" else name.partition(".")[0] for name in names}
    return found - set(sys.stdlib_module_names) - {"bert_ds"}


def test_requirements_are_what_the_package_imports() -> None:
    requirements = ast.literal_eval(setup_keyword("install_requires"))
    names = {re.split(r"[<>=\[]", requirement)[0] for requirement in requirements}
    optional = {"pyarrow", "transformers", "transformer_engine", "zstandard"}
    assert {MODULES.get(name, name) for name in names} == imported_modules() - optional


def test_no_module_beside_the_commands_shadows_a_package() -> None:
    """`deepspeed bert_ds/pretrain.py` puts bert_ds/ itself first on the import path."""
    ours = {path.stem for path in (ROOT / "bert_ds").glob("*.py")} | {path.parent.name for path in
                                                                     (ROOT / "bert_ds").glob("*/__init__.py")}
    others = {"datasets", "deepspeed", "evaluate", "numba", "numpy", "optimizer", "safetensors", "tokenizers", "torch",
              "transformers", "triton", "yaml"} | set(sys.stdlib_module_names)
    assert not ours & others


@pytest.mark.parametrize("layer", ["data", "model", "convert", "checkpoint", "cli", "parallel", "ops"])
def test_a_layer_works_without_deepspeed(layer: str) -> None:
    """Importing every module of these layers does not start DeepSpeed, which takes seconds and looks for devices."""
    code = (f"import importlib, pkgutil, sys, bert_ds.{layer} as layer\n"
            f"for found in pkgutil.walk_packages(layer.__path__, 'bert_ds.{layer}.'):\n"
            "    found.name.endswith('__main__') or importlib.import_module(found.name)\n"
            "sys.exit('deepspeed' in sys.modules or 'transformers' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_built_package_carries_recipes_and_configurations(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("bert_ds", "recipes", "ds_configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "setup.py", "-q", "build", "--build-lib", str(tmp_path / "built")], cwd=source,
                   check=True, capture_output=True, timeout=120)
    shipped = tmp_path / "built" / "bert_ds" / "_shipped"
    for folder, patterns in (("recipes", ("*.yaml", "*.sh", "*.py")), ("recipes/finetuning", ("*.py",)),
                             ("ds_configs", ("*.json",))):
        expected = sorted(path.name for pattern in patterns for path in (ROOT / folder).glob(pattern))
        assert sorted(path.name for path in (shipped / folder).iterdir() if path.is_file()) == expected
        assert expected
    found = subprocess.run(
        [sys.executable, "-c", "from bert_ds.cli.shipped_files import find_file, shipped_names\n"
         "print(find_file('ds_configs/tiny.json'), 'tiny' in shipped_names())"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "built")}, check=True, capture_output=True,
        text=True).stdout
    assert found.strip() == f"{shipped / 'ds_configs' / 'tiny.json'} True"


# A python3 that makes a venv out of copies of itself, notes what pip is asked for, and leaves the rest to the real one.
FAKE_PYTHON = """#!/usr/bin/env bash
note() {{ echo "$*" >>"{notes}"; }}
case "$1 $2" in
"-m venv")
    note venv "${{@:3}}"
    target="${{@: -1}}"; mkdir -p "$target/bin"; cp "$0" "$target/bin/python" ;;
"-m pip")
    note pip "${{@:3}}"
    if [[ -e "{broken}" ]]; then echo "line before"; echo "no space left on device"; exit 1; fi ;;
"-m bert_ds.demo" | "-m pytest") note "$@" ;;
"-c import sys"*) exit {too_old} ;;
"-c "*) ;;
"- 2.6") [[ -e "{has_torch}" ]] ;;
*) exec {real} "$@" ;;
esac
"""


class Sandbox:
    """A checkout that holds run.sh and setup.py, with an interpreter that installs nothing."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "check out"
        self.root.mkdir()
        self.notes = folder / "notes"
        self.broken = folder / "broken"
        self.torch = folder / "torch"
        self.python = folder / "python3"
        for name in ("run.sh", "setup.py"):
            shutil.copy(ROOT / name, self.root)
        self.write_python()

    def write_python(self, *, too_old: bool = False) -> None:
        self.python.write_text(FAKE_PYTHON.format(notes=self.notes, broken=self.broken, has_torch=self.torch,
                                                  too_old=int(too_old), real=sys.executable))
        self.python.chmod(0o755)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self.root / "run.sh"), *arguments], env=os.environ | {"PYTHON": str(self.python)},
                              cwd="/", capture_output=True, text=True, timeout=60, check=False)

    def noted(self) -> list[str]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        self.notes.unlink(missing_ok=True)
        return lines


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def full_set_up(sandbox: Sandbox) -> list[str]:
    return [f"venv {sandbox.root}/.venv", "pip install torch==2.13.0",
            f"pip install --use-pep517 -e {sandbox.root}[hf,dev]"]


def test_set_up_runs_once_and_jobs_follow_it(sandbox: Sandbox) -> None:
    assert sandbox.run("setup").returncode == 0
    assert sandbox.noted() == full_set_up(sandbox)
    assert sandbox.run("setup").returncode == 0
    assert sandbox.noted() == []
    assert sandbox.run("test", "-k", "a b").returncode == 0
    assert sandbox.noted() == ["-m pytest -k a b"]
    assert sandbox.run().returncode == 0
    assert sandbox.run("--work-dir", "there").returncode == 0
    assert sandbox.noted() == ["-m bert_ds.demo", "-m bert_ds.demo --work-dir there"]


def test_an_installed_torch_is_used(sandbox: Sandbox) -> None:
    sandbox.torch.touch()
    assert "using the torch that is installed already" in sandbox.run("setup").stdout
    assert sandbox.noted() == [f"venv --system-site-packages {sandbox.root}/.venv",
                               f"pip install --use-pep517 -e {sandbox.root}[hf,dev]"]


def test_a_failed_set_up_shows_the_end_of_its_log_and_starts_over(sandbox: Sandbox) -> None:
    sandbox.broken.touch()
    failed = sandbox.run("setup")
    assert failed.returncode == 2
    assert "no space left on device" in failed.stderr and "error: set-up failed" in failed.stderr
    sandbox.noted()
    sandbox.broken.unlink()
    (sandbox.root / ".venv" / "half a package").touch()
    repaired = sandbox.run("setup")
    assert repaired.returncode == 0 and "interrupted: starting over" in repaired.stdout
    assert sandbox.noted() == full_set_up(sandbox)
    assert not (sandbox.root / ".venv" / "half a package").exists()


def change_requirements(sandbox: Sandbox) -> None:
    with (sandbox.root / "setup.py").open("a") as file:
        file.write("# one more\n")


def lose_interpreter(sandbox: Sandbox) -> None:
    (sandbox.root / ".venv" / "bin" / "python").unlink()


@pytest.mark.parametrize("change", [change_requirements, lose_interpreter])
def test_set_up_follows_changes(sandbox: Sandbox, change: Callable[[Sandbox], None]) -> None:
    sandbox.run("setup")
    sandbox.noted()
    change(sandbox)
    assert sandbox.run("setup").returncode == 0
    assert sandbox.noted() == full_set_up(sandbox)


def test_a_moved_checkout_is_set_up_anew(sandbox: Sandbox) -> None:
    sandbox.run("setup")
    sandbox.noted()
    sandbox.root = sandbox.root.rename(sandbox.root.with_name("moved"))
    assert "the folder has changed" in sandbox.run("setup").stdout
    assert sandbox.noted() == full_set_up(sandbox)


def test_bad_interpreters_and_jobs_are_refused(sandbox: Sandbox) -> None:
    sandbox.write_python(too_old=True)
    for arguments, message in ((("setup",), "3.10 or newer is needed"), (("tset",), "unknown job 'tset'")):
        refused = sandbox.run(*arguments)
        assert refused.returncode == 2 and message in refused.stderr
    sandbox.python.unlink()
    refused = sandbox.run("setup")
    assert refused.returncode == 2 and "was not found" in refused.stderr
    assert not (sandbox.root / ".venv").exists()
