"""A Hugging Face BERT's folder, opened and checked: every tensor of ours by its name, read or initialised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.config.model import ModelConfig
from bert_ds.convert.converted_checkpoint import Provenance
from bert_ds.convert.hf_model import CONFIG_FILE
from bert_ds.convert.hf_names import POSITIONS, TOKEN_TYPES, WORD_TABLE, drop_tied_copies, known_names
from bert_ds.convert.hf_settings import SENTENCE_TASK_OF, model_config_from_hf
from bert_ds.convert.hf_vocabulary import FoundVocabulary, read_vocabulary
from bert_ds.convert.hf_weights import ModelWeights, read_json
from bert_ds.convert.name_map import CutVocabulary, Rule, name_map
from bert_ds.errors import CheckpointError, Problem, raise_if_any
from bert_ds.model.init import initialize_parameter

HEADS = (("lm_head.", "output_layer."), ("pooler.",), ("binary_head.",))
"""Parts that a model may lack, each wholly: by the prefixes of our names."""
_SENTENCE_PARTS = ("bert.pooler.", "cls.seq_relationship.")


@dataclass(frozen=True, kw_only=True)
class ModelChoices:
    """What the user may choose of the model; everything else comes from its folder."""

    binary_head: bool = True
    """Keep or make the sentence head and its token types. Otherwise training is masked LM alone, and the embedding of
    token type 0 is added to the positions, so that texts without a second segment get the outputs that they had."""
    seed: int = 1234
    """Seed of what the model lacks."""
    make_vocab_size_divisible_by: int = 128
    tokenizer_type: str | None = None
    """Overrules the tokenizer's files."""


