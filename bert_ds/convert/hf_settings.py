"""config.json of a Hugging Face BERT becomes a ModelConfig, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bert_ds.config.model import ModelConfig
from bert_ds.errors import CheckpointError, Problem, raise_if_any

NORM_PLACEMENT_OF = {"megatron-bert": "pre", "bert": "post"}
SENTENCE_TASK_OF = {"megatron-bert": "order", "bert": "random_next"}
ACTIVATION_OF = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1,
             "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02}
"""What `transformers` takes for both model types where config.json is silent."""
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
          "max_position_embeddings")
_MUST_BE = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False,
            "is_encoder_decoder": False}


def model_config_from_hf(
    content: Mapping[str, Any], path: Path, *, vocab_size: int, make_vocab_size_divisible_by: int, binary_head: bool,
    untied: bool,
) -> ModelConfig:
    """The model that config.json describes.

    Args:
        content: the object in config.json.
        path: its file, for messages.
        vocab_size: entries of the vocabulary.
        make_vocab_size_divisible_by: the word table is padded to a multiple of this.
        binary_head: whether the model has the sentence head and token types.
        untied: whether the output projection is a tensor of its own.

    Raises:
        CheckpointError: everything in it that no model here computes.
    """
    raise_if_any(CheckpointError, _problems(content, path, binary_head=binary_head))
    content = {**_DEFAULTS, **content}
    hidden_size = int(content["hidden_size"])
    config = ModelConfig(
        num_layers=int(content["num_hidden_layers"]), hidden_size=hidden_size,
        num_attention_heads=int(content["num_attention_heads"]),
        ffn_hidden_size=int(content["intermediate_size"]),
        seq_length=int(content["max_position_embeddings"]),
        max_position_embeddings=int(content["max_position_embeddings"]),
        vocab_size=vocab_size, make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        hidden_dropout=float(content["hidden_dropout_prob"]),
        attention_dropout=float(content["attention_probs_dropout_prob"]),
        layernorm_epsilon=float(content["layer_norm_eps"]), init_method_std=float(content["initializer_range"]),
        norm_placement=NORM_PLACEMENT_OF[content["model_type"]],  # type: ignore[arg-type]
        activation=ACTIVATION_OF[content["hidden_act"]],  # type: ignore[arg-type]
        binary_head=binary_head, untie_embeddings_and_output_weights=untied,
    )
    raise_if_any(CheckpointError, (Problem(f"{path}: {problem.setting}", problem.value, problem.reason,
                                           "use another model") for problem in config.problems()))
    return config


def _problems(content: Mapping[str, Any], path: Path, *, binary_head: bool) -> Iterator[Problem]:
    model_type = content.get("model_type")
    if model_type not in NORM_PLACEMENT_OF:
        yield Problem(f"{path}: model_type", model_type, "is no model that is trained here",
                      f"use a model of type {' or '.join(NORM_PLACEMENT_OF)}")
        return
    for name in _SIZES:
        size = content.get(name)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            yield Problem(f"{path}: {name}", size, "is no size", "copy the model's own config.json")
    activation = content.get("hidden_act", _DEFAULTS["hidden_act"])
    if activation not in ACTIVATION_OF:
        yield Problem(f"{path}: hidden_act", activation, "is an activation that is not computed here",
                      f"use a model with one of {', '.join(ACTIVATION_OF)}")
    for name, wanted in _MUST_BE.items():
        if content.get(name, wanted) not in (wanted, None):
            yield Problem(f"{path}: {name}", content[name], f"is not served, {wanted} is", "use another model")
    if binary_head and content.get("type_vocab_size", 2) != 2:
        yield Problem(f"{path}: type_vocab_size", content["type_vocab_size"], "is not the 2 of a sentence pair",
                      "give --bert-no-binary-head, which keeps token type 0 alone")
    if content.get("pruned_heads"):
        yield Problem(f"{path}: pruned_heads", content["pruned_heads"], "leave layers of different shapes",
                      "use another model")
