"""Our parameters and those of Hugging Face: one table, read both ways.

D head dim. pre-LN models are `megatron-bert` there, post-LN models are `bert`. Both have the same parameters and differ
in the names of the LayerNorms only: our post-LN model counts every LayerNorm one place later (see
model/transformer_layer.py), so its first one is that of the embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bert_ds.config.model import ModelConfig

WORD_TABLE = "embedding.word_embeddings.weight"
LOGIT_BIAS = "output_layer.bias"
OUTPUT_PROJECTION = "cls.predictions.decoder.weight"


class Transform(Protocol):
    """How one of our tensors becomes one or more of theirs, and back."""

    def split(self, ours: Tensor) -> tuple[Tensor, ...]: ...

    def join(self, theirs: tuple[Tensor, ...]) -> Tensor: ...


@dataclass(frozen=True)
class Same:
    """The tensor as it stands."""

    def split(self, ours: Tensor) -> tuple[Tensor, ...]:
        return (ours,)

    def join(self, theirs: tuple[Tensor, ...]) -> Tensor:
        return theirs[0]


@dataclass(frozen=True)
class SplitQKV:
    """Rows ordered (head, [q, k, v], D) become three tensors with rows ordered (head, D)."""

    num_heads: int

    def split(self, ours: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.flatten(0, 1) for part in ours.unflatten(0, (self.num_heads, 3, -1)).unbind(1))

    def join(self, theirs: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([part.unflatten(0, (self.num_heads, -1)) for part in theirs], dim=1).flatten(0, 2)


@dataclass(frozen=True)
class CutVocabulary:
    """The rows of the true vocabulary; the rows that pad our table are dropped, and zero on the way back."""

    vocab_size: int
    padded_vocab_size: int

    def split(self, ours: Tensor) -> tuple[Tensor, ...]:
        return (ours[: self.vocab_size],)

    def join(self, theirs: tuple[Tensor, ...]) -> Tensor:
        padding = theirs[0].new_zeros(self.padded_vocab_size - self.vocab_size, *theirs[0].shape[1:])
        return torch.cat([theirs[0], padding])


@dataclass(frozen=True)
class Rule:
    """One parameter of ours and what it is made of at Hugging Face."""

    ours: str
    theirs: tuple[str, ...]
    transform: Transform = Same()

    def their_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes of `theirs` for our full shape."""
        return tuple(tuple(part.shape) for part in self.transform.split(torch.empty(shape, device="meta")))


def name_map(config: ModelConfig) -> tuple[Rule, ...]:
    """The rules of this model; they name every parameter of ours once, in the order of the forward pass."""
    return tuple(_rules(config))


def untied_rules(config: ModelConfig) -> tuple[Rule, ...]:
    """What files hold a second time when the output projection is not tied; a tied one is usually left out of them."""
    cut = CutVocabulary(config.vocab_size, config.padded_vocab_size)
    bias = Rule(LOGIT_BIAS, ("cls.predictions.decoder.bias",), cut)
    if config.untie_embeddings_and_output_weights:
        return (bias,)
    return (Rule(WORD_TABLE, (OUTPUT_PROJECTION,), cut), bias)


def zero_tables(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that Hugging Face insists on and a model without the binary head lacks; zeros change nothing."""
    return {} if config.binary_head else {"bert.embeddings.token_type_embeddings.weight": (2, config.hidden_size)}


def _rules(config: ModelConfig) -> Iterator[Rule]:
    cut = CutVocabulary(config.vocab_size, config.padded_vocab_size)
    yield Rule(WORD_TABLE, ("bert.embeddings.word_embeddings.weight",), cut)
    yield Rule("embedding.position_embeddings.weight", ("bert.embeddings.position_embeddings.weight",))
    if config.binary_head:
        yield Rule("embedding.tokentype_embeddings.weight", ("bert.embeddings.token_type_embeddings.weight",))
    norms = _layer_norms(config)
    for index in range(config.num_layers):
        yield from _layer_rules(f"encoder.layers.{index}", f"bert.encoder.layer.{index}", norms, config)
    yield from _module("encoder.final_layernorm", norms["encoder.final_layernorm"])
    yield from _module("lm_head.dense", "cls.predictions.transform.dense")
    yield from _module("lm_head.layer_norm", "cls.predictions.transform.LayerNorm")
    if config.untie_embeddings_and_output_weights:
        yield Rule("output_layer.weight", (OUTPUT_PROJECTION,), cut)
    yield Rule(LOGIT_BIAS, ("cls.predictions.bias",), cut)
    if config.binary_head:
        yield from _module("pooler.dense", "bert.pooler.dense")
        yield from _module("binary_head", "cls.seq_relationship")


def _layer_rules(ours: str, theirs: str, norms: dict[str, str], config: ModelConfig) -> Iterator[Rule]:
    attention = f"{theirs}.attention"
    yield from _module(f"{ours}.input_layernorm", norms[f"{ours}.input_layernorm"])
    for suffix in ("weight", "bias"):
        yield Rule(f"{ours}.self_attention.linear_qkv.{suffix}",
                   tuple(f"{attention}.self.{part}.{suffix}" for part in ("query", "key", "value")),
                   SplitQKV(config.num_attention_heads))
    yield from _module(f"{ours}.self_attention.linear_proj", f"{attention}.output.dense")
    yield from _module(f"{ours}.pre_mlp_layernorm", norms[f"{ours}.pre_mlp_layernorm"])
    yield from _module(f"{ours}.mlp.linear_fc1", f"{theirs}.intermediate.dense")
    yield from _module(f"{ours}.mlp.linear_fc2", f"{theirs}.output.dense")


def _layer_norms(config: ModelConfig) -> dict[str, str]:
    """Our LayerNorm -> theirs."""
    layers = range(config.num_layers)
    if config.norm_placement == "pre":
        first = [f"bert.encoder.layer.{index}.attention.ln" for index in layers] + ["bert.encoder.ln"]
        second = [f"bert.encoder.layer.{index}.ln" for index in layers]
    else:
        first = ["bert.embeddings.LayerNorm"] + [f"bert.encoder.layer.{index}.output.LayerNorm" for index in layers]
        second = [f"bert.encoder.layer.{index}.attention.output.LayerNorm" for index in layers]
    ours_first = [f"encoder.layers.{index}.input_layernorm" for index in layers] + ["encoder.final_layernorm"]
    ours_second = [f"encoder.layers.{index}.pre_mlp_layernorm" for index in layers]
    return dict(zip(ours_first + ours_second, first + second, strict=True))


def _module(ours: str, theirs: str) -> Iterator[Rule]:
    for suffix in ("weight", "bias"):
        yield Rule(f"{ours}.{suffix}", (f"{theirs}.{suffix}",))
