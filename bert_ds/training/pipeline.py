"""The list of layers as a DeepSpeed PipelineModule.

Kept here, not in model/, because training/ is the only folder that imports DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from bert_ds.config.model import ModelConfig
from bert_ds.model.bert import ComputeSettings, LayerDef, bert_layers
from bert_ds.model.dropout import BatchKey, DropoutKey, layer_keys
from bert_ds.model.init import initialize_parameter
from bert_ds.model.loss import PretrainingLoss
from bert_ds.model.transformer_layer import TransformerLayer
from bert_ds.parallel.context import ParallelContext
from bert_ds.training.fp8 import Fp8


@dataclass(frozen=True)
class LocalParameter:
    """A parameter that this rank holds."""

    name: str
    """Layout-free name."""
    parameter: nn.Parameter
    is_copy: bool
    """Whether an earlier stage owns it: the word table on the last stage."""


@dataclass(frozen=True)
class _Run:
    """Consecutive layers of this stage that are executed, and recomputed, together."""

    first: int
    """Global index of the first layer."""
    functions: tuple[Callable[..., Any], ...]
    recompute: bool


@dataclass(frozen=True)
class _Stage:
    """A stage that this rank holds."""

    start: int
    """Global index of the first layer."""
    functions: Sequence[Callable[..., Any]]
    """The layers, called one after the other."""

    @property
    def layers(self) -> range:
        return range(self.start, self.start + len(self.functions))


class BertPipeline(PipelineModule):
    """One stage of BERT.

    The forward pass is our own: it hands each layer its dropout key and recomputes groups of transformer layers, so
    that neither DeepSpeed's layer seeding nor its activation checkpointing is needed.
    """

    active_phase = 0
    """Which of the rank's stages `forward` runs."""

    def __init__(
        self, config: ModelConfig, ctx: ParallelContext, compute: ComputeSettings, loss: PretrainingLoss, *,
        bounds: Sequence[tuple[int, int]], seed: int, recompute_every: int,
    ) -> None:
        self._config, self._ctx, self._seed, self._bounds = config, ctx, seed, bounds
        self.layer_defs = bert_layers(config, ctx, compute)
        super().__init__(
            layers=[_spec(layer) for layer in self.layer_defs],
            topology=PipeModelDataParallelTopology(num_pp=ctx.pp_size, num_mp=ctx.tp_size, num_dp=ctx.dp_size),
            loss_fn=loss,
        )
        for local in self.local_parameters():
            initialize_parameter(local.parameter, local.name, config, seed)
        self.fp8 = Fp8(config, ctx, self) if config.fp8_format else None
        self._runs = [tuple(_group(stage, recompute_every, config.recompute_method)) for stage in self._stages()]
        self._step = 0
        self._micro_batches = [0] * len(self._runs)

    def begin_step(self, step: int) -> None:
        """Names the training step whose micro-batches come next; dropout depends on it."""
        self._step, self._micro_batches = step, [0] * len(self._runs)

    def forward(self, inputs: Any) -> Any:
        """This stage's layers on one micro-batch; called by the engine."""
        # The segment ids are the last but one of whatever a stage receives.
        keys = self._keys(inputs[-2]) if self.training else None
        with self.fp8.computing() if self.fp8 else nullcontext():
            for run in self._runs[self.active_phase]:
                inputs = _execute(run, inputs, keys, self.fp8)
        return _without_parameters(inputs)

    def _keys(self, segment_ids_BS: Tensor) -> dict[int, DropoutKey]:
        """The dropout keys of this stage's layers for the next micro-batch, by global index."""
        ctx, micro_batch_size = self._ctx, segment_ids_BS.size(0)
        first_row = (self._micro_batches[self.active_phase] * ctx.dp_size + ctx.dp_rank) * micro_batch_size
        self._micro_batches[self.active_phase] += 1
        layers = self._stages()[self.active_phase].layers
        token_group = ctx.tp_group if ctx.sequence_parallel else None
        key = BatchKey(self._seed, self._step, first_row, ctx.tp_rank)
        return dict(zip(layers, layer_keys(key, layers, segment_ids_BS, token_group), strict=True))

    def local_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Every layer of this rank with its place in the list of layers; a tied module once for each use."""
        for index in (index for stage in self._stages() for index in stage.layers):
            layer = self.layer_defs[index]
            yield index, self.tied_modules[layer.tied_key] if layer.tied_key else getattr(self, str(index))

    def local_parameters(self) -> Iterator[LocalParameter]:
        """Every parameter of this rank once, in the order of the layers."""
        seen: set[int] = set()
        for index, module in self.local_layers():
            layer = self.layer_defs[index]
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield LocalParameter(layer.logical_name(name), parameter, layer.second_use is not None)

    def _partition_layers(self, method: str = "uniform") -> None:
        """Cuts between transformer layers only, at the given bounds; embeddings ride with the first stage, heads with
        the last. Overrides DeepSpeed's choice of methods, none of which knows the head's cost."""
        first_layer, last_stop = 2, len(self.layer_defs)
        self.parts = [0, *(first_layer + stop for _, stop in self._bounds[:-1]), last_stop]
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        """DeepSpeed broadcasts a leaf that needs a gradient; without one there is nothing to warn of."""
        super()._synchronize_tied_weights()

    def _stages(self) -> list[_Stage]:
        """What this rank holds, in the order of the layers."""
        return [_Stage(self._local_start, self.forward_funcs)]


class DualPipeVPipeline(DualPipeVModule, BertPipeline):
    """Two stages of BERT, each as far from its end of the model as the other: rank 0 holds embeddings and heads, and
    with them the word table once."""

    def _stages(self) -> list[_Stage]:
        return [_Stage(start, functions)
                for (start, _), functions in zip(self.phase_bounds, self.phase_funcs, strict=True)]


def _group(stage: _Stage, interval: int, method: str) -> Iterator[_Run]:
    """The layers of a stage in order. Of its transformer layers, `uniform` recomputes all in groups of `interval`,
    `block` the first `interval` one by one; 0 recomputes none."""
    index, functions = 0, stage.functions
    largest, left = (1, interval) if method == "block" else (interval, len(functions))
    while index < len(functions):
        stop = index + 1
        recompute = interval > 0 and left > 0 and isinstance(functions[index], TransformerLayer)
        while recompute and stop < min(index + largest, len(functions)) \
                and isinstance(functions[stop], TransformerLayer):
            stop += 1
        left -= stop - index if recompute else 0
        yield _Run(stage.start + index, tuple(functions[index:stop]), recompute)
        index = stop


def _without_parameters(outputs: Any) -> Any:
    """The outputs of a stage, with a view in place of each parameter among them: the weight and bias of the vocabulary.

    DeepSpeed starts a backward pass when the first gradient reaches an output, and clears all bf16 gradients then. What
    had reached a parameter that is an output itself was lost: its hook runs after the gradient has been added.
    """
    return tuple(output.view_as(output) if isinstance(output, nn.Parameter) else output for output in outputs)


def _spec(layer: LayerDef) -> LayerSpec:
    if layer.tied_key is None:
        return LayerSpec(layer.module, *layer.arguments)
    return TiedLayerSpec(layer.tied_key, layer.module, *layer.arguments, forward_fn=layer.second_use)


def _execute(run: _Run, inputs: Any, keys: Mapping[int, DropoutKey] | None, fp8: Fp8 | None) -> Any:
    def layers(*tensors: Tensor) -> Any:
        values: Any = tensors
        for offset, function in enumerate(run.functions):
            values = function(values, keys[run.first + offset] if keys else None)
        return values

    if run.recompute and keys is not None:
        return checkpoint(layers, *inputs, use_reentrant=False, preserve_rng_state=False,
                          context_fn=fp8.recomputing if fp8 else noop_context_fn)
    return layers(*inputs)
