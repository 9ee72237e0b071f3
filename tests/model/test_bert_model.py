"""The model on one process: initial weights, loss, masks, packing, gradients, names."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tolerances import EXACT, OTHER_KERNEL

from bert_ds.config.model import ModelConfig
from bert_ds.model.bert import BertModel, ComputeSettings, vocabulary_logits
from bert_ds.model.embeddings import packed_positions, sequence_starts
from bert_ds.model.init import initial_std, initialize_parameter
from bert_ds.model.loss import LossSums, PretrainingLoss
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.sharding import sharded_parameter

CTX = ParallelContext.single_process()
CONFIG = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=24, max_position_embeddings=24,
                     vocab_size=1000)


def model_of(config: ModelConfig, compute: ComputeSettings | None = None) -> BertModel:
    model = BertModel(config, CTX, compute or ComputeSettings())
    model.initialize(seed=3)
    return model


def inputs(segments: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    B, S = segments.shape
    return (torch.randint(5, 1000, (B, S), generator=generator), torch.randint(2, (B, S), generator=generator),
            segments, torch.arange(8).expand(B, 8))


def loss_of(config: ModelConfig) -> PretrainingLoss:
    return PretrainingLoss(config, CTX, LossSums(CTX.device), averaged_over=1)


def test_parameter_count_is_the_closed_formula() -> None:
    for config in (CONFIG, dataclasses.replace(CONFIG, binary_head=False, ffn_hidden_size=48)):
        assert sum(p.numel() for p in model_of(config).parameters()) == config.num_parameters
    assert ModelConfig(num_layers=24, hidden_size=1024, num_attention_heads=16).num_parameters == 336_297_858


@pytest.mark.proves("the initial loss is that of a uniform guess", "ln V + ln 2, 0.3")
def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    """ln V plus half the variance of the logits, std^2 x H. Megatron-LM starts at 10.5 = ln 30592 + 0.2."""
    config = dataclasses.replace(CONFIG, hidden_size=256, num_layers=1)
    model = model_of(config)
    labels = torch.randint(1000, (8, 8), generator=torch.Generator().manual_seed(1))
    loss = loss_of(config)
    loss(model(inputs(torch.ones(8, 24, dtype=torch.int32))),
         (labels, torch.zeros(8, 1, dtype=torch.long), torch.tensor([64.0, 8.0])))
    lm_loss, _, count, sop_loss, _, pairs = loss.sums.take().tolist()
    assert lm_loss / count == pytest.approx(math.log(1000) + 0.02**2 * 256 / 2, abs=0.08)
    assert sop_loss / pairs == pytest.approx(math.log(2), abs=0.1)


def test_initial_weights_follow_the_table() -> None:
    model = model_of(dataclasses.replace(CONFIG, hidden_size=128))
    for name, parameter in model.named_logical_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif "norm" in name:
            assert parameter.min() == parameter.max() == 1, name
        else:
            wanted = 0.01 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0.02
            assert initial_std(name, model.config) == pytest.approx(wanted), name
            if parameter.numel() > 4000:
                assert float(parameter.detach().std()) == pytest.approx(wanted, rel=0.05), name


@pytest.mark.parametrize(("name", "dim"), [("encoder.layers.1.self_attention.linear_qkv.weight", 0),
                                           ("encoder.layers.0.mlp.linear_fc2.weight", 1)])
def test_pieces_of_initial_weights_join_to_the_whole(name: str, dim: int) -> None:
    whole = torch.nn.Parameter(torch.empty(24, 16))
    initialize_parameter(whole, name, CONFIG, seed=9)
    pieces = []
    for rank in range(4):
        piece = sharded_parameter((24, 16), dim, ParallelContext(tp_size=4, tp_rank=rank))
        initialize_parameter(piece, name, CONFIG, seed=9)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, dim).detach(), whole.detach(), **EXACT)


def test_padding_changes_nothing() -> None:
    model = model_of(CONFIG)
    segments = torch.ones(2, 24, dtype=torch.int32)
    segments[:, 16:] = 0
    first = inputs(segments)
    second = (first[0].clone(), *first[1:])
    second[0][:, 16:] = 7
    for found, wanted in zip(model(first), model(second), strict=True):
        torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.proves("a packed row computes what rows of their own compute", "OTHER_KERNEL")
def test_packed_rows_compute_what_rows_of_their_own_compute() -> None:
    packed = torch.tensor([[1] * 10 + [2] * 9 + [0] * 5], dtype=torch.int32)
    ids, types, _, _ = inputs(packed)
    together = model_of(CONFIG, ComputeSettings(rows="packed", sequences_per_row=2))
    features, _, _, order = together((ids, types, packed, torch.tensor([[1, 3, 12, 15]])))
    alone = model_of(CONFIG)
    for index, (start, length, positions) in enumerate([(0, 10, [1, 3]), (10, 9, [2, 5])]):
        row = slice(start, start + length)
        single, _, _, own_order = alone((ids[:, row], types[:, row], torch.ones(1, length, dtype=torch.int32),
                                         torch.tensor([positions])))
        torch.testing.assert_close(features[:, 2 * index : 2 * index + 2], single, **OTHER_KERNEL)
        torch.testing.assert_close(order[:, index], own_order[:, 0], **OTHER_KERNEL)


def test_positions_and_starts_of_packed_rows() -> None:
    segments = torch.tensor([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 3, 3, 3]], dtype=torch.int32)
    assert packed_positions(segments).tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 0, 1, 2]]
    assert sequence_starts(segments, 3).tolist() == [[0, 3, 0], [0, 1, 4]]


def test_a_batch_without_a_masked_token_gives_zero() -> None:
    model = model_of(CONFIG)
    labels = (torch.full((1, 8), -100), torch.full((1, 1), -100), torch.zeros(2))
    for per_micro_batch in (False, True):
        loss = dataclasses.replace(loss_of(CONFIG), per_micro_batch=per_micro_batch)(
            model(inputs(torch.ones(1, 24, dtype=torch.int32))), labels)
        assert loss.item() == 0
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_padded_vocabulary_columns_take_no_part() -> None:
    model = model_of(CONFIG)
    batch, labels = inputs(torch.ones(1, 24, dtype=torch.int32)), torch.randint(1000, (1, 8))
    all_labels = (labels, torch.zeros(1, 1, dtype=torch.long), torch.tensor([8.0, 1.0]))
    loss = loss_of(CONFIG)
    before = loss(model(batch), all_labels)
    before.backward()
    parameters = dict(model.named_logical_parameters())
    bias, words = parameters["output_layer.bias"], parameters["embedding.word_embeddings.weight"]
    assert bias.shape == (1024,)
    assert bias.grad[1000:].abs().max() == words.grad[1000:].abs().max() == 0
    with torch.no_grad():
        bias[1000:] = 100
    torch.testing.assert_close(loss(model(batch), all_labels), before, **EXACT)
    assert vocabulary_logits(model(batch), 1000).shape == (1, 8, 1000)


@pytest.mark.proves("gradients are those of finite differences", "1e-5 (float64)")
@pytest.mark.parametrize("norm_placement", ["pre", "post"])
def test_gradients_are_those_of_finite_differences(norm_placement: str) -> None:
    config = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=8, max_position_embeddings=8,
                         vocab_size=20, make_vocab_size_divisible_by=4, norm_placement=norm_placement,
                         init_method_std=0.3, attention_backend="unfused")
    model = model_of(config, ComputeSettings(torch.float64))
    segments = torch.tensor([[1] * 8, [1] * 6 + [0] * 2], dtype=torch.int32)
    batch = (torch.randint(20, (2, 8)), torch.randint(2, (2, 8)), segments, torch.tensor([[1, 4], [2, 5]]))

    def scalar() -> torch.Tensor:
        features, words, bias, order = model(batch)
        return torch.tanh(features @ words.t() + bias).sum() + torch.tanh(order).sum()

    scalar().backward()
    step = 1e-6
    for name, parameter in model.named_logical_parameters():
        index = int(parameter.grad.abs().argmax())
        with torch.no_grad():
            flat = parameter.view(-1)
            before = flat[index].item()
            flat[index] = before + step
            above = scalar()
            flat[index] = before - step
            below = scalar()
            flat[index] = before
        numeric = float((above - below) / (2 * step))
        assert float(parameter.grad.view(-1)[index]) == pytest.approx(numeric, rel=1e-5, abs=1e-7), name


@pytest.mark.proves("two layers memorise 64 samples", "loss < 0.1, order 100 %")
def test_two_layers_memorise_sixty_four_samples() -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, vocab_size=100, hidden_size=64)
    model, loss = model_of(config), loss_of(config)
    batch = inputs(torch.ones(64, 24, dtype=torch.int32))
    batch = (batch[0] % 100, *batch[1:])
    labels = (torch.randint(100, (64, 8)), torch.randint(2, (64, 1)), torch.tensor([512.0, 64.0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        loss(model(batch), labels).backward()
        optimizer.step()
        sums = loss.sums.take().tolist()
    assert sums[0] / sums[2] < 0.1
    assert sums[4] == sums[5] == 64
