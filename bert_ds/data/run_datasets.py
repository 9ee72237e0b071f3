"""The datasets that a run asks for."""

from __future__ import annotations

from bert_ds.config.run import RunConfig
from bert_ds.data.bert_dataset import Datasets, build_datasets
from bert_ds.data.vocabulary import Vocabulary


def datasets_of_run(run: RunConfig, vocabulary: Vocabulary, train_samples: int | None = None) -> Datasets:
    """The datasets of `run`, sized by its schedule; see build_datasets.

    train_samples: samples of the training set that the run reads up to its end, where a resumed run does not follow
    its schedule's batches from the start.
    """
    batch, schedule = run.engine.global_batch_size, run.schedule
    evaluated = schedule.eval_iters * batch if schedule.eval_interval else 0
    return build_datasets(
        run.data, seq_length=run.model.seq_length, eval_seq_length=run.eval_seq_length,
        binary_head=run.model.binary_head, seed=schedule.seed, vocabulary=vocabulary, num_samples={
            "train": run.batch_sizes.after(0, schedule.train_iters) if train_samples is None else train_samples,
            "valid": evaluated, "test": evaluated})
