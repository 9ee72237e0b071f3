"""What a run writes, where and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bert_ds.errors import Problem


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Checkpoints and logs. Intervals are in iterations."""

    save: str | None = None
    """Folder of the checkpoints; None saves nothing."""
    load: str | None = None
    """Folder to resume from, or one checkpoint in it. Where it is the folder of `save` and holds no checkpoint yet, a
    new run starts."""
    ckpt_step: int | None = None
    """Iteration of the checkpoint to load; None means the newest."""
    exit_on_missing_checkpoint: bool = False
    """Refuse to start a new run where `load` holds no checkpoint."""
    finetune: bool = False
    """Take the weights of `load` alone and start at iteration 0, with this run's data, schedule and optimizer. Started
    again, the run goes on from its own checkpoints in `save`."""
    use_checkpoint_args: bool = False
    """Take the model, the tokenizer and, where nothing else is named, the vocabulary from the checkpoint in `load`;
    flags win over the checkpoint, and the checkpoint over the recipe."""
    load_optim: bool = True
    """Take AdamW's moments and the loss scale from the checkpoint; otherwise they start afresh, at the checkpoint's
    iteration, learning rate and place in the data."""
    save_optim: bool = True
    """Save AdamW's moments; a checkpoint without them is a third as large and resumes with load_optim switched off."""
    save_interval: int | None = None
    """Iterations between checkpoints; the last iteration is saved as well."""
    keep_last: int | None = None
    """Checkpoints to keep; older ones are deleted once a newer one is saved and has been read back. None keeps all."""
    keep_every: int | None = None
    """Keep the checkpoints of iterations that this number divides as well, for good."""
    async_save: bool = True
    """Write checkpoints while training goes on, from a copy in host memory; training waits where there is no room."""
    export_hf_interval: int | None = None
    """Iterations between exports to Hugging Face's format, SAVE/hf_iter_N, each of a checkpoint and without a wait: a
    multiple of save_interval. None exports nothing."""
    save_deepspeed: str | None = None
    """Folder for DeepSpeed's own checkpoint of the run's last state, for DeepSpeed's tools; it may not hold anything
    yet. None writes none."""
    tensorboard_dir: str | None = None
    """Folder of the TensorBoard events and of metrics.jsonl; None writes neither."""
    log_interval: int = 100
    """Iterations between log lines; metrics are means over them."""

    def problems(self) -> Iterator[Problem]:
        """Everything that is wrong with these settings."""
        yield from self._load_problems()
        if self.save_interval is not None and self.save is None:
            yield Problem("output.save_interval", self.save_interval, "has no folder to save to", "set output.save")
        if self.keep_every is not None and self.keep_last is None:
            yield Problem("output.keep_every", self.keep_every, "changes nothing, since all checkpoints are kept",
                          "set output.keep_last as well")
        for name in ("save_interval", "log_interval", "keep_last", "keep_every", "export_hf_interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield Problem(f"output.{name}", value, "must be at least 1", "give a positive number")
        exports, saves = self.export_hf_interval, self.save_interval
        if exports is not None and (not saves or exports % saves):
            yield Problem("output.export_hf_interval", exports,
                          f"is no multiple of output.save_interval={saves}, and checkpoints are what is "
                          "exported", "choose a multiple of --save-interval")

    def _load_problems(self) -> Iterator[Problem]:
        if self.load is None:
            for name in ("ckpt_step", "exit_on_missing_checkpoint", "finetune", "use_checkpoint_args"):
                value = getattr(self, name)
                if value not in (None, False):
                    yield Problem(f"output.{name}", value, "has no folder to load from", "set output.load")
        elif self.finetune and self.load == self.save:
            yield Problem("output.finetune", True, "would save among the checkpoints that it starts from",
                          "give output.save another folder than output.load")
        if self.ckpt_step is not None and self.ckpt_step < 0:
            yield Problem("output.ckpt_step", self.ckpt_step, "is negative", "name an iteration that was saved")
