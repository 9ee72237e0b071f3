"""A checkpoint made from another program's weights: step 0, the kind `weight` alone, no optimizer state.

Training starts from it with `--load FOLDER --finetune`; it exports like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_ds import __version__
from bert_ds.checkpoint.format import WEIGHT, FileRecord, LayoutRecord, Manifest, ParameterRecord, tag_for
from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.checkpoint.writer import TensorSlice, commit, prepare_folder, write_rank_file, write_vocabulary
from bert_ds.config.model import ModelConfig

_FILE_BYTES = 2**29
"""Files are closed beyond this size: what is in memory at a time, and what several ranks share in checking."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where converted weights come from."""

    name: str
    """What the model is called."""
    origin: Mapping[str, Any]
    """For whoever reads the manifest; JSON's own types."""
    sentence_task: str = "order"
    """What the sentence head was trained for, one of config.data.SENTENCE_TASKS."""


def write_converted(
    save_dir: Path, model: ModelConfig, weights: Callable[[str], Tensor], *, vocab_file: Path, tokenizer_type: str,
    provenance: Provenance,
) -> Path:
    """Writes SAVE_DIR/iter_0000000 and `latest`; returns the checkpoint's folder.

    Args:
        save_dir: folder of checkpoints.
        model: what the weights are of.
        weights: the full fp32 tensor of a logical name; asked once for each, in the order of the forward pass.
        vocab_file: vocabulary of the model, copied; it has model.vocab_size entries.
        tokenizer_type: how text becomes its tokens, one of config.data.TOKENIZER_TYPES.
        provenance: where the weights come from.
    """
    tag, parameters = tag_for(0), parameter_shapes(model)
    folder = prepare_folder(save_dir, tag)
    vocabulary = write_vocabulary(folder, vocab_file, size=model.vocab_size, tokenizer_type=tokenizer_type)
    return commit(save_dir, tag, Manifest(
        step=0, consumed_samples=0, successful_samples=0, skipped_steps=0, optimizer_step=0, loss_scaler=None,
        config={"name": provenance.name, "model": asdict(model), "origin": dict(provenance.origin),
                "data": {"tokenizer_type": tokenizer_type, "sentence_task": provenance.sentence_task}},
        layout=LayoutRecord(1, 1, 1), versions={"bert_ds": __version__, "torch": torch.__version__},
        vocabulary=vocabulary, metrics={}, parameters=parameters,
        files=tuple(_write_files(folder, parameters, weights)),
    ))


def _write_files(
    folder: Path, parameters: Mapping[str, ParameterRecord], weights: Callable[[str], Tensor]
) -> Iterator[FileRecord]:
    for number, names in enumerate(_groups(parameters)):
        yield write_rank_file(folder, number, [
            TensorSlice(WEIGHT, name, 0, 1, 0, parameters[name].numel, _flat(weights(name), parameters[name]))
            for name in names])


def _flat(weight: Tensor, record: ParameterRecord) -> Tensor:
    assert (tuple(weight.shape), weight.dtype) == (record.shape, torch.float32)
    return weight.reshape(-1)


def _groups(parameters: Mapping[str, ParameterRecord]) -> Iterator[list[str]]:
    """Consecutive names whose tensors make one file."""
    names: list[str] = []
    filled = 0
    for name, record in parameters.items():
        names.append(name)
        filled += 4 * record.numel
        if filled >= _FILE_BYTES:
            yield names
            names, filled = [], 0
    if names:
        yield names
