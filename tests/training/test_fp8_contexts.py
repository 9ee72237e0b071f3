"""FP8 contexts and state, with a stand-in for Transformer Engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import fake_te
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bert_ds.config.model import ModelConfig
from bert_ds.errors import ConfigError
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.linear import column_parallel_linear, row_parallel_linear
from bert_ds.training.fp8 import Fp8, fp8_recipe

CONFIG = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, transformer_impl="transformer_engine",
                     fp8_format="hybrid", fp8_margin=2, fp8_amax_history_len=16, fp8_amax_compute_algo="max")
CTX = ParallelContext.single_process()
STAGE_GROUP: Any = object()


def stage() -> nn.Sequential:
    layers = nn.Sequential(column_parallel_linear(32, 64, CTX, "transformer_engine"), nn.GELU(),
                           row_parallel_linear(64, 32, CTX, "transformer_engine"))
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=0.1)
    return layers


@pytest.mark.parametrize("old_names", [False, True])
def test_the_recipe_and_the_group_are_those_of_the_run(
    old_names: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = fake_te.install(monkeypatch, tmp_path, old_names=old_names)
    fp8 = Fp8(CONFIG, dataclasses.replace(CTX, stage_group=STAGE_GROUP), stage())
    with fp8.computing():
        assert fake.contexts == [(True, fake_te.DelayedScaling(2, fake_te.Format.HYBRID, 16, "max", True), STAGE_GROUP)]
    alone = fp8_recipe(dataclasses.replace(CONFIG, fp8_format="e4m3"), shared=False)
    assert alone == fake_te.DelayedScaling(2, fake_te.Format.E4M3, 16, "max", False)
    tensorwise = fp8_recipe(dataclasses.replace(CONFIG, fp8_recipe="tensorwise"), shared=True)
    assert tensorwise == fake_te.Float8CurrentScaling(fake_te.Format.HYBRID)


@pytest.mark.proves("recomputation in FP8 updates no scaling factor, with a stand-in", "EXACT")
def test_recomputation_uses_the_factors_of_the_first_pass_and_updates_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = fake_te.install(monkeypatch, tmp_path)
    layers = stage()
    fp8 = Fp8(CONFIG, CTX, layers)
    x = torch.randn(16, 32, requires_grad=True)
    with fp8.computing():
        y = checkpoint(layers, x, use_reentrant=False, preserve_rng_state=False, context_fn=fp8.recomputing)
    assert fake.events == ["first pass", "first pass", "factors updated"]
    assert not fake.contexts
    fake.events.clear()
    y.sum().backward()
    assert fake.events == ["second pass", "second pass"]
    assert not fake.contexts
    assert fake.phase == "plain"
    assert torch.is_grad_enabled()
    found = [x.grad, *(parameter.grad for parameter in layers.parameters())]
    wanted = torch.autograd.grad(layers(x).sum(), [x, *layers.parameters()])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_evaluation_updates_no_factors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = fake_te.install(monkeypatch, tmp_path)
    layers = stage()
    fp8 = Fp8(CONFIG, CTX, layers)
    with torch.no_grad(), fp8.computing():
        layers(torch.randn(16, 32))
    assert fake.events == ["plain", "plain"]


def test_state_goes_there_and_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_te.install(monkeypatch, tmp_path)
    former, later = Fp8(CONFIG, CTX, stage()), Fp8(CONFIG, CTX, stage())
    state = former.state()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        f"{layer}/{direction}/{tensor}": shape for layer in "02"
        for direction, number in (("scaling_fwd", 3), ("scaling_bwd", 2))
        for tensor, shape in (("scale", (number,)), ("amax_history", (16, number)))}
    for tensor in state.values():
        tensor.uniform_()
    flat = {name: tensor.flatten() for name, tensor in state.items()}
    assert later.restore(flat)
    assert all(torch.equal(tensor, state[name]) for name, tensor in later.state().items())
    shorter = Fp8(dataclasses.replace(CONFIG, fp8_amax_history_len=8), CTX, stage())
    assert not shorter.restore(flat)
    assert not later.restore({})
    assert Fp8(dataclasses.replace(CONFIG, fp8_recipe="tensorwise"), CTX, stage()).state() == {}


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = fake_te.install(monkeypatch, tmp_path)
    fake.available = (False, "Device compute capability 8.9 or higher required for FP8 execution.")
    with pytest.raises(ConfigError, match=r"model.fp8_format=hybrid: Device compute capability 8\.9"):
        Fp8(CONFIG, CTX, stage())
