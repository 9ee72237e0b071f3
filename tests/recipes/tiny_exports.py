"""Folders like those that an export makes: two layers of random weights, and a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bert_ds.convert.hf_tokenizer import write_tokenizer
from bert_ds.data.vocabulary import SPECIAL_TOKENS

transformers = pytest.importorskip("transformers")

ARCHITECTURES = {"megatron-bert": (transformers.MegatronBertConfig, transformers.MegatronBertForPreTraining),
                 "bert": (transformers.BertConfig, transformers.BertForPreTraining)}


def write_export(folder: Path, words: Sequence[str], *, model_type: str = "megatron-bert", positions: int = 64,
                 hidden: int = 32) -> Path:
    """Writes an export that knows `words`; returns its folder."""
    folder.mkdir(parents=True)
    tokens = [*SPECIAL_TOKENS, *words]
    vocabulary = folder.with_name(folder.name + "-vocab.txt")
    vocabulary.write_text("".join(f"{token}\n" for token in tokens))
    write_tokenizer(folder, vocabulary, lower_case=True, max_length=positions)
    config_class, model_class = ARCHITECTURES[model_type]
    torch.manual_seed(1)
    model_class(config_class(
        vocab_size=len(tokens), hidden_size=hidden, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=2 * hidden, max_position_embeddings=positions, initializer_range=0.1,
    )).save_pretrained(folder)
    return folder
