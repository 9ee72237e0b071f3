"""Hidden words are guessed by the model that transformers loads, and shown beside the true ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from bert_ds import fill_mask
from bert_ds.errors import ConfigError

transformers = pytest.importorskip("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "returns", "a", "list", "##s", "of", "names", "."]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that prefers `list`, then `names`, for every hidden token."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.MegatronBertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=12)
    model = transformers.MegatronBertForPreTraining(config)
    model.cls.predictions.bias.data[WORDS.index("list")] = 20.0
    model.cls.predictions.bias.data[WORDS.index("names")] = 10.0
    model.save_pretrained(folder)
    return folder


def test_hidden_words_are_guessed_and_compared_with_the_truth(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fill_mask.main([str(exported), "--text", "Returns a [list] of [names].", "--top", "2"]) == 0
    text, first, second = capsys.readouterr().out.splitlines()
    assert text == "Returns a [list] of [names]."
    assert first.split()[:4] == ["1.", "list", "right", "*list"]
    assert "right" not in second and second.split()[:3] == ["2.", "names", "list"] and "*names" in second


def test_a_word_of_several_tokens_and_an_unknown_word_are_hidden_token_by_token(exported: Path) -> None:
    model = fill_mask.load_model(exported)
    guesses = fill_mask.guess(model, "a [lists] of [MASK]", top=3)
    assert [found.truth for found in guesses] == ["list", "##s", None]
    for found in guesses:
        probabilities = [probability for _, probability in found.candidates]
        assert len(probabilities) == 3 and probabilities == sorted(probabilities, reverse=True)
    assert guesses[0].is_right and not guesses[2].is_right


@pytest.mark.parametrize(
    "text, message", [("a list", "hides no word"), ("a [list] " + "of " * 20, "longer than the model's 12")]
)
def test_texts_that_cannot_be_guessed_are_refused(exported: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fill_mask.guess(fill_mask.load_model(exported), text, top=1)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        fill_mask.load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match="no model that transformers' AutoModelForMaskedLM can load"):
        fill_mask.load_model(tmp_path)


def test_a_model_without_the_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    config = transformers.BertConfig(vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=32, max_position_embeddings=12)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks .* weights of BertForMaskedLM, cls"):
        fill_mask.load_model(tmp_path)
