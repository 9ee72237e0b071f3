"""Sentences become vectors: means over tokens that are not padding, or [CLS], and their cosines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import sentence_embedding
from tests.recipes.tiny_exports import write_export

transformers = pytest.importorskip("transformers")

WORDS = ["a", "cat", "dog", "sleeps", "in", "the", "house", "."]
SENTENCES = ["A cat sleeps.", "A dog sleeps in the house.", "the", "a cat SLEEPS ."]


@pytest.fixture(scope="module", params=["bert", "megatron-bert"])
def exported(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_export(tmp_path_factory.mktemp("model") / "exported", WORDS, model_type=request.param, positions=10)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_each_sentence_by_itself(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pooling: str
) -> None:
    arguments = [word for sentence in SENTENCES[:2] for word in ("--text", sentence)]
    (tmp_path / "more.txt").write_text("\n".join(["", *SENTENCES[2:], ""]))
    assert sentence_embedding.main([
        str(exported), *arguments, "--file", str(tmp_path / "more.txt"), "--pooling", pooling,
        "--output", str(tmp_path / "vectors.npy"), "--batch-size", "3", "--device", "cpu"]) == 0
    vectors = np.load(tmp_path / "vectors.npy")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModel.from_pretrained(exported)
    with torch.no_grad():
        for sentence, vector in zip(SENTENCES, vectors, strict=True):
            hidden = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0]
            expected = hidden.mean(dim=0) if pooling == "mean" else hidden[0]
            np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5)
    table = [line.split() for line in capsys.readouterr().out.splitlines()[-4:]]
    assert table[0][1] == "1.000" and table[0][4] == "1.000"
    cosine = vectors[0] @ vectors[1] / np.linalg.norm(vectors[0]) / np.linalg.norm(vectors[1])
    assert table[0][2] == table[1][1] == f"{cosine:.3f}"


def test_a_long_sentence_is_cut_to_the_positions_of_the_model(exported: Path) -> None:
    assert sentence_embedding.main([str(exported), "--text", "cat " * 50]) == 0


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "no sentence is given"),
    (["--file", "missing.txt"], "--file=missing.txt: cannot be read"),
    (["--text", "a", "--output", "missing/vectors.npy"], "--output=missing/vectors.npy: cannot be written"),
    (["--text", "a", "--batch-size", "0"], "must be at least 1"),
])
def test_bad_input(exported: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert sentence_embedding.main([str(exported), *arguments]) == 2
    assert message in capsys.readouterr().err
