"""config.json and the weights, written for `transformers` but without it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import WEIGHT
from bert_ds.checkpoint.reader import Checkpoint
from bert_ds.checkpoint.tensor_file import TensorSpec, write_tensor_file
from bert_ds.config.model import ModelConfig
from bert_ds.convert.name_map import name_map, untied_rules, zero_tables

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIG_FILE = "config.json"

_MODEL_TYPES = {"pre": ("megatron-bert", "MegatronBert"), "post": ("bert", "Bert")}
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def architecture(config: ModelConfig) -> str:
    """The class that has exactly the heads of this model."""
    return _MODEL_TYPES[config.norm_placement][1] + ("ForPreTraining" if config.binary_head else "ForMaskedLM")


def hf_config(config: ModelConfig, *, pad_token_id: int, dtype: str, untie: bool) -> dict[str, Any]:
    """The content of config.json. Nothing is left to a default of `transformers`: its epsilon, for one, is another."""
    return {
        "architectures": [architecture(config)],
        "model_type": _MODEL_TYPES[config.norm_placement][0],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_size,
        "hidden_act": _ACTIVATIONS[config.activation],
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.max_position_embeddings,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "initializer_range": config.init_method_std,
        "layer_norm_eps": config.layernorm_epsilon,
        "pad_token_id": pad_token_id,
        "tie_word_embeddings": not untie,
        "is_decoder": False,
        "use_cache": False,
        "dtype": dtype,
    }


def write_config(folder: Path, content: dict[str, Any]) -> None:
    """Writes config.json."""
    files.write_durably(folder / CONFIG_FILE, [json.dumps(content, indent=2).encode() + b"\n"])


def write_weights(
    folder: Path, checkpoint: Checkpoint, config: ModelConfig, *, dtype: torch.dtype, untie: bool, max_shard_bytes: int
) -> list[str]:
    """Streams the fp32 masters into model.safetensors, or into shards and their index; returns the names of the files.

    At most one parameter of the checkpoint, its parts and one part in `dtype` are in memory at a time.
    """
    rules = name_map(config) + (untied_rules(config) if untie else ())
    zeros = zero_tables(config)

    def tensors() -> Iterator[Tensor]:
        for rule in rules:
            for part in rule.transform.split(checkpoint.read_full(WEIGHT, rule.ours)):
                yield part.to(dtype)
        for shape in zeros.values():
            yield torch.zeros(shape, dtype=dtype)

    parameters = checkpoint.manifest.parameters
    shapes = [
        pair for rule in rules for pair in zip(rule.theirs, rule.their_shapes(parameters[rule.ours].shape), strict=True)
    ]
    specs = [TensorSpec(name, shape, dtype) for name, shape in (*shapes, *zeros.items())]
    return _write_shards(folder, specs, tensors(), max_shard_bytes)


def _write_shards(folder: Path, specs: Sequence[TensorSpec], tensors: Iterator[Tensor], max_bytes: int) -> list[str]:
    shards = _shards(specs, max_bytes)
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        write_tensor_file(folder / name, shard, islice(tensors, len(shard)), {"format": "pt"})
    if count > 1:
        index = {
            "metadata": {"total_size": sum(spec.bytes for spec in specs)},
            "weight_map": {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard},
        }
        files.write_durably(folder / "model.safetensors.index.json", [json.dumps(index, indent=2).encode() + b"\n"])
    return names


def _shards(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive groups of at most `max_bytes`; a tensor larger than that has a group of its own."""
    shards: list[list[TensorSpec]] = []
    filled = max_bytes
    for spec in specs:
        if not shards or filled + spec.bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.bytes
    return shards
