"""The table covers every parameter on both sides and loses nothing either way."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.config.model import ModelConfig
from bert_ds.convert.hf_model import architecture, hf_config
from bert_ds.convert.name_map import CutVocabulary, SplitQKV, name_map, untied_rules, zero_tables
from tests.checkpoint.saved_checkpoints import model_config, random_tensors

MODELS = [model_config(norm_placement=placement, binary_head=head) for placement in ("pre", "post")
          for head in (True, False)]


def _id(config: ModelConfig) -> str:
    return f"{config.norm_placement}-{'sop' if config.binary_head else 'mlm-only'}"


@pytest.mark.parametrize("config", MODELS, ids=_id)
def test_every_parameter_is_mapped_once(config: ModelConfig) -> None:
    rules = name_map(config)
    assert Counter(rule.ours for rule in rules) == Counter(list(parameter_shapes(config)))
    assert max(Counter(name for rule in rules for name in rule.theirs).values()) == 1


@pytest.mark.parametrize("config", MODELS, ids=_id)
def test_names_and_shapes_are_those_of_transformers(config: ModelConfig) -> None:
    transformers = pytest.importorskip("transformers")
    settings = hf_config(config, pad_token_id=0, dtype="float32", untie=False)
    model_class = getattr(transformers, architecture(config))
    model = model_class(model_class.config_class(**settings))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ours = {}
    for rule in (*name_map(config), *untied_rules(config)):
        ours |= dict(zip(rule.theirs, rule.their_shapes(parameter_shapes(config)[rule.ours].shape), strict=True))
    assert {**ours, **zero_tables(config)} == theirs


@pytest.mark.parametrize("config", MODELS, ids=_id)
def test_the_round_trip_is_exact(config: ModelConfig) -> None:
    tensors = random_tensors(config, kinds=["weight"])
    for rule in name_map(config):
        ours = tensors[f"weight/{rule.ours}"].clone()
        if isinstance(rule.transform, CutVocabulary):
            ours[config.vocab_size :] = 0
        theirs = rule.transform.split(ours)
        assert len(theirs) == len(rule.theirs)
        assert torch.equal(rule.transform.join(theirs), ours), rule.ours


def test_query_key_and_value_come_from_the_rows_of_each_head() -> None:
    """Rows (head, [q, k, v], D) for 2 heads of 2: the row's number says where it has to go."""
    rows = torch.arange(12.0)
    query, key, value = SplitQKV(2).split(rows)
    assert query.tolist() == [0, 1, 6, 7]
    assert key.tolist() == [2, 3, 8, 9]
    assert value.tolist() == [4, 5, 10, 11]
    assert torch.equal(SplitQKV(2).split(torch.stack([rows, -rows], 1))[1], torch.stack([key, -key], 1))
