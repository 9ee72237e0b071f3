"""Transformer Engine's attention with a stand-in for the package: versions, masks, switches, calls."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import fake_te
import pytest
import torch
from attention_cases import attended, formula, segments
from packaging.version import Version
from tolerances import OTHER_KERNEL

from bert_ds.errors import ConfigError
from bert_ds.ops.attention import BACKENDS, choose_attention
from bert_ds.ops.backends import AttentionQuery
from bert_ds.ops.rows import ROW_KINDS, RowKind, visible_mask
from bert_ds.ops.te_attention import SWITCHES
from bert_ds.ops.te_masks import hidden_mask, mask_rule

TE = "transformer_engine"
QUERY = AttentionQuery(rows="padded", dtype=torch.bfloat16, device_type="cuda", heads=4, head_dim=16, dropout=0.1,
                       sequences_per_row=3, capability=(9, 0))


def switches() -> dict[str, str]:
    return {name: os.environ[switch] for name, switch in SWITCHES.items()}


@pytest.mark.parametrize(("version", "backend", "shape", "mask_type"), [
    ("2.12.0", "flash", "b11s", "padding"), ("2.12.0", "fused", "b11s", "padding"),
    ("2.12.0", "unfused", "b11s", "padding"), ("1.10.0", "unfused", "b11s", "padding"),
    ("1.9.0", "flash", "b11s", "padding"), ("1.7.0", "fused", "b11s", "padding"),
    ("1.9.0", "unfused", "b1ss", "arbitrary"), ("1.7.0", "unfused", "b1ss", "arbitrary"),
    ("1.6.0", "unfused", "b1ss", "padding"), ("1.6.0", "flash", None, None), ("1.6.0", "fused", None, None),
])
def test_the_version_table(version: str, backend: str, shape: str | None, mask_type: str | None) -> None:
    rule = mask_rule(Version(version), backend)
    assert (rule and rule.shape, rule and rule.mask_type) == (shape, mask_type)


def test_masks_are_true_where_padding_hides() -> None:
    ids = torch.tensor([[1, 1, 1, 0]], dtype=torch.int32)
    assert hidden_mask(ids, "b11s").tolist() == [[[[False, False, False, True]]]]
    assert hidden_mask(ids, "b1ss").tolist() == [[[[False, False, False, True]] * 3 + [[True] * 4]]]
    visible = visible_mask(ids, "padded")
    assert visible is not None
    assert torch.equal(hidden_mask(ids, "b11s"), ~visible)


@pytest.mark.proves("Transformer Engine is told of rows what the formula computes, with a stand-in", "OTHER_KERNEL")
@pytest.mark.parametrize("version", ["2.12.0", "1.9.0"])
@pytest.mark.parametrize("rows", ROW_KINDS)
def test_calls_say_what_the_formula_computes(
    version: str, rows: RowKind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = fake_te.install(monkeypatch, tmp_path, version)
    query = dataclasses.replace(QUERY, rows=rows)
    on_cpu = dataclasses.replace(query, device_type="cpu", dtype=torch.float32, dropout=0.0)
    wanted = formula(on_cpu, 4, 24)
    names = set()
    for backend in BACKENDS[TE]:
        for switch in SWITCHES.values():
            monkeypatch.delenv(switch, raising=False)
        if backend.refusal(query) is not None:
            continue
        names.add(backend.name)
        kernel = choose_attention(backend.name, query, TE).kernel
        assert switches() == {name: str(int(name == backend.name)) for name in SWITCHES}
        for found, expected in zip(attended(on_cpu, kernel, 4, 24), wanted, strict=True):
            torch.testing.assert_close(found, expected, **OTHER_KERNEL)
    before_1_10 = version == "1.9.0"
    assert names == ({"unfused"} if before_1_10 and rows == "packed" else {"fused", "unfused"})
    kinds = {(call["attn_mask_type"], call.get("qkv_format", "bshd")) for call in fake.calls}
    assert kinds == {"full": {("no_mask", "bshd")},
                     "padded": {("padding", "bshd")} | ({("arbitrary", "bshd")} if before_1_10 else set()),
                     "packed": {("arbitrary", "bshd")} | (set() if before_1_10 else {("padding", "thd")})}[rows]


def test_dropout_only_where_the_caller_wants_it_and_never_fp8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = fake_te.install(monkeypatch, tmp_path)
    kernel = choose_attention("auto", dataclasses.replace(QUERY, fp8=True), TE).kernel
    assert [(one["heads"], one["head_dim"], one["dropout"]) for one in fake.attentions] == [(4, 16, 0.0), (4, 16, 0.1)]
    q = torch.randn(2, 4, 8, 16)
    ids = segments("padded", 2, 8)
    import transformer_engine.pytorch as te  # noqa: PLC0415

    with te.autocast(enabled=True):
        kernel(q, q, q, ids, None)
        kernel(q, q, q, ids, torch.zeros(2, 4, dtype=torch.int32))
    assert [(call["dropout"], call["in_fp8"]) for call in fake.calls] == [(0.0, False), (0.1, False)]


@pytest.mark.parametrize(("name", "change", "environment", "version", "reason"), [
    ("flash", {}, {}, "2.12.0", "flash-attn is not installed.* use fused"),
    ("local", {}, {}, "2.12.0", "belongs to model.transformer_impl=local.* use fused"),
    ("fused", {"device_type": "cpu"}, {}, "2.12.0", "needs a GPU.*nothing|nothing serves"),
    ("fused", {"dtype": torch.float32}, {}, "2.12.0", "not float32.* use unfused"),
    ("fused", {"capability": (8, 0), "rows": "packed"}, {}, "2.12.0", "compute capability 9 and 10.* use unfused"),
    ("fused", {"capability": (8, 0), "deterministic": True}, {}, "2.12.0", "repeats its bits .*9.0.* use unfused"),
    ("fused", {"capability": (7, 0)}, {}, "2.12.0", "this GPU has 7.0.* use unfused"),
    ("fused", {}, {}, "1.6.0", "Transformer Engine 1.6.0 takes no padding mask.* use unfused"),
    ("fused", {"rows": "packed"}, {}, "1.9.0", "1.9.0 takes no packed rows, 1.10 and later do.* use unfused"),
    ("fused", {}, {"NVTE_FUSED_ATTN": "0"}, "2.12.0", "NVTE_FUSED_ATTN=0 in the environment.* use unfused"),
    ("fused", {}, {"NVTE_FLASH_ATTN": "1"}, "2.12.0", "NVTE_FLASH_ATTN=1: contradicts .*fused.*unset NVTE_FLASH_ATTN"),
])
def test_a_choice_that_cannot_be_honoured_stops_with_its_reason(
    name: str, change: dict[str, Any], environment: dict[str, str], version: str, reason: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:
    fake_te.install(monkeypatch, tmp_path, version)
    for switch, value in environment.items():
        monkeypatch.setenv(switch, value)
    with pytest.raises(ConfigError, match=reason):
        choose_attention(name, dataclasses.replace(QUERY, **change), TE)


def test_auto_honours_the_environment_and_always_finds_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_te.install(monkeypatch, tmp_path)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert choose_attention("auto", QUERY, TE).name == "unfused"
    assert switches() == {"flash": "0", "fused": "0", "unfused": "1"}
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(ConfigError, match=r"nothing serves this run \(fused refused: NVTE_FUSED_ATTN=0 .* to local"):
        choose_attention("auto", QUERY, TE)
    for switch in SWITCHES.values():
        monkeypatch.delenv(switch)
    for rows in ROW_KINDS:
        for capability in ((7, 0), (8, 0), (9, 0), (12, 0)):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                query = dataclasses.replace(QUERY, rows=rows, capability=capability, dtype=dtype, head_dim=136)
                assert choose_attention("auto", query, TE).name == "unfused"
                for switch in SWITCHES.values():
                    monkeypatch.delenv(switch)
