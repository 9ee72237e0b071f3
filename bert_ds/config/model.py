"""What the model computes; independent of how it is cut over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bert_ds.errors import Problem

ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
NORM_PLACEMENTS = ("pre", "post")
ACTIVATIONS = ("gelu", "gelu_tanh")
SHORTEST_ROW = 8
"""Tokens of a row with two sentences."""
TRANSFORMER_IMPLS = ("local", "transformer_engine")
FP8_FORMATS = (None, "hybrid", "e4m3")
FP8_RECIPES = ("delayed", "tensorwise")
FP8_AMAX_COMPUTE_ALGOS = ("most_recent", "max")
POSITION_EMBEDDINGS = ("learned_absolute", "rope")
RECOMPUTE_GRANULARITIES = (None, "full", "selective")
RECOMPUTE_METHODS = ("uniform", "block")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of one BERT. Defaults are those of Megatron-LM's BERT."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Attention heads over all tensor-parallel ranks."""
    kv_channels: int | None = None
    """Dimension of one head; None means hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = None
    """Width of the feed-forward layer; None means 4 x hidden_size."""
    seq_length: int = 512
    """Tokens in a row, [CLS] and [SEP] included."""
    max_position_embeddings: int = 512
    """Rows of the position table; with rope, which has none, the longest row that the model is meant for."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """learned_absolute: a table added to the word embeddings. rope: queries and keys are turned by their position."""
    rotary_percent: float = 1.0
    """Share of each head's dimensions that rope turns."""
    rotary_base: float = 10000.0
    """Base of rope's angles: pair i of r turns by base^(-i/r) a position."""
    vocab_size: int = 30522
    """Entries of the vocabulary; a run takes it from its vocabulary file."""
    make_vocab_size_divisible_by: int = 128
    """The word table is padded to a multiple of this, whatever the layout."""
    hidden_dropout: float = 0.1
    """Dropout after the embeddings, the attention block and the feed-forward block."""
    attention_dropout: float = 0.1
    """Dropout of the attention probabilities."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance in every LayerNorm."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; those that close a residual branch get it / sqrt(2 x num_layers)."""
    norm_placement: Literal["pre", "post"] = "pre"
    """pre: Megatron's order, exports to MegatronBert. post: the original BERT, exports to plain `bert`."""
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    """Exact (erf) GELU or its tanh approximation."""
    head_activation: Literal["gelu", "gelu_tanh"] | None = None
    """Activation of the masked-LM head; None means `activation`. Megatron-LM's default mixes the two: tanh in the
    feed-forward layers, exact in the head. Hugging Face cannot."""
    binary_head: bool = True
    """Whether the sentence-order head, its pooler and the token-type table exist."""
    untie_embeddings_and_output_weights: bool = False
    """Whether the projection to the vocabulary has a weight of its own instead of sharing the word table."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Who computes the matrix products and attention of the layers: PyTorch, or Transformer Engine, which has FP8."""
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """Who computes attention; `auto` takes the fastest that serves the run and logs its choice."""
    fp8_format: Literal["hybrid", "e4m3"] | None = None
    """Format in which the layers multiply matrices: e4m3, or hybrid, which has e5m2 for gradients. None: 16 bits."""
    fp8_recipe: Literal["delayed", "tensorwise"] = "delayed"
    """Where FP8 scaling factors come from: the largest values of earlier passes, or the tensor itself."""
    fp8_margin: int = 0
    """Delayed scaling: powers of two that a factor stays below the largest one that fits."""
    fp8_amax_history_len: int = 1
    """Delayed scaling: passes whose largest values are remembered."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """Delayed scaling: which of the remembered values counts."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """What the backward pass computes again instead of keeping it. full: whole layers, by recompute_method. selective:
    attention between its two projections. None: whole layers where the DeepSpeed JSON sets
    activation_checkpoint_interval, else nothing."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Which whole layers: with k = activation_checkpoint_interval, uniform takes all, in groups of k, and block the
    first k of each pipeline stage, one by one."""

    compile: bool | None = None
    """Fuse each transformer layer's elementwise work with torch.compile, so that the first step takes longer and the
    others less. None: on a GPU, unless Transformer Engine computes the layers, or the run is to repeat its bits."""

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def lm_head_activation(self) -> Literal["gelu", "gelu_tanh"]:
        return self.head_activation or self.activation

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def projection_size(self) -> int:
        """Width of the queries, of the keys and of the values over all heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rope turns; 0 without rope."""
        return int(self.head_dim * self.rotary_percent) if self.position_embedding_type == "rope" else 0

    @property
    def num_positions(self) -> int:
        """Rows of the position table; 0 with rope."""
        return 0 if self.position_embedding_type == "rope" else self.max_position_embeddings

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word table: vocab_size rounded up; neither losses nor checkpoints depend on the layout."""
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple

    @property
    def num_token_types(self) -> int:
        return 2 if self.binary_head else 0

    @property
    def num_parameters(self) -> int:
        """All trained numbers, a tied word table once."""
        hidden, ffn, projected = self.hidden_size, self.ffn_size, self.projection_size
        attention = 3 * projected * (hidden + 1) + (projected + 1) * hidden
        layer = attention + (2 * hidden * ffn + ffn + hidden) + 4 * hidden
        word_tables = 2 if self.untie_embeddings_and_output_weights else 1
        tables = (word_tables * self.padded_vocab_size + self.num_positions + self.num_token_types) * hidden
        lm_head = hidden * hidden + hidden + 2 * hidden + self.padded_vocab_size
        binary_head = (hidden * hidden + hidden) + (2 * hidden + 2) if self.binary_head else 0
        return self.num_layers * layer + tables + 2 * hidden + lm_head + binary_head

    def problems(self) -> Iterator[Problem]:
        """Everything that is wrong with the model on its own."""
        for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size"):
            if getattr(self, name) < 1:
                yield Problem(f"model.{name}", getattr(self, name), "must be at least 1", "give a positive number")
                return
        yield from self._shape_problems()
        yield from self._choice_problems()
        if self.compile and self.transformer_impl == "transformer_engine":
            yield Problem("model.compile", True, "cannot see into Transformer Engine's layers, which are fused already",
                          "switch it off (--no-compile), or set model.transformer_impl to local")
        if self.fp8_amax_history_len < 1:
            yield Problem("model.fp8_amax_history_len", self.fp8_amax_history_len, "must be at least 1",
                          "give a positive number")
        if self.position_embedding_type == "rope":
            yield from self._rotary_problems()

    def export_problems(self) -> Iterator[Problem]:
        """What the BERT classes of transformers cannot express: told before training, refused at export."""
        if self.position_embedding_type == "rope":
            yield Problem("model.position_embedding_type", "rope", "is not known to the BERT classes of transformers",
                          "train with learned_absolute where an export is wanted")
        if self.projection_size != self.hidden_size:
            yield Problem("model.kv_channels", self.kv_channels,
                          f"makes heads that are {self.projection_size} wide together; in the BERT classes of "
                          f"transformers that is hidden_size={self.hidden_size}",
                          "leave kv_channels out where an export is wanted")
        if self.lm_head_activation != self.activation:
            yield Problem("model.head_activation", self.head_activation,
                          f"differs from model.activation={self.activation}; the BERT classes of transformers have one",
                          "leave head_activation out where an export is wanted")

    def _shape_problems(self) -> Iterator[Problem]:
        for name in ("kv_channels", "ffn_hidden_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield Problem(f"model.{name}", value, "must be at least 1", "give a positive number, or leave it out")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            nearest = _nearest_divisor(self.hidden_size, self.num_attention_heads)
            yield Problem("model.num_attention_heads", self.num_attention_heads,
                          f"does not divide model.hidden_size={self.hidden_size}",
                          f"use {nearest} heads, or set kv_channels, the dimension of a head")
        if self.seq_length > self.max_position_embeddings:
            yield Problem("model.seq_length", self.seq_length,
                          f"is longer than model.max_position_embeddings={self.max_position_embeddings}",
                          f"set max_position_embeddings to {self.seq_length}")
        if self.seq_length < SHORTEST_ROW:
            yield Problem("model.seq_length", self.seq_length, "leaves no room for two sentences",
                          f"use {SHORTEST_ROW} or more")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                yield Problem(f"model.{name}", getattr(self, name), "is not a probability below 1", "use 0 <= p < 1")

    def _rotary_problems(self) -> Iterator[Problem]:
        if not 0 < self.rotary_percent <= 1:
            yield Problem("model.rotary_percent", self.rotary_percent, "is no share of a head", "use 0 < share <= 1")
        elif self.rotary_dim < 2 or self.rotary_dim % 2:
            yield Problem("model.rotary_percent", self.rotary_percent,
                          f"turns {self.rotary_dim} of a head's {self.head_dim} dimensions, which are no pairs",
                          "choose it, or kv_channels, so that an even number of dimensions is turned")
        if self.rotary_base <= 1:
            yield Problem("model.rotary_base", self.rotary_base, "must be above 1", "use 10000")

    def _choice_problems(self) -> Iterator[Problem]:
        for name, choices in (("attention_backend", ATTENTION_BACKENDS), ("norm_placement", NORM_PLACEMENTS),
                              ("activation", ACTIVATIONS), ("head_activation", (None, *ACTIVATIONS)),
                              ("position_embedding_type", POSITION_EMBEDDINGS),
                              ("recompute_granularity", RECOMPUTE_GRANULARITIES),
                              ("recompute_method", RECOMPUTE_METHODS), ("transformer_impl", TRANSFORMER_IMPLS),
                              ("fp8_format", FP8_FORMATS), ("fp8_recipe", FP8_RECIPES),
                              ("fp8_amax_compute_algo", FP8_AMAX_COMPUTE_ALGOS)):
            if getattr(self, name) not in choices:
                yield Problem(f"model.{name}", getattr(self, name), "is not a known choice",
                              f"use one of {', '.join(map(str, choices))}")


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))
