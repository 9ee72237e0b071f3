"""The table of what is proved, made of the tests that prove it.

A test says what it proves, and how closely, by names of tolerances.py or a word:

    @pytest.mark.proves("one bit that differs between copies stops the run", "EXACT")

`python tests/support/proofs.py` writes the table into bert_ds/README.md; tests/test_proofs.py fails where they differ.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tolerances
from readme_table import ReadmeTable

ROOT = Path(__file__).resolve().parents[2]
IN_README = ReadmeTable(ROOT / "bert_ds" / "README.md", "<!-- proofs: python tests/support/proofs.py -->\n",
                        "<!-- end of proofs -->\n")


@dataclass(frozen=True)
class Proof:
    """One claim and the test behind it."""

    claim: str
    closeness: tuple[str, ...]
    test: str
    """file::function, from tests/ on."""
    tiers: tuple[str, ...]
    """`long` and `gpu` where the test is not among the fast ones."""


def proofs() -> list[Proof]:
    """All claims, in the order of files and tests."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [proof for file in files for proof in _proofs_of(file)]


def table() -> str:
    """The table in Markdown."""
    rows = [f"| {proof.claim} | {' / '.join(map(_shown, proof.closeness))} | `{proof.test}`"
            f"{''.join(f' ({tier})' for tier in proof.tiers)} |" for proof in proofs()]
    return "\n".join(["| claim | how closely | test |", "|---|---|---|", *rows]) + "\n"


def _proofs_of(file: Path) -> Iterator[Proof]:
    tree = ast.parse(file.read_text())
    whole_file = {mark for node in tree.body if isinstance(node, ast.Assign)
                  and [ast.unparse(target) for target in node.targets] == ["pytestmark"]
                  for mark in ("long", "gpu") if f"pytest.mark.{mark}" in ast.unparse(node.value)}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        marks = [ast.unparse(decorator) for decorator in node.decorator_list]
        tiers = tuple(tier for tier in ("long", "gpu") if tier in whole_file or f"pytest.mark.{tier}" in marks)
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.proves":
                claim, *closeness = (ast.literal_eval(argument) for argument in decorator.args)
                test = f"{file.relative_to(ROOT / 'tests')}::{node.name}"
                yield Proof(claim, tuple(closeness), test, tiers)


def _shown(name: str) -> str:
    """A tolerance by its value; a word as it is."""
    if not name.isupper():
        return name
    tolerance = getattr(tolerances, name)
    if name == "EXACT":
        return "exact"
    if isinstance(tolerance, float):
        return _short(tolerance)
    if "rtol" in tolerance:
        return _short(tolerance["rtol"])
    return ", ".join(_short(value) + (f" ({str(key).removeprefix('torch.')})" if key != "rel" else "")
                     for key, value in tolerance.items())


def _short(value: float) -> str:
    """1e-5 and 1.5e-2."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


if __name__ == "__main__":
    IN_README.write(table())
