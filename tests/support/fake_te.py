"""A stand-in for Transformer Engine on machines without a GPU: takes its arguments as 2.12 does, checks and records
them, and computes on the CPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_ds.parallel.collectives import (
    copy_to_tensor_parallel,
    gather_tokens,
    reduce_from_tensor_parallel,
    reduce_scatter_tokens,
)


@dataclass
class FakeTransformerEngine:
    """What its layers were asked for, and the state of its FP8 context."""

    linears: list[dict[str, Any]] = field(default_factory=list)
    attentions: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Keyword arguments of each attention."""
    events: list[str] = field(default_factory=list)
    """What happened to FP8, in order."""
    contexts: list[tuple[bool, Any, Any]] = field(default_factory=list)
    """(enabled, recipe, group) of the contexts that are open."""
    phase: str = "plain"
    available: tuple[bool, str] = (True, "")

    @property
    def in_fp8(self) -> bool:
        return bool(self.contexts) and self.contexts[-1][0]


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, version: str = "2.12.0", *, old_names: bool = False
) -> FakeTransformerEngine:
    """Puts the stand-in where the package would be, its version included, for one test."""
    fake = FakeTransformerEngine()
    metadata = folder / f"transformer_engine-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))
    contexts = {"fp8_autocast": _old_autocast(fake)} if old_names else {"autocast": _autocast(fake)}
    pytorch = _module("transformer_engine.pytorch", Linear=_linear(fake), DotProductAttention=_attention(fake),
                      **contexts)
    modules = [
        _module("transformer_engine", pytorch=pytorch), pytorch, _module("transformer_engine.common"),
        _module("transformer_engine.common.recipe", Format=Format, DelayedScaling=DelayedScaling,
                Float8CurrentScaling=Float8CurrentScaling),
        _module("transformer_engine.pytorch.distributed", activation_recompute_forward=_recompute(fake)),
        _module("transformer_engine.pytorch.fp8", FP8GlobalStateManager=SimpleNamespace(
            is_fp8_available=lambda: fake.available))]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for switch in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(switch, "")
        monkeypatch.delenv(switch)
    return fake


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(content, __path__=[])
    return module


class Format(Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass(frozen=True)
class DelayedScaling:
    margin: int
    fp8_format: Format
    amax_history_len: int
    amax_compute_algo: str
    reduce_amax: bool


@dataclass(frozen=True)
class Float8CurrentScaling:
    fp8_format: Format


def _autocast(fake: FakeTransformerEngine) -> Any:
    @contextmanager
    def autocast(enabled: bool = True, recipe: Any = None, amax_reduction_group: Any = None) -> Iterator[None]:
        fake.contexts.append((enabled, recipe, amax_reduction_group))
        try:
            yield
        finally:
            fake.contexts.pop()
            if enabled and not fake.contexts and torch.is_grad_enabled():
                fake.events.append("factors updated")

    return autocast


def _old_autocast(fake: FakeTransformerEngine) -> Any:
    def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, fp8_group: Any = None) -> Any:
        return _autocast(fake)(enabled, fp8_recipe, fp8_group)

    return fp8_autocast


def _recompute(fake: FakeTransformerEngine) -> Any:
    @contextmanager
    def activation_recompute_forward(activation_recompute: bool, recompute_phase: bool) -> Iterator[None]:
        assert activation_recompute
        fake.phase = "second pass" if recompute_phase else "first pass"
        try:
            yield
        finally:
            fake.phase = "plain"

    return activation_recompute_forward


def _linear(fake: FakeTransformerEngine) -> type[nn.Module]:
    class Linear(nn.Module):
        """y = x W^T + b, communicating as its documentation says; notes in which FP8 phase it ran."""

        def __init__(
            self, in_features: int, out_features: int, *, bias: bool, init_method: Any, device: torch.device,
            **cut: Any,
        ) -> None:
            super().__init__()
            fake.linears.append({"in": in_features, "out": out_features, **cut})
            out_features //= cut["tp_size"] if cut["parallel_mode"] == "column" else 1
            in_features //= cut["tp_size"] if cut["parallel_mode"] == "row" else 1
            self.weight = nn.Parameter(torch.full((out_features, in_features), 7.0, device=device))
            init_method(self.weight)
            assert (self.weight == 7.0).all(), "initial values are not its own"
            self.bias = nn.Parameter(torch.zeros(out_features, device=device)) if bias else None
            self.fp8_meta: dict[str, Any] = {}
            self._mode, self._group = cut["parallel_mode"], cut["tp_group"]
            self._enter = gather_tokens if cut["sequence_parallel"] else copy_to_tensor_parallel
            self._leave = reduce_scatter_tokens if cut["sequence_parallel"] else reduce_from_tensor_parallel

        def forward(self, x: Tensor) -> Tensor:
            if fake.in_fp8:
                fake.events.append(fake.phase)
                self.init_fp8_metadata()
            if self._mode == "row":
                return self._leave(F.linear(x, self.weight), self._group) + self.bias
            return F.linear(self._enter(x, self._group) if self._mode else x, self.weight, self.bias)

        def init_fp8_metadata(self) -> None:
            _, recipe, _ = fake.contexts[-1]
            for direction, tensors in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                state = SimpleNamespace()
                if isinstance(recipe, DelayedScaling):
                    state = SimpleNamespace(scale=torch.ones(tensors),
                                            amax_history=torch.zeros(recipe.amax_history_len, tensors))
                self.fp8_meta.setdefault(direction, state)

    return Linear


def _attention(fake: FakeTransformerEngine) -> type[nn.Module]:
    class DotProductAttention(nn.Module):
        """Takes [B, S, N, D], or [T, N, D] with boundaries; True in a mask hides a key."""

        def __init__(
            self, num_attention_heads: int, kv_channels: int, *, attention_dropout: float, qkv_format: str,
            attn_mask_type: str,
        ) -> None:
            super().__init__()
            fake.attentions.append({"heads": num_attention_heads, "head_dim": kv_channels,
                                    "dropout": attention_dropout})
            assert qkv_format == "bshd"
            self._shape, self._dropout = (num_attention_heads, kv_channels), attention_dropout

        def forward(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
            assert self.training, "dropout follows the arguments, and cuDNN keeps what the backward pass needs"
            assert q.shape[-2:] == self._shape
            fake.calls.append({**how, "in_fp8": fake.in_fp8, "dropout": self._dropout})
            if how.get("qkv_format") == "thd":
                assert q.dim() == 3 and how["attn_mask_type"] == "padding"
                assert how["cu_seqlens_q"].dtype == torch.int32 and how["cu_seqlens_q"][-1] == len(q)
                bounds = how["cu_seqlens_q"].tolist()
                pieces = [_formula(*(part[None, start:stop] for part in (q, k, v)), None)[0]
                          for start, stop in pairwise(bounds) if stop > start]
                return torch.cat(pieces).flatten(-2)
            mask = how.get("attention_mask")
            assert (mask is None) == (how["attn_mask_type"] == "no_mask")
            assert mask is None or mask.dtype == torch.bool
            return _formula(q, k, v, mask).flatten(-2)

    return DotProductAttention


def _formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask, -10000.0)
    return torch.einsum("bnst,btnd->bsnd", scores.softmax(dim=-1), v)
