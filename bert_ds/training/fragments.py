"""Where the fp32 master and the moments of each parameter live on this rank, whichever optimizer DeepSpeed chose.

ZeRO 1 and the bf16 optimizer cut one flat buffer per group over the data-parallel ranks and record the piece of each
parameter as `_hp_mapping`; fp32 without ZeRO updates the parameters themselves. (fp16 without ZeRO is refused.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bert_ds.checkpoint.format import EXP_AVG, EXP_AVG_SQ, WEIGHT
from bert_ds.parallel.sharding import Sharding, sharding_of
from bert_ds.training.pipeline import BertPipeline, LocalParameter

MOMENTS = ("exp_avg", "exp_avg_sq")
_KIND_OF_MOMENT = dict(zip(MOMENTS, (EXP_AVG, EXP_AVG_SQ), strict=True))


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter whose master and moments this rank keeps."""

    local: LocalParameter
    start: int
    """First element, counted in this rank's flattened tensor-parallel piece of the parameter."""
    numel: int
    master: Tensor
    """Flat fp32 buffer that holds the part."""
    offset: int
    """Where the part begins in `master`, and in each moment."""
    is_whole: bool
    """Whether every data-parallel rank keeps the same whole parameter, as without ZeRO."""

    @property
    def sharding(self) -> Sharding:
        return sharding_of(self.local.parameter)

    def of(self, buffer: Tensor) -> Tensor:
        """The part of a buffer laid out like `master`, as a flat view."""
        return buffer.detach().view(-1).narrow(0, self.offset, self.numel)


def accumulated_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Where the gradient of the micro-batches adds up; the bf16 optimizer keeps an fp32 sum beside the parameter."""
    gradient = getattr(parameter, "_hp_grad", None)
    return parameter.grad if gradient is None else gradient


def torch_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The AdamW inside whatever DeepSpeed wrapped around it."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def fragments(engine: Any) -> Iterator[Fragment]:
    """The fragments of this rank, in the order of the layers; copies have none, their owner keeps them."""
    pipeline: BertPipeline = engine.module
    for local in pipeline.local_parameters():
        parameter = local.parameter
        if local.is_copy:
            continue
        if hasattr(parameter, "_hp_mapping"):
            mapping = parameter._hp_mapping
            if mapping is not None:
                master = _partitions(engine.optimizer)[mapping.param_group_index]
                yield Fragment(local, mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel, master,
                               mapping.hp_fragment_address.start, is_whole=False)
        else:
            yield Fragment(local, 0, parameter.numel(), parameter, 0, is_whole=True)


def _partitions(optimizer: Any) -> list[Tensor]:
    """The flat fp32 partitions of ZeRO 1 or of the bf16 optimizer, one a parameter group."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return optimizer.single_partition_of_fp32_groups
    return optimizer.fp32_groups_flat_partition


def moments(engine: Any, master: Tensor) -> dict[str, Any]:
    """The optimizer's state of one flat buffer, made as AdamW itself makes it where no step was taken yet."""
    optimizer = torch_optimizer(engine)
    state = optimizer.state[master]
    if not state:
        on_device = master.device if optimizer.defaults.get("fused") else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=on_device)
        for name in MOMENTS:
            state[name] = torch.zeros_like(master)
    return state


def saved_buffers(engine: Any, fragment: Fragment, *, with_moments: bool) -> dict[str, Tensor]:
    """The flat buffers that hold the fragment, by their kind in a checkpoint."""
    if not with_moments:
        return {WEIGHT: fragment.master}
    state = moments(engine, fragment.master)
    return {WEIGHT: fragment.master, **{_KIND_OF_MOMENT[name]: state[name] for name in MOMENTS}}


def refresh_model_weights(engine: Any) -> None:
    """Copies the masters into the weights that the model computes with, on all data-parallel ranks and in copies."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    else:
        with torch.no_grad():
            for fragment in fragments(engine):
                weight = fragment.local.parameter
                weight.copy_(fragment.of(fragment.master).view_as(weight))
    engine.module._synchronize_tied_weights()
