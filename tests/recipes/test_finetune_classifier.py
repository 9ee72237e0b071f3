"""A classifier is fine-tuned from files of a user, learns, and is saved as transformers opens it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

import finetune_classifier
from tests.recipes.tiny_exports import write_export

transformers = pytest.importorskip("transformers")

GOOD, BAD = ["fine", "bright", "warm"], ["dull", "grey", "cold"]
FILLERS = ["the", "day", "was", "and", "a", "film", "very", "then"]
FAST = ["--learning-rate", "2e-3", "--batch-size", "16", "--device", "cpu"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(tmp_path_factory.mktemp("model") / "exported", [*GOOD, *BAD, *FILLERS])


def reviews(count: int, seed: int) -> list[tuple[str, str]]:
    """Texts of 4 to 12 words, one of which decides the label."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        words, label = draw.choices(FILLERS, k=draw.randrange(3, 12)), draw.choice(["good", "bad"])
        words.insert(draw.randrange(len(words) + 1), draw.choice(GOOD if label == "good" else BAD))
        rows.append((" ".join(words), label))
    return rows


def write_tsv(path: Path, rows: list[tuple[str, ...]], header: tuple[str, ...] = ("sentence", "label")) -> str:
    path.write_text("".join("\t".join(row) + "\n" for row in [header, *rows]))
    return str(path)


def test_it_learns_and_saves_the_best_of_its_seeds(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "classifier"
    arguments = [str(exported), str(out), "--train", write_tsv(tmp_path / "train.tsv", reviews(256, 1)),
                 "--valid", write_tsv(tmp_path / "dev.tsv", reviews(100, 2)),
                 "--test", write_tsv(tmp_path / "test.tsv", reviews(100, 3)), "--epochs", "4", "--seeds", "1", "2",
                 *FAST]
    assert finetune_classifier.main(arguments) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["labels"] == ["bad", "good"] and [result["seed"] for result in results["seeds"]] == [1, 2]
    for result in results["seeds"]:
        assert result["scores"]["valid"]["accuracy"] > 0.9 and result["scores"]["test"]["accuracy"] > 0.9
        assert result["scores"]["valid"]["matthews"] > 0.8
    printed = capsys.readouterr().out.splitlines()
    table = [line.split() for line in printed[-6:-2]]
    assert [row[0] for row in table] == ["1", "2", "mean", "spread"]
    means = [result["scores"]["valid"]["accuracy"] for result in results["seeds"]]
    assert table[2][1] == f"{100 * sum(means) / 2:.2f}"

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    fresh = reviews(50, 4)
    logits = model(**tokenizer([text for text, _ in fresh], return_tensors="pt", padding=True)).logits
    said = [model.config.id2label[number] for number in logits.argmax(-1).tolist()]
    assert sum(word == label for word, (_, label) in zip(said, fresh, strict=True)) > 45

    assert finetune_classifier.main(arguments) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["bert", "megatron-bert"])
def test_pairs_in_json_lines_train_the_same_way_twice(tmp_path: Path, model_type: str) -> None:
    """Whether both texts are of one kind; half precision, a split that is held out, three labels."""
    draw = random.Random(5)
    lines = []
    for _ in range(60):
        first, second = (draw.choice([GOOD, BAD]) for _ in range(2))
        label = "mixed" if first != second else "up" if first == GOOD else "down"
        lines.append({"premise": draw.choice(first), "hypothesis": draw.choice(second), "label": label})
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = write_export(tmp_path / "exported", [*GOOD, *BAD], model_type=model_type)
    outcomes = []
    for name in ("one", "two"):
        assert finetune_classifier.main([str(folder), str(tmp_path / name), "--train", str(file), "--epochs", "1",
                                         "--precision", "bf16", *FAST]) == 0
        weights = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / name).state_dict()
        assert weights["classifier.weight"].shape[0] == 3
        results = json.loads((tmp_path / name / "results.json").read_text())
        assert results["examples"] == {"train": 54, "valid": 6}
        outcomes.append((weights, results["seeds"][0]["scores"]))
    assert outcomes[0][1] == outcomes[1][1]
    assert all(torch.equal(value, outcomes[1][0][key]) for key, value in outcomes[0][0].items())


@pytest.mark.parametrize(("arguments", "message"), [
    (["--train", "missing.tsv"], "cannot be read (No such file or directory)"),
    (["--train", "train.tsv", "--epochs", "0", "--seeds", "1", "1"], "repeats a seed"),
    (["--train", "train.tsv", "--max-length", "500"], "is more than the model's 64 positions"),
    (["--train", "train.tsv", "--device", "tpu9"], "--device=tpu9: cannot be used"),
    (["--train", "train.tsv", "--valid", "other.tsv"], "has the label 'ugly', which the training file lacks"),
    (["--train", "train.tsv", "--learning-rate", "1e30", "--batch-size", "4"], "training has diverged"),
    (["--train", "train.tsv", "--positive-label", "best"], "is none of the labels bad, good"),
    (["--train", "train.tsv", "--seed", "1"], "--seed=: is not a flag of this command. Fix: did you mean --seeds"),
])
def test_bad_input_is_told_and_leaves_nothing(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tsv(tmp_path / "train.tsv", reviews(30, 1))
    write_tsv(tmp_path / "other.tsv", [("a day", "ugly")])
    flags = FAST if "--learning-rate" not in arguments and "--device" not in arguments else []
    assert finetune_classifier.main([str(exported), "out", *arguments, *flags]) in (2, 3)
    assert message in capsys.readouterr().err
    assert not Path("out").exists()
