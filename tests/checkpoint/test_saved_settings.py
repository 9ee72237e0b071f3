"""A run takes its model from the checkpoint that it loads, if it says so; flags win over it, and it over the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from bert_ds.checkpoint.saved_settings import saved_settings
from bert_ds.cli.resolve import ResolvedRun, resolve_run
from bert_ds.errors import CheckpointError, ConfigError
from tests.checkpoint.saved_checkpoints import model_config, random_tensors, save

MODEL = model_config(norm_placement="post", layernorm_epsilon=1e-4, activation="gelu_tanh", hidden_dropout=0.3)
DEFINING = ("num_layers", "hidden_size", "num_attention_heads", "ffn_size", "max_position_embeddings", "binary_head",
            "make_vocab_size_divisible_by", "norm_placement", "layernorm_epsilon", "activation")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "start", MODEL, random_tensors(MODEL, kinds=["weight"]), tokenizer_type="BertWordPieceCase")


def resolved(*flags: str, recipe: str = "340m") -> ResolvedRun:
    return resolve_run(["--recipe", recipe, "--micro-batch-size", "2", "--global-batch-size", "2",
                        "--use-checkpoint-args", *flags], world_size=1, saved_settings=saved_settings)


@pytest.mark.parametrize("place", ["", "iter_0000100"])
def test_the_checkpoint_wins_over_the_recipe(saved: Path, place: str) -> None:
    run = resolved("--load", str(saved.parent / place), "--finetune", "--seq-length", "12")
    for name in DEFINING:
        assert getattr(run.config.model, name) == getattr(MODEL, name), name
    assert run.config.data.tokenizer_type == "BertWordPieceCase"
    assert run.config.model.seq_length == 12
    assert run.config.data.vocab_file == "data/vocab.txt", "the recipe names one"
    assert run.origins["model.hidden_size"] == str(saved)
    assert any(remark.startswith(f"model.num_layers=2 of {saved} overrides 24 of ") for remark in run.remarks)


def test_a_silent_recipe_takes_row_length_dropout_and_vocabulary_too(saved: Path) -> None:
    run = resolved("--load", str(saved.parent), recipe="continue").config
    assert (run.model.seq_length, run.model.hidden_dropout) == (MODEL.seq_length, 0.3)
    assert run.data.vocab_file == str(saved / "vocab.txt")
    assert run.output.finetune
    resumed = resolved("--load", str(saved.parent), "--save", str(saved.parent), "--seq-length", "12").config
    assert resumed.data.vocab_file == "data/vocab.txt", "checkpoints come and go in the folder that a run saves to"


def test_flags_win_over_the_checkpoint(saved: Path) -> None:
    run = resolved("--load", str(saved.parent), "--num-layers", "3", recipe="continue")
    assert run.config.model.num_layers == 3
    assert run.config.model.hidden_size == MODEL.hidden_size


def test_without_a_checkpoint_there_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"output\.load=.*nowhere: is no folder"):
        resolved("--load", str(tmp_path / "nowhere"), "--finetune")
    with pytest.raises(ConfigError) as told:
        resolved("--load", "none")
    assert "output.use_checkpoint_args=True: has no folder to load from" in str(told.value)
