"""A checkpoint knows its model, and says in which way another one differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bert_ds.checkpoint.format import VocabularyRecord
from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.checkpoint.reader import Checkpoint
from bert_ds.checkpoint.run_config import model_config_from, model_problems, run_config_as_dict, vocabulary_problems
from bert_ds.errors import CheckpointError
from bert_ds.model.bert import BertModel
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.sharding import sharding_of
from tests.checkpoint.saved_checkpoints import model_config, random_tensors, run_config, save


def test_the_model_comes_back(tmp_path: Path) -> None:
    config = model_config(norm_placement="post", activation="gelu_tanh", layernorm_epsilon=1e-12)
    assert model_config_from(Checkpoint.open(save(tmp_path, config, random_tensors(config))).manifest) == config


@pytest.mark.parametrize("binary_head", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
def test_shapes_and_cuts_are_those_of_the_model(binary_head: bool, tp: int) -> None:
    config = model_config(binary_head=binary_head)
    model = BertModel(config, ParallelContext(tp_size=tp))
    built = {}
    for name, parameter in model.named_logical_parameters():
        sharding = sharding_of(parameter)
        built[name] = (sharding.full_shape, sharding.dim)
    assert built == {name: (record.shape, record.cut_dim) for name, record in parameter_shapes(config).items()}
    assert sum(record.numel for record in parameter_shapes(config).values()) == config.num_parameters


@pytest.mark.parametrize(("changes", "named"), [
    ({"num_layers": 3}, ["model.num_layers=3: the checkpoint's model has 2"]),
    ({"hidden_size": 48, "ffn_hidden_size": 80},
     ["model.hidden_size=48", "model.kv_channels=12", "model.ffn_hidden_size=80"]),
    ({"ffn_hidden_size": None}, ["model.ffn_hidden_size=96: the checkpoint's model has 40"]),
    ({"kv_channels": 6}, []),
    ({"kv_channels": 8}, ["model.kv_channels=8: the checkpoint's model has 6"]),
    ({"position_embedding_type": "rope", "max_position_embeddings": 99},
     ["model.position_embedding_type=rope: the checkpoint's model has learned_absolute"]),
    ({"rotary_base": 500.0}, []),
    ({"untie_embeddings_and_output_weights": True}, ["model.untie_embeddings_and_output_weights=True"]),
    ({"norm_placement": "post"}, ["model.norm_placement=post"]),
    ({"layernorm_epsilon": 1e-12}, ["model.layernorm_epsilon=1e-12"]),
    ({"binary_head": False}, ["model.binary_head=False"]),
    ({"hidden_dropout": 0.5, "attention_backend": "local", "seq_length": 12, "init_method_std": 1.0}, []),
])
def test_another_model_is_told_apart(changes: dict[str, object], named: list[str]) -> None:
    saved = run_config_as_dict(run_config(model_config()))["model"]
    found = [str(problem) for problem in model_problems(saved, model_config(**changes))]
    assert len(found) == len(named)
    assert all(problem.startswith(start) for problem, start in zip(found, named, strict=True))


def test_a_vocabulary_of_another_size_cannot_be_set() -> None:
    saved = run_config_as_dict(run_config(model_config(vocab_size=34)))["model"]
    [problem] = model_problems(saved, model_config())
    assert "with --vocab-extra-bos-eos if it had that" in str(problem)


def test_a_model_of_a_later_version_is_refused() -> None:
    saved = {**run_config_as_dict(run_config(model_config()))["model"], "alibi_slopes": 8}
    with pytest.raises(CheckpointError, match="model=alibi_slopes: are settings that this version does not know"):
        list(model_problems(saved, model_config()))


def test_another_vocabulary_is_told_apart() -> None:
    saved = VocabularyRecord("a" * 64, 32, "BertWordPieceLowerCase")
    same = vocabulary_problems(saved, vocab_file="v.txt", sha256="a" * 64, tokenizer_type="BertWordPieceLowerCase")
    assert list(same) == []
    other = vocabulary_problems(saved, vocab_file="v.txt", sha256="b" * 64, tokenizer_type="BertWordPieceCase")
    assert [problem.setting for problem in other] == ["data.vocab_file", "data.tokenizer_type"]
