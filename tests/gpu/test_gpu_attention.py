"""Attention kernels in half precision, PyTorch's and Transformer Engine's, against the formula.

Run them with `pytest -m gpu tests/gpu` on a machine with one NVIDIA GPU; Transformer Engine's need its package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from attention_cases import SEQUENCES, attended, dropped_probabilities, formula, segments
from tolerances import HALF_KERNEL

from bert_ds.compat import transformer_engine_version
from bert_ds.ops.attention import BACKENDS
from bert_ds.ops.backends import AttentionQuery, Kernel
from bert_ds.ops.rows import ROW_KINDS, RowKind
from bert_ds.ops.te_attention import SWITCHES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
NEEDS_TE = pytest.mark.skipif(transformer_engine_version() is None, reason="Transformer Engine is not installed")
IMPLEMENTATIONS = ["local", pytest.param("transformer_engine", marks=NEEDS_TE)]
B, N, S, D = 4, 8, 512, 64


def query(rows: RowKind, dtype: torch.dtype, head_dim: int = D, *, deterministic: bool = False) -> AttentionQuery:
    return AttentionQuery(rows=rows, dtype=dtype, device_type="cuda", heads=N, head_dim=head_dim, dropout=0.25,
                          sequences_per_row=SEQUENCES, deterministic=deterministic,
                          capability=torch.cuda.get_device_capability())


Kernels = Callable[[str, AttentionQuery], Iterator[tuple[str, Kernel]]]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Every kernel of an implementation that serves a query, with its name."""

    def serving(implementation: str, asked: AttentionQuery) -> Iterator[tuple[str, Kernel]]:
        for backend in BACKENDS[implementation]:
            for switch in SWITCHES.values():
                monkeypatch.delenv(switch, raising=False)
            if backend.refusal(asked) is None:
                kernel = backend.build(asked)
                if implementation == "transformer_engine":
                    forget_the_last_choice()
                yield backend.name, kernel

    return serving


def forget_the_last_choice() -> None:
    """Transformer Engine looks at its switches again when a query has changed only; in a run they never change."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention  # noqa: PLC0415

    dot_product_attention._attention_backends["backend_selection_requires_update"] = True


@pytest.mark.proves("attention kernels in half precision agree with the formula: full, padded, packed rows",
                    "HALF_KERNEL")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", ROW_KINDS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_backends_agree_with_the_formula(
    implementation: str, rows: RowKind, dtype: torch.dtype, kernels: Kernels
) -> None:
    asked = query(rows, dtype)
    wanted = formula(asked, B, S)
    names = set()
    for name, kernel in kernels(implementation, asked):
        names.add(name)
        for found, expected in zip(attended(asked, kernel, B, S), wanted, strict=True):
            assert torch.isfinite(found).all(), name
            relative = float((found - expected).norm() / expected.norm())
            assert relative < HALF_KERNEL[dtype], (name, relative)
    assert {"fused", "unfused"} <= names


@pytest.mark.proves("dropout of attention kernels: its share of zeros, the mean kept", "0.01")
@pytest.mark.parametrize("rows", ["full", "padded"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dropout_drops_its_share_keeps_the_mean_and_follows_its_seed(
    implementation: str, rows: RowKind, kernels: Kernels
) -> None:
    asked = query(rows, torch.float16)
    for name, kernel in kernels(implementation, asked):
        first, again, other = (dropped_probabilities(asked, kernel, seed).float() for seed in (5, 5, 6))
        assert torch.equal(first, again), name
        assert not torch.equal(first, other), name
        whole = first[::2]  # Rows without padding: every second one.
        assert float((whole == 0).float().mean()) == pytest.approx(0.25, abs=0.01), name
        assert float(whole.sum(dim=-1).mean()) == pytest.approx(1.0, abs=0.01), name


@pytest.mark.proves("Transformer Engine's kernels repeat their bits in deterministic mode", "EXACT")
@NEEDS_TE
def test_fused_attention_repeats_its_bits_where_it_says_so(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for rows in ROW_KINDS:
        asked = query(rows, torch.bfloat16, deterministic=True)
        for name, kernel in kernels("transformer_engine", asked):
            first, again = (attended(asked, kernel, 16, S) for _ in range(2))
            assert all(map(torch.equal, first, again)), (name, rows)


@NEEDS_TE
def test_padding_stays_finite_whatever_memory_held_before(kernels: Kernels) -> None:
    """Nothing reads it, but 0 x NaN would reach the gradients of weights."""
    for rows in ("padded", "packed"):
        asked = dataclasses.replace(query(rows, torch.bfloat16), dropout=0.0)
        for name, kernel in kernels("transformer_engine", asked):
            qkv = torch.randn(B, S, N, 3, D, device="cuda", dtype=asked.dtype, requires_grad=True)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(dim=3))
            poison_free_memory()
            context = kernel(q, k, v, segments(rows, B, S, "cuda"), None)
            poison_free_memory()
            (gradient,) = torch.autograd.grad(context, qkv, torch.ones_like(context))
            assert torch.isfinite(context).all(), (name, rows)
            assert torch.isfinite(gradient).all(), (name, rows)


def poison_free_memory() -> None:
    """Leaves NaN in the memory that the next allocations get."""
    blocks = [torch.full((B * N * S * D,), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(8)]
    del blocks