@dataclass(frozen=True)
class SourceModel:
    """An opened model folder whose every tensor has a place."""

    folder: Path
    settings: Mapping[str, Any]
    weights: ModelWeights
    names: Mapping[str, str]
    """Known name -> name in the files."""
    vocabulary: FoundVocabulary
    config: ModelConfig
    choices: ModelChoices
    left_out: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path, choices: ModelChoices) -> SourceModel:
        """Opens the model in `folder`.

        Raises:
            CheckpointError: no such model is trained here, or its files are damaged or of different models.
        """
        if not folder.is_dir():
            raise CheckpointError.of("MODEL", folder, "is no folder", "give the folder of a downloaded model")
        settings = read_json(folder / CONFIG_FILE)
        weights = ModelWeights(folder)
        names = known_names(weights.tensors, folder)

        def read(name: str) -> Tensor:
            return weights.read(names[name])

        untied = drop_tied_copies(names, read, settings, folder)
        vocabulary = read_vocabulary(folder, choices.tokenizer_type)
        rows = weights.tensors[names[WORD_TABLE]].shape[0] if WORD_TABLE in names else 0
        entries = _entries(vocabulary, rows)
        config = model_config_from_hf(
            settings, folder / CONFIG_FILE, vocab_size=entries, untied=untied,
            make_vocab_size_divisible_by=choices.make_vocab_size_divisible_by,
            binary_head=choices.binary_head and _has_sentence_part(names, read))
        left_out = [] if config.binary_head else _leave_out_sentence_part(names)
        if rows > entries:
            left_out.append(f"{rows - entries} rows of the word table beyond the vocabulary's {entries} entries")
        source = cls(folder, settings, weights, names, vocabulary, config, choices, tuple(left_out))
        raise_if_any(CheckpointError, source._problems())
        return source

    @cached_property
    def rules(self) -> Mapping[str, Rule]:
        return {rule.ours: rule for rule in name_map(self.config)}

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Our names of what the files do not hold."""
        return tuple(name for name, rule in self.rules.items() if not all(part in self.names for part in rule.theirs))

    def _problems(self) -> Iterator[Problem]:
        """What is missing, left over or of another shape."""
        lacked = {part for parts in HEADS if all(name in self.missing for name in self.rules if name.startswith(parts))
                  for part in parts}
        for name in self.missing:
            if not name.startswith(tuple(lacked)):
                parts = [part for part in self.rules[name].theirs if part not in self.names]
                yield Problem("MODEL", self.folder, f"lacks {', '.join(parts)}", "copy the whole model again")
        known = {part for rule in self.rules.values() for part in rule.theirs}
        for name in sorted(set(self.names) - known - {TOKEN_TYPES}):
            yield Problem("MODEL", self.folder, f"holds {self.names[name]}, which has no place in the model",
                          "use the pretrained model, or save it without this part")
        shapes = parameter_shapes(self.config)
        for name, rule in self.rules.items():
            if name not in self.missing:
                yield from self._shape_problems(rule, rule.their_shapes(shapes[name].shape))

    def _shape_problems(self, rule: Rule, expected: tuple[tuple[int, ...], ...]) -> Iterator[Problem]:
        for part, shape in zip(rule.theirs, expected, strict=True):
            found = self.weights.tensors[self.names[part]].shape
            if isinstance(rule.transform, CutVocabulary):
                shape = (int(self.settings["vocab_size"]), *shape[1:])  # noqa: PLW2901 - as stored, before the cut
            if found != shape:
                yield Problem("MODEL", self.folder, f"holds {self.names[part]} of shape {list(found)}, and its "
                              f"{CONFIG_FILE} makes that {list(shape)}", "copy weights and config.json of one model")

    def weight(self, name: str) -> Tensor:
        """The full tensor of our name, fp32: theirs, or the initial value where they have none."""
        if name in self.missing:
            return self._initial(name)
        rule = self.rules[name]
        theirs = tuple(self.weights.read(self.names[part]) for part in rule.theirs)
        if isinstance(rule.transform, CutVocabulary):
            weight = self._initial(name)
            weight[: self.config.vocab_size] = theirs[0][: self.config.vocab_size]
            return weight
        if rule.theirs == (POSITIONS,) and not self.config.binary_head and TOKEN_TYPES in self.names:
            return theirs[0] + self.weights.read(self.names[TOKEN_TYPES])[0]
        return rule.transform.join(theirs)

    def _initial(self, name: str) -> Tensor:
        weight = torch.empty(parameter_shapes(self.config)[name].shape)
        initialize_parameter(weight, name, self.config, self.choices.seed)
        return weight

    def missing_parts(self) -> dict[str, Tensor]:
        """Their names and values of what the files do not hold."""
        return {part: value for name in self.missing
                for part, value in zip(self.rules[name].theirs, self.rules[name].transform.split(self._initial(name)),
                                       strict=True)}

    @property
    def provenance(self) -> Provenance:
        """Where the weights come from. `bert` stems from the original BERT, `megatron-bert` from Megatron-LM."""
        name, model_type = self.folder.resolve().name, self.settings["model_type"]
        return Provenance(name=name, sentence_task=SENTENCE_TASK_OF[model_type], origin={
            "format": "huggingface", "folder": name, "model_type": model_type,
            "architectures": self.settings.get("architectures"), "name": self.settings.get("_name_or_path"),
            "initialized": list(self.missing)})


def _entries(vocabulary: FoundVocabulary, rows: int) -> int:
    """Size of the vocabulary, which the word table has to hold."""
    entries = vocabulary.content.count(b"\n")
    if rows and entries > rows:
        raise CheckpointError.of("MODEL", vocabulary.source, f"has {entries} entries, and the word table {rows} rows",
                                 "use the vocabulary of the model")
    return entries


def _has_sentence_part(names: Mapping[str, str], read: Callable[[str], Tensor]) -> bool:
    """Whether the model has a pooler, a sentence head, or token types that are not all zero."""
    if any(name.startswith(_SENTENCE_PARTS) for name in names):
        return True
    return TOKEN_TYPES in names and bool(read(TOKEN_TYPES).any())


def _leave_out_sentence_part(names: dict[str, str]) -> list[str]:
    """Removes pooler and sentence head from `names`; says so for each."""
    found = [name for name in names if name.startswith(_SENTENCE_PARTS)]
    for name in found:
        del names[name]
    return [f"{', '.join(found)}: training is masked LM alone"] if found else []
