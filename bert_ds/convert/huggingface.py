"""A checkpoint of any layout becomes a Hugging Face model folder: weights, configuration, tokenizer, model card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bert_ds.checkpoint import files
from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.checkpoint.reader import Checkpoint, locate
from bert_ds.checkpoint.run_config import model_config_from
from bert_ds.config.model import ModelConfig
from bert_ds.convert.hf_model import CONFIG_FILE, DTYPES, architecture, hf_config, write_config, write_weights
from bert_ds.convert.hf_tokenizer import write_tokenizer
from bert_ds.convert.model_card import model_card
from bert_ds.convert.output_folder import output_folder
from bert_ds.convert.verify import Difference, verify, why_not_verifiable
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import CheckpointError, Problem, raise_if_any


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What the user may choose; everything else comes from the checkpoint."""

    dtype: str = "float32"
    """Type of the weights in the files, a key of hf_model.DTYPES."""
    untie: bool = False
    """Write the output projection as tensors of its own, for loaders that do not know the tie."""
    max_shard_bytes: int = 5 * 10**9
    verify: bool = True
    """Check the checkpoint's hashes and compare logits with `transformers` where it is installed."""
    force: bool = False
    """Replace an earlier export."""
    license_name: str | None = None
    """For the model card; None leaves it out."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written."""

    source: Path
    out: Path
    architecture: str
    num_parameters: int
    """Numbers of the model as exported, a tied word table once."""
    weight_files: tuple[str, ...]
    difference: Difference | None
    """None where it was not verified."""
    verification: str
    """The same in words, with the reason where it was not verified."""


def export_to_huggingface(checkpoint: Path, out: Path, options: ExportOptions) -> ExportReport:
    """Exports `checkpoint`, its own folder or one of a run's checkpoints (then the latest), to the folder `out`.

    `out` appears whole or not at all, and `checkpoint` is only read.

    Raises:
        CheckpointError: the checkpoint cannot be used, `out` cannot be written, or verification fails.
    """
    source = Checkpoint.open(locate(checkpoint), verify_hashes=options.verify)
    config = model_config_from(source.manifest)
    vocabulary = Vocabulary.from_file(str(source.vocabulary))
    raise_if_any(CheckpointError, _problems(source, config, vocabulary))
    # [BOS] and [EOS], which training may have appended to the file's entries, are left out; the table keeps its rows.
    config = replace(config, vocab_size=len(vocabulary), make_vocab_size_divisible_by=config.padded_vocab_size)
    dtype, untie = DTYPES[options.dtype], options.untie or config.untie_embeddings_and_output_weights
    with output_folder(out, source=source.folder, force=options.force, marker=CONFIG_FILE) as folder:
        weight_files = write_weights(folder, source, config, dtype=dtype, untie=untie,
                                     max_shard_bytes=options.max_shard_bytes)
        write_config(folder, hf_config(config, pad_token_id=vocabulary.pad_id, dtype=options.dtype, untie=untie))
        write_tokenizer(folder, source.vocabulary, max_length=config.max_position_embeddings,
                        lower_case=source.manifest.vocabulary.tokenizer_type == "BertWordPieceLowerCase")
        reason = why_not_verifiable(config) if options.verify else "verification was switched off"
        difference = None if reason else verify(source, config, folder, dtype)
        verification = _verification(difference, reason)
        card = model_card(source.manifest, config, name=out.resolve().name, dtype=options.dtype,
                          license_name=options.license_name, verification=verification)
        files.write_durably(folder / "README.md", [card.encode()])
    return ExportReport(
        source=source.folder, out=out, architecture=architecture(config), difference=difference,
        num_parameters=config.num_parameters - _padding_numbers(config), weight_files=tuple(weight_files),
        verification=verification,
    )


def _problems(source: Checkpoint, config: ModelConfig, vocabulary: Vocabulary) -> Iterator[Problem]:
    yield from config.export_problems()
    expected = parameter_shapes(config)
    found = source.manifest.parameters
    for name in sorted(set(expected) | set(found)):
        if expected.get(name) != found.get(name):
            yield Problem(str(source.folder), name, f"is {found.get(name)} and should be {expected.get(name)}",
                          "use the bert_ds that wrote the checkpoint")
    extended = Vocabulary.from_file(str(source.vocabulary), extra_bos_eos=True)
    if config.vocab_size not in {len(vocabulary), len(extended)}:
        yield Problem(str(source.vocabulary), len(vocabulary),
                      f"entries do not make the model's vocab_size {config.vocab_size}", "use another checkpoint")


def _verification(difference: Difference | None, reason: str | None) -> str:
    if difference is None:
        return f"Not verified against `transformers`: {reason}."
    return ("The logits of `transformers` and of the checkpoint's model on random padded rows, in fp32, differ by at "
            f"most: {difference}.")


def _padding_numbers(config: ModelConfig) -> int:
    """Numbers in the rows that pad the word table, the output weight where it is another, and the bias."""
    tables = 2 if config.untie_embeddings_and_output_weights else 1
    return (config.padded_vocab_size - config.vocab_size) * (tables * config.hidden_size + 1)
