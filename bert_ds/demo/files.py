"""Where the demonstration keeps its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoFiles:
    """Files and folders below the work folder."""

    work_dir: Path

    @property
    def text(self) -> Path:
        return self.work_dir / "corpus.jsonl"

    @property
    def held_out(self) -> Path:
        """Documents that are not part of `text`."""
        return self.work_dir / "held_out.jsonl"

    @property
    def vocabulary(self) -> Path:
        return self.work_dir / "vocab.txt"

    @property
    def output_prefix(self) -> Path:
        return self.work_dir / "corpus"

    @property
    def data_prefix(self) -> Path:
        """What preprocess_data makes of `output_prefix`."""
        return self.work_dir / "corpus_text_sentence"

    @property
    def checkpoints(self) -> Path:
        return self.work_dir / "checkpoints"

    @property
    def run(self) -> Path:
        """TensorBoard files and metrics.jsonl."""
        return self.work_dir / "runs" / "tiny"

    @property
    def model(self) -> Path:
        """The Hugging Face model."""
        return self.work_dir / "model"

    @property
    def picture(self) -> Path:
        return self.work_dir / "loss.png"
