"""Proof of an export: `transformers` computes the same logits from it as our model from the checkpoint.

B batch, S sequence, P predictions kept per row (here all S), V true vocabulary, T real tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from bert_ds.checkpoint.format import WEIGHT
from bert_ds.checkpoint.reader import Checkpoint
from bert_ds.compat import installed_version
from bert_ds.config.model import ModelConfig
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import CheckpointError
from bert_ds.model.bert import BertModel, ComputeSettings, vocabulary_logits
from bert_ds.parallel.context import ParallelContext

RELATIVE_TOLERANCE = 1e-5
"""fp32 sums in another order; a wrong epsilon, activation or LayerNorm place costs 1e-4 and far more."""
OLDEST_TRANSFORMERS = Version("4.57")

_ROWS = 2


@dataclass(frozen=True)
class Difference:
    """Largest absolute difference of the logits at real tokens, and what it is measured against."""

    mlm: float
    sop: float | None
    """None without the sentence-order head."""
    largest_logit: float

    @property
    def largest(self) -> float:
        return max(self.mlm, self.sop or 0.0)

    @property
    def relative(self) -> float:
        return self.largest / self.largest_logit

    def __str__(self) -> str:
        sop = "" if self.sop is None else f", sentence order {self.sop:.1e}"
        return (f"masked LM {self.mlm:.1e}{sop}; {self.relative:.1e} of the largest logit {self.largest_logit:.3g} "
                f"(limit {RELATIVE_TOLERANCE:.0e})")


@dataclass(frozen=True)
class Logits:
    """mlm [T, V] at the real tokens, sop [B, 2]."""

    mlm: Tensor
    sop: Tensor | None


@dataclass(frozen=True)
class RandomRows:
    """Random rows of random length, padded at the end. All tensors are [B, S]; mask is 1 at real tokens."""

    input_ids: Tensor
    token_type_ids: Tensor
    mask: Tensor

    @classmethod
    def draw(cls, config: ModelConfig, pad_token_id: int, seed: int = 0) -> RandomRows:
        """One row of full length, so that every position takes part, and shorter ones."""
        S = config.max_position_embeddings
        generator = torch.Generator().manual_seed(seed)
        ids_BS = torch.randint(config.vocab_size, (_ROWS, S), generator=generator)
        types_BS = torch.randint(max(config.num_token_types, 1), (_ROWS, S), generator=generator)
        lengths_B1 = torch.randint(S // 2, S, (_ROWS, 1), generator=generator)
        lengths_B1[0] = S
        mask_BS = (torch.arange(S) < lengths_B1).long()
        return cls(torch.where(mask_BS.bool(), ids_BS, pad_token_id), types_BS * mask_BS, mask_BS)


def why_not_verifiable(config: ModelConfig) -> str | None:
    """What keeps this machine from verifying an export, or None."""
    found = installed_version("transformers")
    if found is None:
        return "transformers is not installed (pip install transformers)"
    if Version(found) < OLDEST_TRANSFORMERS:
        return f"transformers {found} is older than {OLDEST_TRANSFORMERS}"
    needed, available = _bytes_needed(config), _bytes_available()
    if available is not None and needed > available:
        return f"it takes {needed / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB are free"
    return None


def verify(checkpoint: Checkpoint, config: ModelConfig, exported: Path, dtype: torch.dtype) -> Difference:
    """Compares the export in `exported`, written in `dtype`, with the checkpoint, both computed in fp32.

    Raises:
        CheckpointError: they differ by more than RELATIVE_TOLERANCE, or names are missing or left over.
    """
    difference = largest_difference(checkpoint, config, exported, dtype, compute=torch.float32)
    if not difference.relative <= RELATIVE_TOLERANCE:
        raise CheckpointError.of("export", exported.name.removesuffix(".incomplete"),
                                 f"transformers computes other logits than the checkpoint's model: {difference}",
                                 "report this with config.json; --no-verify writes the files all the same")
    return difference


def verify_import(
    checkpoint: Checkpoint, config: ModelConfig, source: Path, missing: Mapping[str, Tensor]
) -> Difference:
    """Compares `checkpoint` with the model in `source`, the folder that it was made from, both computed in fp32.

    `missing` holds what the folder lacks, by their names: `transformers` is given the values that the checkpoint has.

    Raises:
        CheckpointError: they differ by more than RELATIVE_TOLERANCE, or their names do not fit.
    """
    rows = RandomRows.draw(config, Vocabulary.from_file(str(checkpoint.vocabulary)).pad_id)
    ours = our_logits(config, lambda name: checkpoint.read_full(WEIGHT, name), rows, torch.float32)
    difference = _difference(ours, their_logits(config, source, rows, torch.float32, missing=missing))
    if not difference.relative <= RELATIVE_TOLERANCE:
        raise CheckpointError.of("MODEL", source, "transformers computes other logits from it than the checkpoint's "
                                 f"model: {difference}", "report this with config.json; --no-verify converts it still")
    return difference


def largest_difference(
    checkpoint: Checkpoint, config: ModelConfig, exported: Path, dtype: torch.dtype, *, compute: torch.dtype
) -> Difference:
    """Runs both models in `compute` on the same random padded rows; one of them is in memory at a time."""
    rows = RandomRows.draw(config, Vocabulary.from_file(str(checkpoint.vocabulary)).pad_id)

    def exported_weight(name: str) -> Tensor:
        return checkpoint.read_full(WEIGHT, name).to(dtype)

    ours = our_logits(config, exported_weight, rows, compute)
    return _difference(ours, their_logits(config, exported, rows, compute))


def _difference(ours: Logits, theirs: Logits) -> Difference:
    largest = [float(logits.abs().max()) for logits in (ours.mlm, ours.sop) if logits is not None]
    sop = None
    if ours.sop is not None and theirs.sop is not None:
        sop = float((ours.sop - theirs.sop).abs().max())
    return Difference(float((ours.mlm - theirs.mlm).abs().max()), sop, max(largest))


@torch.no_grad()
def our_logits(
    config: ModelConfig, weights: Callable[[str], Tensor], rows: RandomRows, compute: torch.dtype
) -> Logits:
    """What our model computes from `weights` (by logical name), without dropout."""
    config = replace(config, transformer_impl="local", attention_backend="unfused", attention_dropout=0.0)
    model = BertModel(config, ParallelContext.single_process(), ComputeSettings(compute))
    model.load_logical(weights)
    positions_BP = torch.arange(rows.mask.size(1)).expand_as(rows.mask)
    outputs = model((rows.input_ids, rows.token_type_ids, rows.mask, positions_BP))
    mlm_TV = vocabulary_logits(outputs, config.vocab_size)[rows.mask.bool()]
    return Logits(mlm_TV, outputs[3].squeeze(1) if config.binary_head else None)


@torch.no_grad()
def their_logits(
    config: ModelConfig, folder: Path, rows: RandomRows, compute: torch.dtype, *,
    missing: Mapping[str, Tensor] | None = None,
) -> Logits:
    """What `transformers` computes from the files in `folder`.

    `missing`: values of what the files lack; they may then hold parts beyond the model of `config`. None where they
    have to hold all of it and nothing else.

    Raises:
        CheckpointError: a parameter is missing from the files, left over or of another shape.
    """
    transformers = _transformers()
    model_class = transformers.AutoModelForPreTraining if config.binary_head else transformers.AutoModelForMaskedLM
    try:
        model, loading = model_class.from_pretrained(
            folder, dtype=compute, attn_implementation="eager", local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError.of("model", folder.name, f"cannot be loaded by transformers ({reason})",
                                 "look into the folder's files; --no-verify converts it still") from error
    if missing is not None:
        model.load_state_dict(dict(missing), strict=False)
        loading = _without_expected(loading, missing)
    if unset := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise CheckpointError.of("model", folder.name, f"is loaded by transformers without {', '.join(unset)}",
                                 "update transformers; --no-verify converts it still")
    if wrong := {kind: sorted(map(str, names)) for kind, names in loading.items() if names}:
        raise CheckpointError.of("export", folder.name, f"does not fit transformers' {type(model).__name__}: {wrong}",
                                 "report this with config.json; --no-verify writes the files all the same")
    outputs = model.eval()(
        input_ids=rows.input_ids, token_type_ids=rows.token_type_ids, attention_mask=rows.mask)
    real_BS = rows.mask.bool()
    mlm_BSV = outputs.prediction_logits if config.binary_head else outputs.logits
    sop_B2 = outputs.seq_relationship_logits if config.binary_head else None
    return Logits(mlm_BSV[..., : config.vocab_size][real_BS], sop_B2)


def _without_expected(loading: Mapping[str, Iterable[Any]], missing: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """What `transformers` reports of loading beyond the tensors that are `missing`, tied to others, or left out."""
    expected = (*missing, "cls.predictions.decoder.", "bert.pooler.", "pooler.", "cls.seq_relationship.")
    return {kind: [name for name in names if not str(name).startswith(expected)] for kind, names in loading.items()}


def _transformers() -> ModuleType:
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _bytes_needed(config: ModelConfig) -> int:
    """One fp32 model, and the logits of both with room for their copies."""
    logits = _ROWS * config.max_position_embeddings * config.vocab_size
    return 4 * (config.num_parameters * 5 // 4 + 5 * logits)


def _bytes_available() -> int | None:
    """Memory that the system can give without swapping; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines)}
    return int(kilobytes["MemAvailable"]) * 1024 if "MemAvailable" in kilobytes else None
