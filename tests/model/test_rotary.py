"""Rotary positions: the formula, Megatron core's own functions, and what they are for."""

from __future__ import annotations

import cmath

import pytest
import torch
from tolerances import EXACT, OTHER_KERNEL

from bert_ds.config.model import ModelConfig
from bert_ds.model.bert import BertModel, ComputeSettings
from bert_ds.model.embeddings import packed_positions
from bert_ds.model.rotary import rotary_turns, rotate
from bert_ds.parallel.context import ParallelContext

POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])


def heads(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 8, 3, 12, generator=torch.Generator().manual_seed(0)).to(dtype)


def turned(x: torch.Tensor, positions: torch.Tensor, rotary_dim: int, base: float = 10000.0) -> torch.Tensor:
    return rotate(x, rotary_turns(positions, rotary_dim, base, torch.promote_types(x.dtype, torch.float32)))


@pytest.mark.parametrize(("rotary_dim", "base"), [(12, 10000.0), (6, 10000.0), (12, 500.0)])
def test_pairs_are_turned_as_complex_numbers(rotary_dim: int, base: float) -> None:
    x = heads(torch.float64)
    found = turned(x, POSITIONS, rotary_dim, base)
    wanted, r = x.clone(), rotary_dim // 2
    for (b, s, n), position in {(b, s, n): int(POSITIONS[b, s]) for b in (0, 1) for s in range(8) for n in range(3)
                                }.items():
        for i in range(r):
            pair = complex(x[b, s, n, i], x[b, s, n, r + i]) * cmath.exp(1j * position * base ** (-i / r))
            wanted[b, s, n, i], wanted[b, s, n, r + i] = pair.real, pair.imag
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.proves("rotary positions are those of megatron-core", "EXACT")
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_megatron_core_turns_alike(percent: float) -> None:
    rope = pytest.importorskip("megatron.core.models.common.embeddings.rotary_pos_embedding")
    embedding = rope.RotaryEmbedding(12, percent, rotary_base=500, use_cpu_initialization=True)
    pairs = embedding.get_freqs_non_repeated(8)
    frequencies = torch.cat((pairs, pairs), dim=-1)[:, None, None, :]  # its get_emb does that too, on a GPU only
    x = heads()
    theirs = rope._apply_rotary_pos_emb_bshd(x.transpose(0, 1), frequencies).transpose(0, 1)
    torch.testing.assert_close(turned(x, torch.arange(8)[None], int(12 * percent), 500.0), theirs, **EXACT)


def test_half_precision_is_turned_in_fp32_and_rounded_once() -> None:
    x, far = heads(torch.bfloat16), POSITIONS + 400
    found = turned(x, far, 12)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, turned(x.float(), far, 12).bfloat16(), **EXACT)


def test_products_depend_on_distances_alone() -> None:
    query, key = heads(torch.float64), heads(torch.float64).flip(1)

    def products(positions: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bqnd,bknd->bnqk", turned(query, positions, 12), turned(key, positions, 12))

    here = products(POSITIONS)
    torch.testing.assert_close(here, products(POSITIONS + 100), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(here, products(POSITIONS * 2))


def test_positions_restart_in_packed_rows() -> None:
    segments = torch.tensor([[1, 1, 1, 2, 2, 2, 3, 0]])
    positions = packed_positions(segments)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    x = heads()[:1]
    torch.testing.assert_close(turned(x, positions, 12)[:, 3:6], turned(x[:, 3:6], torch.arange(3)[None], 12), **EXACT)


def test_packed_rows_of_a_model_compute_what_rows_of_their_own_compute() -> None:
    config = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=24, max_position_embeddings=24,
                         vocab_size=100, position_embedding_type="rope", rotary_percent=0.5, init_method_std=0.2)
    ids, types = torch.randint(100, (1, 24)), torch.randint(2, (1, 24))

    def model(compute: ComputeSettings) -> BertModel:
        built = BertModel(config, ParallelContext.single_process(), compute)
        built.initialize(seed=3)
        return built

    segments = torch.tensor([[1] * 10 + [2] * 14], dtype=torch.int32)
    packed, _, _, _ = model(ComputeSettings(rows="packed", sequences_per_row=2))(
        (ids, types, segments, torch.arange(10, 24)[None]))
    alone, _, _, _ = model(ComputeSettings())(
        (ids[:, 10:], types[:, 10:], torch.ones(1, 14, dtype=torch.int32), torch.arange(14)[None]))
    torch.testing.assert_close(packed, alone, **OTHER_KERNEL)
