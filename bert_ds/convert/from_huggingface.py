"""A Hugging Face BERT becomes a checkpoint that training goes on from: weights, vocabulary, model settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import LATEST_FILE, VOCABULARY_FILE
from bert_ds.checkpoint.reader import Checkpoint
from bert_ds.config.model import ModelConfig
from bert_ds.convert.converted_checkpoint import write_converted
from bert_ds.convert.hf_source import ModelChoices, SourceModel
from bert_ds.convert.hf_vocabulary import FoundVocabulary
from bert_ds.convert.output_folder import output_folder
from bert_ds.convert.verify import Difference, verify_import, why_not_verifiable
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import CheckpointError, DataError, Problem


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """What the user may choose."""

    model: ModelChoices = field(default_factory=ModelChoices)
    verify: bool = True
    """Compare logits with `transformers` where it is installed."""
    force: bool = False
    """Replace an earlier output."""


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What was read and written."""

    source: Path
    out: Path
    checkpoint: Path
    """The checkpoint's own folder in `out`."""
    model_type: str
    config: ModelConfig
    vocabulary: FoundVocabulary
    initialized: tuple[str, ...]
    """Our names of parameters that the model lacks."""
    left_out: tuple[str, ...]
    """Sentences on what was not taken over."""
    verification: str


def import_from_huggingface(folder: Path, out: Path, options: ImportOptions) -> ImportReport:
    """Converts the model in `folder` to a folder of checkpoints, `out`, with one checkpoint of step 0.

    `out` appears whole or not at all, and `folder` is only read.

    Raises:
        CheckpointError: the model cannot be trained here, its files are damaged, `out` cannot be written, or
            verification fails.
    """
    source = SourceModel.open(folder, options.model)
    with output_folder(out, source=folder, force=options.force, marker=LATEST_FILE) as made:
        vocab_file = _write_vocabulary(made, source.vocabulary)
        checkpoint = write_converted(
            made, source.config, source.weight, vocab_file=vocab_file,
            tokenizer_type=source.vocabulary.tokenizer_type, provenance=source.provenance)
        reason = why_not_verifiable(source.config) if options.verify else "verification was switched off"
        difference = None if reason else _verify(source, checkpoint)
    return ImportReport(
        source=folder, out=out, checkpoint=out / checkpoint.name, model_type=source.settings["model_type"],
        config=source.config, vocabulary=source.vocabulary, initialized=source.missing, left_out=source.left_out,
        verification=_verification(difference, reason),
    )


def _write_vocabulary(folder: Path, vocabulary: FoundVocabulary) -> Path:
    path = folder / VOCABULARY_FILE
    files.write_durably(path, [vocabulary.content])
    try:
        Vocabulary.from_file(str(path))
    except DataError as error:
        repair = "use a model with BERT's own special tokens, each once"
        raise CheckpointError(*(Problem("MODEL", vocabulary.source, problem.reason, repair)
                                for problem in error.problems)) from None
    return path


def _verify(source: SourceModel, checkpoint: Path) -> Difference:
    return verify_import(Checkpoint.open(checkpoint), source.config, source.folder, source.missing_parts())


def _verification(difference: Difference | None, reason: str | None) -> str:
    if difference is None:
        return f"Not verified against `transformers`: {reason}."
    return ("The logits of the checkpoint's model and of `transformers` on random padded rows, in fp32, differ by at "
            f"most: {difference}.")
