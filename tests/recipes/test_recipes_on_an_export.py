"""The scripts work on what `bert_ds.convert to-hf` writes, and as they are started from a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import finetune_classifier
import finetune_squad
import sentence_embedding
from bert_ds.convert.__main__ import main as convert
from tests.checkpoint.saved_checkpoints import model_config, random_tensors, save

pytest.importorskip("transformers")

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
RECIPE_MODULES = (finetune_classifier, finetune_squad, sentence_embedding)


@pytest.mark.parametrize("changes", [
    {"norm_placement": "pre"}, {"norm_placement": "post"}, {"norm_placement": "pre", "binary_head": False},
], ids=["megatron-bert", "bert", "mlm-only"])
def test_an_export_is_fine_tuned_and_embeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changes: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = model_config(**changes)
    checkpoint = save(tmp_path / "save", config, random_tensors(config, kinds=["weight"]))
    assert convert(["to-hf", str(checkpoint), "exported"]) == 0
    rows = [f"the {'cat' if number % 2 else 'dog'} sat on mat {number % 3}\t{number % 2}\n" for number in range(40)]
    Path("train.tsv").write_text("sentence\tlabel\n" + "".join(rows))
    assert finetune_classifier.main(["exported", "out", "--train", "train.tsv", "--epochs", "1"]) == 0
    assert json.loads(Path("out/results.json").read_text())["labels"] == ["0", "1"]
    capsys.readouterr()
    assert sentence_embedding.main(["out", "--text", "a cat", "--text", "the dog"]) == 0
    assert capsys.readouterr().out.endswith("1.000\n")


@pytest.mark.parametrize("recipe", RECIPE_MODULES, ids=lambda module: module.__name__)
def test_help_and_a_folder_without_a_model(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as shown:
        recipe.main(["--help"])
    assert shown.value.code == 0 and "MODEL" in capsys.readouterr().out
    required = ["--text", "a"] if recipe is sentence_embedding else ["out", "--train", "a", "--valid", "a"]
    assert recipe.main(["nowhere", *required]) == 2
    assert capsys.readouterr().err.count("Fix:") == 1


def test_the_commands_of_the_readme_have_flags_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = (RECIPES / "README.md").read_text().replace("\\\n", "")
    by_name = {f"recipes/{module.__name__}.py": module for module in RECIPE_MODULES}
    commands = [words for line in text.splitlines() if line.startswith("    python recipes/")
                and (words := line.split())[1] in by_name]
    assert {words[1] for words in commands} == by_name.keys()
    for words in commands:
        with pytest.raises(SystemExit):
            by_name[words[1]].main(["--help"])
        known = capsys.readouterr().out
        assert all(f"{word} " in known for word in words if word.startswith("--"))


def test_a_script_starts_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, RECIPES / "finetune_classifier.py", "nowhere", "out", "--train", "none.tsv"],
                          cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 2
    assert done.stderr == ("error: unusable data:\n  file=none.tsv: cannot be read (No such file or directory). "
                           "Fix: check the path.\n")
