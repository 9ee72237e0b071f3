"""THE list of layers, and the model that is this list in a loop.

Every layout runs the same list: the pipeline cuts it into stages (model/pipeline.py), one process runs it whole
(`BertModel`). So a layer's index, its parameters' names and a checkpoint's content never depend on the layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bert_ds.config.model import ModelConfig
from bert_ds.model.dropout import BatchKey, layer_keys
from bert_ds.model.embeddings import EmbeddingTail, ModelInputs, WordEmbeddings
from bert_ds.model.heads import HeadOutputs, LogitBias, OutputLayer, PretrainingHeads, pass_word_weight
from bert_ds.model.init import initialize_parameter
from bert_ds.model.transformer_layer import TransformerLayer
from bert_ds.ops.attention import choose_attention
from bert_ds.ops.backends import Attention, AttentionQuery
from bert_ds.ops.rows import RowKind
from bert_ds.parallel.context import ParallelContext

log = logging.getLogger(__name__)
WORD_EMBEDDINGS = "word_embeddings"
"""Key of the tied word table."""


@dataclass(frozen=True)
class ComputeSettings:
    """How the layers compute, beside what they compute; fixed for a run."""

    dtype: torch.dtype = torch.float32
    rows: RowKind = "padded"
    """What the rows of a batch hold, see ops/rows.py."""
    sequences_per_row: int = 1
    """The most sequences that share a row; 1 unless rows are packed."""
    deterministic: bool = False
    """Whether repeated runs have to give the same bits."""


@dataclass(frozen=True)
class LayerDef:
    """One entry of the list: how to build the layer and what its parameters are called."""

    module: type[nn.Module]
    arguments: tuple[Any, ...]
    names: tuple[tuple[str, str], ...]
    """(prefix within the layer, prefix of the logical name), the first that fits."""
    tied_key: str | None = None
    """Layers with the same key share one module."""
    second_use: Callable[..., Any] | None = None
    """What a later use of a tied module computes: (module, inputs, key) -> outputs."""

    def build(self) -> nn.Module:
        return self.module(*self.arguments)

    def logical_name(self, parameter: str) -> str:
        """The layout-free name of this layer's parameter; the same names as in Megatron core's BertModel."""
        for local, logical in self.names:
            if parameter.startswith(local):
                return logical + parameter.removeprefix(local)
        raise AssertionError(f"no logical name for {parameter} of {self.module.__name__}")


def bert_layers(
    config: ModelConfig, ctx: ParallelContext, compute: ComputeSettings
) -> tuple[LayerDef, ...]:
    """The layers of BERT in order: word table, embedding tail, transformer layers, heads, word table again, bias.

    Where the output weight is not tied to the word table, an output layer stands in place of the last two.

    Args:
        config: the model.
        ctx: this rank's place in the grid; decides which piece of each cut matrix is built.
        compute: precision, kind of rows, determinism.

    Raises:
        ConfigError: the attention backend cannot serve this run.
    """
    attention = choose_attention(config.attention_backend, _attention_query(config, ctx, compute),
                                 config.transformer_impl)
    config = _compiled_where_it_repeats(config, attention)
    untied = config.untie_embeddings_and_output_weights
    words = LayerDef(WordEmbeddings, (config, ctx), (("", "embedding.word_embeddings."),),
                     None if untied else WORD_EMBEDDINGS)
    tail = LayerDef(EmbeddingTail, (config, ctx, compute.rows), (("", "embedding."),))
    layers = (LayerDef(TransformerLayer, (config, ctx, attention, compute.rows), (("", f"encoder.layers.{index}."),))
              for index in range(config.num_layers))
    heads = LayerDef(PretrainingHeads, (config, ctx, compute.sequences_per_row),
                     (("final_layernorm.", "encoder.final_layernorm."), ("", "")))
    if untied:
        return (words, tail, *layers, heads, LayerDef(OutputLayer, (config, ctx), (("", "output_layer."),)))
    second_words = LayerDef(WordEmbeddings, (config, ctx), words.names, WORD_EMBEDDINGS, pass_word_weight)
    bias = LayerDef(LogitBias, (config, ctx), (("", "output_layer."),))
    return (words, tail, *layers, heads, second_words, bias)


def _compiled_where_it_repeats(config: ModelConfig, attention: Attention) -> ModelConfig:
    """The model without compilation where recomputation would meet another dropout.

    What a compiled graph recomputes draws from a generator of its own (torch._functorch), which nobody can seed.
    """
    draws = attention.draws and config.attention_dropout > 0
    if not (config.compile and config.recompute_granularity == "selective" and draws):
        return config
    log.warning("compile: not with selective recomputation of attention by %s, whose dropout would not repeat; layers "
                "run uncompiled", attention.name)
    return replace(config, compile=False)


def _attention_query(config: ModelConfig, ctx: ParallelContext, compute: ComputeSettings) -> AttentionQuery:
    return AttentionQuery(
        rows=compute.rows, dtype=compute.dtype, device_type=ctx.device.type,
        heads=config.num_attention_heads // ctx.tp_size, head_dim=config.head_dim, dropout=config.attention_dropout,
        sequences_per_row=compute.sequences_per_row, deterministic=compute.deterministic,
        capability=torch.cuda.get_device_capability(ctx.device) if ctx.device.type == "cuda" else None,
        fp8=config.fp8_format is not None)


class BertModel(nn.Module):
    """The whole list on one stage: for export, verification, tests and fine-tuning.

    forward: model inputs -> (features_BPH, word_weight_VH, bias_V, sentence_logits_BM2), see model/heads.py.
    """

    def __init__(
        self, config: ModelConfig, ctx: ParallelContext, compute: ComputeSettings = ComputeSettings(),
    ) -> None:
        super().__init__()
        self.config = config
        self._layer_defs = bert_layers(config, ctx, compute)
        self._word_index = 0
        self._token_group = ctx.tp_group if ctx.sequence_parallel else None
        self.layers = nn.ModuleList(nn.Identity() if layer.second_use else layer.build() for layer in self._layer_defs)
        self.to(ctx.device, compute.dtype)

    def forward(self, inputs: ModelInputs, key: BatchKey | None = None) -> HeadOutputs:
        """Runs all layers; `key` switches dropout on."""
        values: Any = inputs
        keys = layer_keys(key, range(len(self.layers)), inputs[2], self._token_group) if key else None
        for index, (layer_def, layer) in enumerate(zip(self._layer_defs, self.layers, strict=True)):
            layer_key = keys[index] if keys else None
            if layer_def.second_use:
                values = layer_def.second_use(self.layers[self._word_index], values, layer_key)
            else:
                values = layer(values, layer_key)
        return values

    def named_logical_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters under their layout-free names, a tied table once."""
        for layer_def, layer in zip(self._layer_defs, self.layers, strict=True):
            for name, parameter in layer.named_parameters():
                yield layer_def.logical_name(name), parameter

    def initialize(self, seed: int) -> None:
        """Fills every parameter with the initial value that every layout starts from."""
        for name, parameter in self.named_logical_parameters():
            initialize_parameter(parameter, name, self.config, seed)

    @torch.no_grad()
    def load_logical(self, tensors: Callable[[str], Tensor]) -> None:
        """Fills every parameter from `tensors`, which returns the value under a logical name."""
        for name, parameter in self.named_logical_parameters():
            parameter.copy_(tensors(name))


def vocabulary_logits(outputs: HeadOutputs, vocab_size: int) -> Tensor:
    """The logits of the real vocabulary at the kept positions, [B, P, vocab_size]; for one tensor-parallel rank."""
    features_BPH, word_weight_VH, bias_V, _ = outputs
    return (features_BPH @ word_weight_VH.t() + bias_V)[..., :vocab_size]
