"""Attention by PyTorch's kernels on a CPU: agreement with the formula, dropout, the choice and its reasons."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from attention_cases import attended, dropped_probabilities, formula, serving
from tolerances import OTHER_KERNEL

from bert_ds.errors import ConfigError
from bert_ds.ops.attention import BACKENDS, choose_attention
from bert_ds.ops.backends import AttentionQuery
from bert_ds.ops.rows import ROW_KINDS, RowKind, sequence_boundaries, visible_mask

QUERY = AttentionQuery(rows="padded", dtype=torch.float32, device_type="cpu", heads=4, head_dim=16, dropout=0.25)
GPU = dataclasses.replace(QUERY, device_type="cuda", dtype=torch.float16, head_dim=64, capability=(9, 0))


@pytest.mark.proves("PyTorch's attention kernels agree with the formula on a CPU, or refuse", "OTHER_KERNEL")
@pytest.mark.parametrize("rows", ROW_KINDS)
def test_every_backend_agrees_with_the_formula_or_refuses(rows: RowKind) -> None:
    query = dataclasses.replace(QUERY, rows=rows, dropout=0.0)
    wanted = formula(query, 4, 24)
    for backend in BACKENDS["local"]:
        if backend.refusal(query):
            with pytest.raises(ConfigError, match=f"model.attention_backend={backend.name}.*use unfused|use flash"):
                choose_attention(backend.name, query)
            continue
        found = attended(query, choose_attention(backend.name, query).kernel, 4, 24)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, **OTHER_KERNEL)


@pytest.mark.parametrize("name", ["unfused", "local"])
def test_dropout_follows_its_seed_and_keeps_the_mean(name: str) -> None:
    query = dataclasses.replace(QUERY, rows="full", head_dim=64)
    kernel = choose_attention(name, query).kernel
    first, again, other = (dropped_probabilities(query, kernel, seed) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert float((first == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(first.sum(dim=-1).mean()) == pytest.approx(1.0, abs=0.02)


def test_auto_takes_the_first_that_serves_and_says_why_others_do_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bert_ds.ops.attention"):
        assert choose_attention("auto", QUERY).name == "unfused"
    (line,) = caplog.messages
    assert line == ("attention backend: unfused (PyTorch math, key mask) for padded rows in float32; fused refused: it "
                    "needs a GPU; flash refused: PyTorch's flash attention takes no mask")
    assert choose_attention("auto", GPU).name == "fused"
    assert choose_attention("auto", dataclasses.replace(GPU, deterministic=True)).name == "unfused"
    assert choose_attention("auto", dataclasses.replace(GPU, deterministic=True, rows="full")).name == "flash"


@pytest.mark.parametrize(("name", "change", "reason"), [
    ("fused", {"device_type": "cpu"}, "it needs a GPU"),
    ("fused", {"capability": (7, 0)}, "compute capability 8.0, and this GPU has 7.0"),
    ("fused", {"dtype": torch.float32}, "fp16 or bf16, not float32"),
    ("fused", {"head_dim": 136}, "head dimensions up to 128 .*, not 136"),
    ("fused", {"head_dim": 44}, "multiples of 8, not 44"),
    ("fused", {"deterministic": True}, "not deterministic"),
    ("flash", {"rows": "packed"}, "takes no mask"),
    ("flash", {"rows": "full", "device_type": "cpu"}, "no dropout on a CPU"),
])
def test_a_choice_that_cannot_be_honoured_stops_with_its_reason(
    name: str, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"model.attention_backend={name}: .*{reason}.* use .*auto"):
        choose_attention(name, dataclasses.replace(GPU, **change))


def test_whatever_the_run_something_of_pytorch_serves() -> None:
    for rows in ROW_KINDS:
        for device_type in ("cpu", "cuda"):
            query = dataclasses.replace(QUERY, rows=rows, device_type=device_type, capability=(7, 0), head_dim=44)
            assert {backend.name for backend in serving(BACKENDS["local"], query)} >= {"unfused", "local"}


def test_boundaries_are_those_of_the_visible_blocks() -> None:
    ids = torch.tensor([[1, 1, 2, 2, 2, 0, 0, 0], [1] * 8, [1, 2, 3, 3, 3, 3, 3, 3]], dtype=torch.int32)
    boundaries = sequence_boundaries(ids, 3)
    assert boundaries.dtype == torch.int32
    assert boundaries.tolist() == [0, 2, 5, 5, 8, 16, 16, 16, 16, 17, 18, 24, 24]
    blocks = torch.zeros(24, 24, dtype=torch.bool)
    for start, stop in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        blocks[start:stop, start:stop] = True
    visible = visible_mask(ids, "packed")
    assert visible is not None
    assert torch.equal(blocks, torch.block_diag(*visible.squeeze(1)).bool())
