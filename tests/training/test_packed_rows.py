"""Packing changes which samples share a row, and nothing that is learnt from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from launched import launch, make_data, outputs, records
from tolerances import OTHER_KERNEL, REDUCTION_ORDER

from bert_ds.config.data import DataConfig
from bert_ds.config.model import ModelConfig
from bert_ds.data.bert_dataset import build_datasets
from bert_ds.data.loader import WindowLoader
from bert_ds.data.packing import PackedDataset
from bert_ds.data.samples import SampleSource
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.model.bert import BertModel, ComputeSettings
from bert_ds.model.loss import METRICS, LossSums, PretrainingLoss
from bert_ds.parallel.context import ParallelContext

ROWS, SEQUENCE = 24, 96


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Sentences of 4 to 10 tokens in documents of 8: a sample has 60 tokens at most."""
    return make_data(tmp_path_factory.mktemp("data"))


@dataclass(frozen=True)
class Learnt:
    """What one pass over some rows comes to."""

    sums: dict[str, float]
    gradients: dict[str, torch.Tensor]


def learn(source: SampleSource, num_rows: int, config: ModelConfig, data: DataConfig) -> Learnt:
    """Sums of the losses over the first rows of `source` and the gradients of the sum of both."""
    ctx = ParallelContext.single_process()
    model = BertModel(config, ctx, ComputeSettings(rows=data.row_kind, sequences_per_row=data.sequences_per_row))
    model.initialize(seed=3)
    loss = PretrainingLoss(config, ctx, LossSums(ctx.device), averaged_over=1)
    with WindowLoader(source, first_sample=0, num_samples=num_rows, micro_batch_size=num_rows, accumulation=1,
                      dp_rank=0, dp_size=1, num_workers=1) as loader:
        *inputs, masked, order = next(loader).micro_batches[0]
    loss(model(tuple(inputs)), (masked, order, torch.ones(2))).backward()
    return Learnt(dict(zip(METRICS, loss.sums.take().tolist(), strict=True)),
                  {name: parameter.grad for name, parameter in model.named_logical_parameters()})


class Chosen:
    """Samples of a dataset by a list of their numbers."""

    def __init__(self, source: SampleSource, numbers: np.ndarray) -> None:
        self.source, self.numbers = source, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def build_batch(self, indices: np.ndarray):
        return self.source.build_batch(self.numbers[indices])


@pytest.mark.proves("losses and gradients of packed rows are those of their samples", "OTHER_KERNEL")
@pytest.mark.parametrize("binary_head", [True, False])
def test_the_loss_of_packed_rows_is_that_of_their_samples(flags: list[str], binary_head: bool) -> None:
    vocabulary = Vocabulary.from_file(flags[3])
    data = DataConfig(data_path=(flags[1],), split="80,10,10", pack_sequences=True)
    packed = build_datasets(data, seq_length=SEQUENCE, binary_head=binary_head, seed=5, vocabulary=vocabulary,
                            num_samples={"train": ROWS}).train
    assert isinstance(packed, PackedDataset)
    samples = packed.index.samples[:packed.index.row_starts[ROWS]].astype(np.int64)
    assert len(samples) > 2 * ROWS
    config = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=SEQUENCE,
                         max_position_embeddings=SEQUENCE, vocab_size=len(vocabulary), binary_head=binary_head,
                         hidden_dropout=0.0, attention_dropout=0.0)
    together = learn(packed, ROWS, config, data)
    alone = learn(Chosen(packed.source, samples), len(samples), config, DataConfig())
    assert together.sums["sop_count"] == (len(samples) if binary_head else 0)
    assert together.sums["lm_count"] > 300
    for name, wanted in alone.sums.items():
        assert together.sums[name] == pytest.approx(wanted, rel=OTHER_KERNEL["rtol"]), name
    for name, wanted in alone.gradients.items():
        atol = max(OTHER_KERNEL["atol"], OTHER_KERNEL["rtol"] * float(wanted.abs().max()))
        torch.testing.assert_close(together.gradients[name], wanted, rtol=OTHER_KERNEL["rtol"], atol=atol,
                                   msg=lambda text, name=name: f"{name}: {text}")


def curve(folder: Path) -> list[tuple[object, ...]]:
    return [tuple(record[key] for key in ("iteration", "consumed_samples", "lm_loss", "sop_loss", "grad_norm"))
            for record in records(folder)]


@pytest.mark.proves("packed training resumes / is alike on one rank and two", "EXACT", "REDUCTION_ORDER")
@pytest.mark.long
def test_packed_training_resumes_exactly_and_is_alike_on_one_rank_and_two(flags: list[str], tmp_path: Path) -> None:
    run = [*flags, "--pack-sequences", "--seq-length", str(SEQUENCE), "--max-position-embeddings", str(SEQUENCE),
           "--train-iters", "6", "--eval-interval", "6", "--hidden-dropout", "0", "--attention-dropout", "0"]
    for name, ranks in (("one", 1), ("two", 2)):
        done = launch(ranks, [*run, *outputs(tmp_path / name)], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "validation loss at iteration 6" in done.stdout
    torch.testing.assert_close(torch.tensor(curve(tmp_path / "two")), torch.tensor(curve(tmp_path / "one")),
                               **REDUCTION_ORDER)
    for further in (["--exit-interval", "3"], []):
        done = launch(2, [*run, *further, *outputs(tmp_path / "resumed")], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout
    assert curve(tmp_path / "resumed") == curve(tmp_path / "two")
    assert [entry[1] for entry in curve(tmp_path / "one")] == [16, 32, 48, 64, 80, 96]
