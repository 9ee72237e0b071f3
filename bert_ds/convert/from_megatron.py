"""A BERT of Megatron-LM becomes a checkpoint that training goes on from.

Weights only, as the model's files hold them: Megatron's optimizer state is without names, and its distributed optimizer
cuts it along buffers of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_ds.checkpoint.format import LATEST_FILE, ParameterRecord
from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.config.data import TOKENIZER_TYPES
from bert_ds.config.model import ModelConfig
from bert_ds.convert.converted_checkpoint import Provenance, write_converted
from bert_ds.convert.megatron_args import StatedByUser, model_config_of, size_in
from bert_ds.convert.megatron_dist import DistSource
from bert_ds.convert.megatron_layout import DIST_METADATA_FILE, find_iteration
from bert_ds.convert.megatron_names import OUTPUT_BIAS, OUTPUT_WEIGHT, WORD_TABLE, fit_rows
from bert_ds.convert.megatron_source import MegatronSource, RankFilesSource, copies_differ
from bert_ds.convert.output_folder import output_folder
from bert_ds.data.vocabulary import EXTRA_TOKENS, Vocabulary
from bert_ds.errors import CheckpointError, Problem, raise_if_any

_ROWS_MULTIPLE = 128
"""Megatron's default of make_vocab_size_divisible_by, and ours."""
_VOCABULARY_TABLES = (WORD_TABLE, OUTPUT_WEIGHT, OUTPUT_BIAS)


@dataclass(frozen=True, kw_only=True)
class MegatronImportOptions:
    """What the user may, or has to, say."""

    vocab_file: Path
    """The vocabulary of the run; Megatron's checkpoints hold none."""
    tokenizer_type: str | None = None
    """None takes the checkpoint's."""
    vocab_extra_bos_eos: bool = False
    """Count [BOS] and [EOS] as entries, see DataConfig.vocab_extra_bos_eos."""
    stated: StatedByUser = field(default_factory=StatedByUser)
    force: bool = False
    """Replace an earlier output."""


@dataclass(frozen=True, kw_only=True)
class MegatronImportReport:
    """What was read and written."""

    source: Path
    """The iteration's folder."""
    out: Path
    format: str
    iteration: int
    config: ModelConfig
    tokenizer_type: str


def import_from_megatron(folder: Path, out: Path, options: MegatronImportOptions) -> MegatronImportReport:
    """Converts the checkpoint in `folder`, its own folder or one of a run's (then the latest), to a folder of
    checkpoints, `out`, with one checkpoint of step 0.

    `out` appears whole or not at all, and `folder` is only read.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model, or `out` cannot be written.
        DataError: the vocabulary cannot be used.
    """
    vocabulary = Vocabulary.from_file(str(options.vocab_file), extra_bos_eos=options.vocab_extra_bos_eos)
    source = open_source(find_iteration(folder))
    theirs = model_config_of(source, options.stated)
    tokenizer_type = _tokenizer_type(source, options)
    stored = parameter_shapes(theirs)
    raise_if_any(CheckpointError, _problems(source, theirs, stored, vocabulary))
    config = replace(theirs, vocab_size=len(vocabulary), make_vocab_size_divisible_by=_ROWS_MULTIPLE)

    def weight(name: str) -> Tensor:
        full = source.read(name, stored[name], theirs)
        return fit_rows(full, config.padded_vocab_size) if name in _VOCABULARY_TABLES else full

    with output_folder(out, source=folder, force=options.force, marker=LATEST_FILE) as made:
        _check_tie(source, theirs, stored)
        write_converted(made, config, weight, vocab_file=options.vocab_file, tokenizer_type=tokenizer_type,
                        provenance=Provenance(name=source.folder.resolve().parent.name, origin=_origin(source)))
    return MegatronImportReport(source=source.folder, out=out, format=_format(source), iteration=source.iteration,
                                config=config, tokenizer_type=tokenizer_type)


def open_source(folder: Path) -> MegatronSource:
    """Opens the iteration's folder in whichever format it is."""
    return DistSource(folder) if (folder / DIST_METADATA_FILE).is_file() else RankFilesSource(folder)


def _check_tie(source: MegatronSource, theirs: ModelConfig, stored: dict[str, ParameterRecord]) -> None:
    """The last stage's copy of the tied word table has to be the first stage's."""
    if theirs.untie_embeddings_and_output_weights or OUTPUT_WEIGHT not in source.shapes():
        return
    table, copy = (source.read(name, stored[WORD_TABLE], theirs) for name in (WORD_TABLE, OUTPUT_WEIGHT))
    if not torch.equal(table, copy):
        raise copies_differ(source.folder, "the tied word table", "the first and the last stage", table, copy)


def _problems(
    source: MegatronSource, theirs: ModelConfig, stored: dict[str, ParameterRecord], vocabulary: Vocabulary
) -> Iterator[Problem]:
    found = set(source.shapes())
    tied_copy = set() if theirs.untie_embeddings_and_output_weights else {OUTPUT_WEIGHT}
    for name in stored:
        if name not in found:
            yield Problem(str(source.folder), name, "is missing", "use a complete checkpoint of a BERT")
    for name in sorted(found - set(stored) - tied_copy):
        yield Problem(str(source.folder), name, "does not fit the rest of the model", "use a complete checkpoint")
    rows, entries = theirs.vocab_size, len(vocabulary)
    args = source.args or {}
    tensor_parallel = source.layout[0] if source.layout else size_in(args, "tensor_model_parallel_size", 1)
    unit = size_in(args, "make_vocab_size_divisible_by", _ROWS_MULTIPLE) * tensor_parallel
    # Up to 0.16 Megatron-LM counts [BOS] and [EOS] too, which the vocabulary need not hold.
    fewest = max(rows - unit - len(EXTRA_TOKENS), 0) + 1
    if not fewest <= entries <= rows:
        yield Problem("--vocab-file", entries, f"entries do not make a word table of {rows} rows, which Megatron-LM "
                      f"pads to a multiple of {unit}",
                      f"give the run's own vocabulary, of {fewest} to {rows} entries")


def _tokenizer_type(source: MegatronSource, options: MegatronImportOptions) -> str:
    found = options.tokenizer_type or (source.args or {}).get("tokenizer_type")
    if found not in TOKENIZER_TYPES:
        raise CheckpointError.of("--tokenizer-type", found, f"of {source.folder} is not one of BERT's WordPiece",
                                 f"say which it was: {' or '.join(TOKENIZER_TYPES)}")
    return str(found)


def _format(source: MegatronSource) -> str:
    kind = "torch_dist" if source.layout is None else "torch"
    return f"legacy model, version {source.version:g}" if source.legacy else f"core, {kind}"


def _origin(source: MegatronSource) -> dict[str, Any]:
    args = source.args or {}
    return {"program": "Megatron-LM", "format": _format(source), "iteration": source.iteration,
            "consumed_train_samples": size_in(args, "consumed_train_samples", 0), "layout": source.layout}
