"""The configuration in a checkpoint, and whether another run may go on from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from bert_ds.checkpoint.format import Manifest, VocabularyRecord
from bert_ds.config.model import ModelConfig
from bert_ds.config.run import RunConfig
from bert_ds.errors import CheckpointError, Problem

DEFINING = (
    "num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "position_embedding_type",
    "max_position_embeddings", "rotary_percent", "rotary_base", "vocab_size", "make_vocab_size_divisible_by",
    "binary_head", "untie_embeddings_and_output_weights", "norm_placement", "activation", "head_activation",
    "layernorm_epsilon",
)
"""Settings of ModelConfig that weights depend on; dropout, initialisation and backends are free."""
_USED_BY_ROPE = ("rotary_percent", "rotary_base")
_UNUSED_WITH_ROPE = ("max_position_embeddings",)


def run_config_as_dict(config: RunConfig) -> dict[str, Any]:
    """The nested dict that stands in checkpoint.json, of JSON's own types."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return plain


def model_config_from(manifest: Manifest) -> ModelConfig:
    """The model that the checkpoint holds.

    Raises:
        CheckpointError: the model has settings that this version does not know.
    """
    return _model_config(manifest.config["model"])


def model_problems(
    saved: Mapping[str, Any], wanted: ModelConfig, *, heads_may_differ: bool = False
) -> Iterator[Problem]:
    """Every difference that keeps weights of the model `saved` (`manifest.config["model"]`) from serving `wanted`.

    heads_may_differ: whether `wanted` may have the binary head that `saved` lacks, or lack the one that it has.
    """
    former = _model_config(saved)
    former, wanted = (replace(model, ffn_hidden_size=model.ffn_size, kv_channels=model.head_dim,
                              head_activation=model.lm_head_activation) for model in (former, wanted))
    unused = _UNUSED_WITH_ROPE if wanted.position_embedding_type == "rope" else _USED_BY_ROPE
    for name in (name for name in DEFINING if name not in unused):
        was, is_wanted = getattr(former, name), getattr(wanted, name)
        if was != is_wanted and not (heads_may_differ and name == "binary_head"):
            repair = f"set it to {was}"
            if name == "binary_head":
                repair += ", start from its weights at iteration 0 with --finetune"
            elif name == "vocab_size":
                repair = "use the vocabulary of the checkpoint's run, with --vocab-extra-bos-eos if it had that"
            yield Problem(f"model.{name}", is_wanted, f"the checkpoint's model has {was}",
                          f"{repair}, or load another checkpoint")


def vocabulary_problems(
    saved: VocabularyRecord, *, vocab_file: str, sha256: str, tokenizer_type: str
) -> Iterator[Problem]:
    """Every difference between the vocabulary of a checkpoint and that of a run."""
    if sha256 != saved.sha256:
        yield Problem("data.vocab_file", vocab_file,
                      f"has SHA-256 {sha256[:12]}..., the checkpoint's vocabulary {saved.sha256[:12]}...",
                      "use the vocab.txt in the checkpoint's folder, or load another checkpoint")
    if tokenizer_type != saved.tokenizer_type:
        yield Problem("data.tokenizer_type", tokenizer_type, f"the checkpoint was trained with {saved.tokenizer_type}",
                      f"set it to {saved.tokenizer_type}, or load another checkpoint")


def _model_config(section: Mapping[str, Any]) -> ModelConfig:
    known = {field.name for field in fields(ModelConfig)}
    if unknown := sorted(set(section) - known):
        raise CheckpointError.of("model", ", ".join(unknown), "are settings that this version does not know",
                                 "use the bert_ds that wrote the checkpoint, or a later one")
    return ModelConfig(**section)
