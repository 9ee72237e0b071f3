"""The names in a Hugging Face BERT's files, brought to the ones that the name map knows.

Files differ: encoder-only models lack the prefix `bert.`, old ones call the parameters of a LayerNorm gamma and beta,
and some hold buffers, or tied tensors a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bert_ds.errors import CheckpointError

WORD_TABLE = "bert.embeddings.word_embeddings.weight"
TOKEN_TYPES = "bert.embeddings.token_type_embeddings.weight"
POSITIONS = "bert.embeddings.position_embeddings.weight"
DECODER, DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
LOGIT_BIAS = "cls.predictions.bias"
_PARTS_OF_BERT = ("embeddings.", "encoder.", "pooler.")
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_SYNONYMS = {".gamma": ".weight", ".beta": ".bias"}


def known_names(stored: Collection[str], folder: Path) -> dict[str, str]:
    """Known name -> name in the files, buffers left out.

    Raises:
        CheckpointError: two tensors have the same known name.
    """
    known: dict[str, str] = {}
    for name in stored:
        if name.endswith(_BUFFERS):
            continue
        simple = _known(name)
        if simple in known:
            raise CheckpointError.of("MODEL", folder, f"holds {simple} twice, as {known[simple]} and {name}",
                                     "remove the files of another export from the folder")
        known[simple] = name
    return known


def _known(name: str) -> str:
    for ending, usual in _SYNONYMS.items():
        if name.endswith(ending):
            name = name.removesuffix(ending) + usual
    return f"bert.{name}" if name.startswith(_PARTS_OF_BERT) else name


def drop_tied_copies(
    known: dict[str, str], read: Callable[[str], Tensor], settings: Mapping[str, object], folder: Path
) -> bool:
    """Removes the output projection from `known` where it repeats the word table; returns whether it is untied.

    Args:
        known: known name -> name in the files, changed in place.
        read: the tensor of a known name.
        settings: config.json.
        folder: of the model, for messages.

    Raises:
        CheckpointError: tensors that have to be equal differ.
    """
    if DECODER_BIAS in known:
        if LOGIT_BIAS not in known:
            known[LOGIT_BIAS] = known[DECODER_BIAS]
        elif not torch.equal(read(LOGIT_BIAS), read(DECODER_BIAS)):
            raise CheckpointError.of("MODEL", folder, f"holds {LOGIT_BIAS} and {DECODER_BIAS}, one parameter, with "
                                     "different values", "remove the wrong one of them")
        del known[DECODER_BIAS]
    if DECODER not in known or WORD_TABLE not in known:
        return False
    if torch.equal(read(DECODER), read(WORD_TABLE)):
        del known[DECODER]
        return False
    if settings.get("tie_word_embeddings", True):
        raise CheckpointError.of("MODEL", folder, f"holds a {DECODER} that differs from the word table, and its "
                                 "config.json says that they are tied",
                                 "set tie_word_embeddings to false in a copy of it, or remove the tensor")
    return True
