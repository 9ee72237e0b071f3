"""What the model computes; independent of how it is cut over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bert_ds.errors import Problem

ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
NORM_PLACEMENTS = ("pre", "post")
ACTIVATIONS = ("gelu", "gelu_tanh")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of one BERT. Defaults are those of Megatron-LM's BERT."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Attention heads over all tensor-parallel ranks."""
    ffn_hidden_size: int | None = None
    """Width of the feed-forward layer; None means 4 x hidden_size."""
    seq_length: int = 512
    """Tokens in a row, [CLS] and [SEP] included."""
    max_position_embeddings: int = 512
    """Rows of the position table."""
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
    """One activation for the feed-forward layers and the head: exact (erf) GELU or its tanh approximation."""
    binary_head: bool = True
    """Whether the sentence-order head, its pooler and the token-type table exist."""
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """Who computes attention; `auto` takes the fastest that serves the run and logs its choice."""

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

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
        """All trained numbers, the tied word table once."""
        hidden, ffn = self.hidden_size, self.ffn_size
        layer = (4 * hidden * hidden + 4 * hidden) + (2 * hidden * ffn + ffn + hidden) + 4 * hidden
        tables = (self.padded_vocab_size + self.max_position_embeddings + self.num_token_types) * hidden
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

    def _shape_problems(self) -> Iterator[Problem]:
        if self.hidden_size % self.num_attention_heads:
            nearest = _nearest_divisor(self.hidden_size, self.num_attention_heads)
            yield Problem("model.num_attention_heads", self.num_attention_heads,
                          f"does not divide model.hidden_size={self.hidden_size}", f"use {nearest} heads")
        if self.seq_length > self.max_position_embeddings:
            yield Problem("model.seq_length", self.seq_length,
                          f"is longer than model.max_position_embeddings={self.max_position_embeddings}",
                          f"set max_position_embeddings to {self.seq_length}")
        if self.seq_length < 8:
            yield Problem("model.seq_length", self.seq_length, "leaves no room for two sentences", "use 8 or more")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                yield Problem(f"model.{name}", getattr(self, name), "is not a probability below 1", "use 0 <= p < 1")

    def _choice_problems(self) -> Iterator[Problem]:
        for name, choices in (("attention_backend", ATTENTION_BACKENDS), ("norm_placement", NORM_PLACEMENTS),
                              ("activation", ACTIVATIONS)):
            if getattr(self, name) not in choices:
                yield Problem(f"model.{name}", getattr(self, name), "is not a known choice",
                              f"use one of {', '.join(choices)}")


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))
