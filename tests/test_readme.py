"""What the front page says can be typed can be typed, and what it names is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bert_ds.cli.resolve import resolve_run

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def shell_commands() -> list[str]:
    text = "".join(block for language, block in BLOCKS if language == "bash").replace("\\\n", "")
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """Variables in front of a command, and its words."""
    words = shlex.split(command)
    count = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def test_there_are_commands() -> None:
    assert {words_of(command)[1][0] for command in shell_commands()} >= {"./run.sh", "python", "deepspeed"}


@pytest.mark.parametrize("command", shell_commands())
def test_a_command_can_be_typed(command: str) -> None:
    subprocess.run(["bash", "-n", "-c", command], check=True)
    variables, (program, *arguments) = words_of(command)
    if program in {"source", "tensorboard"} or (program == "recipes/continue.sh" and (ROOT / program).is_file()):
        return
    if program in ("python", "deepspeed") and arguments[0] == "bert_ds/pretrain.py":
        resolve_run(arguments[1:], world_size=8)
    elif program == "python":
        assert_module_takes(arguments)
    elif program.startswith("recipes/"):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        subprocess.run([str(ROOT / program), *arguments], env=os.environ | variables | {"DRY_RUN": "1", "PATH": path},
                       check=True, capture_output=True)
    else:
        assert program == "./run.sh" and arguments in ([], ["test"])


def assert_module_takes(arguments: list[str]) -> None:
    """`-m MODULE [SUBCOMMAND] FLAGS`: the module's help lists the subcommand and every flag."""
    flag_m, module, *rest = arguments
    assert flag_m == "-m"
    subcommand = rest[:1] if rest and re.fullmatch(r"[a-z-]+", rest[0]) and not rest[0].startswith("-") else []
    shown = subprocess.run([sys.executable, "-m", module, *subcommand, "--help"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout
    known = set(re.findall(r"(?<![\w-])--[\w-]+", shown))
    assert {word for word in rest if word.startswith("--")} <= known


@pytest.mark.parametrize("code", [block for language, block in BLOCKS if language == "python"])
def test_python_compiles(code: str) -> None:
    compile(code, "README.md", "exec")


def test_named_files_are_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    mentioned = re.findall(r"(?<![\w/])(?:bert_ds|recipes|ds_configs|tests)/[\w./-]+\.\w+", README)
    missing = {name for name in [*links, *mentioned] if not (ROOT / name).exists()}
    assert not missing
