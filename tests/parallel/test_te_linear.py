"""Transformer Engine's linear layers in the tensor-parallel slots, with a stand-in for the package."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import fake_te
import pytest
import torch
from tolerances import EXACT

from bert_ds.compat import check_transformer_engine
from bert_ds.config.model import ModelConfig
from bert_ds.errors import ConfigError
from bert_ds.model.bert import BertModel
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.linear import column_parallel_linear, row_parallel_linear
from bert_ds.parallel.sharding import has_partial_gradient, sharding_of

GROUP: Any = object()
CONFIG = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=24, max_position_embeddings=24,
                     vocab_size=100, hidden_dropout=0.0, attention_dropout=0.0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("make", "mode"), [(column_parallel_linear, "column"), (row_parallel_linear, "row")])
def test_slots_have_the_same_names_shapes_and_records(
    make: Any, mode: str, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = fake_te.install(monkeypatch, tmp_path)
    ctx = ParallelContext(tp_size=4, tp_rank=3, tp_group=GROUP, sequence_parallel=sequence_parallel)
    ours, theirs = make(32, 64, ctx), make(32, 64, ctx, "transformer_engine")
    assert fake.linears == [{"in": 32, "out": 64, "parallel_mode": mode, "tp_group": GROUP, "tp_size": 4,
                             "sequence_parallel": sequence_parallel}]
    for (name, own), (other_name, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (name, own.shape, sharding_of(own)) == (other_name, other.shape, sharding_of(other))
        assert has_partial_gradient(own) == has_partial_gradient(other)
        assert getattr(own, "tensor_model_parallel", False) == getattr(other, "tensor_model_parallel", False)


def test_on_one_rank_the_bias_stays_in_the_matrix_product(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = fake_te.install(monkeypatch, tmp_path)
    row_parallel_linear(32, 64, ParallelContext.single_process(), "transformer_engine")
    assert fake.linears[0]["parallel_mode"] is None


def test_initial_weights_and_names_of_a_model_do_not_depend_on_the_implementation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_te.install(monkeypatch, tmp_path)
    # Its attention would need a GPU; the layers around it do not.
    monkeypatch.setitem(sys.modules["bert_ds.ops.attention"].__dict__["BACKENDS"], "transformer_engine",
                        sys.modules["bert_ds.ops.attention"].__dict__["BACKENDS"]["local"])
    models = [BertModel(dataclasses.replace(CONFIG, transformer_impl=kind), ParallelContext.single_process())
              for kind in ("local", "transformer_engine")]
    for model in models:
        model.initialize(seed=3)
    ours, theirs = (dict(model.named_logical_parameters()) for model in models)
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], **EXACT)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.transformer_impl=transformer_engine: .*not installed.* set it to "
                                          r"local, or pip install transformer_engine\[pytorch\]"):
        column_parallel_linear(8, 8, ParallelContext.single_process(), "transformer_engine")
    fake_te.install(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU, and this run is on a cpu"):
        check_transformer_engine("cpu")
    check_transformer_engine("cuda")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(ConfigError, match=r"Transformer Engine 2.12.0 does not load here \("):
        check_transformer_engine("cuda")
