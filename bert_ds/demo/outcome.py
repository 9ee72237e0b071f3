"""What the training reached, beside what takes no learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bert_ds.cli.resolve import resolve_run
from bert_ds.data.bert_dataset import build_datasets
from bert_ds.data.commonest_label import commonest_label
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.reporting.runs import Run

NATS_TO_LEARN = 2.0
"""How far the validation loss has to fall for the demonstration to count as a success."""


@dataclass(frozen=True)
class Outcome:
    """Results on the validation set."""

    loss_at_start: float
    loss: float
    """Masked-LM losses, in nats."""
    lm_accuracy: float
    sop_accuracy: float
    commonest_token: str
    commonest_share: float
    """Accuracy of always guessing the commonest masked token."""

    @property
    def has_learned(self) -> bool:
        return self.loss <= self.loss_at_start - NATS_TO_LEARN and self.lm_accuracy > self.commonest_share

    def __str__(self) -> str:
        gain = self.loss_at_start - self.loss
        return "\n".join([
            "On text that was held out for validation",
            f"  masked-LM loss        {self.loss_at_start:.2f} before, {self.loss:.2f} after: {gain:.2f} nats less",
            f'  masked tokens right   {self.lm_accuracy:.1%}; always guessing the commonest, "{self.commonest_token}", '
            f"gives {self.commonest_share:.1%}",
            f"  sentence order right  {self.sop_accuracy:.1%}; a coin gives 50.0%",
        ])


def outcome(run: Run, arguments: Sequence[str], *, world_size: int) -> Outcome:
    """The first and the last evaluation of a run that `pretrain` did with `arguments` on `world_size` ranks."""
    first, last = run.evaluations[0], run.evaluations[-1]
    token, share = _guessing_the_commonest(arguments, world_size)
    return Outcome(first["lm_loss"], last["lm_loss"], last["lm_accuracy"], last["sop_accuracy"], token, share)


def _guessing_the_commonest(arguments: Sequence[str], world_size: int) -> tuple[str, float]:
    """The commonest masked token of the samples that the run was evaluated on, and its share."""
    config = resolve_run(arguments, world_size=world_size).config
    vocabulary = Vocabulary.of_run(config.data)
    evaluated = config.schedule.eval_iters * config.engine.global_batch_size
    valid = build_datasets(
        config.data, seq_length=config.model.seq_length, binary_head=config.model.binary_head,
        seed=config.schedule.seed, vocabulary=vocabulary, num_samples={"valid": evaluated}).valid
    assert valid is not None
    token_id, share = commonest_label(valid.build_batch(np.arange(evaluated)).masked_labels)
    return vocabulary.tokens[token_id], share
