"""FP8 by Transformer Engine: the recipe, the contexts in which layers compute, and the state that outlives a process.

Delayed scaling takes the factors by which tensors are scaled before they are cut to 8 bits from the largest values of
passes before. Each stage agrees on them among its ranks after every forward and backward pass. Tensorwise scaling looks
at the tensors themselves and remembers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bert_ds.compat import fp8_autocast, import_transformer_engine, transformer_engine_version
from bert_ds.config.model import ModelConfig
from bert_ds.errors import ConfigError
from bert_ds.parallel.context import ParallelContext

_DIRECTIONS = ("scaling_fwd", "scaling_bwd")
_TENSORS = ("scale", "amax_history")


def fp8_recipe(model: ModelConfig, *, shared: bool) -> Any:
    """Transformer Engine's recipe for `model`; `shared` says whether several ranks agree on the factors.

    Raises:
        ConfigError: this Transformer Engine does not know the recipe, or this GPU no FP8.
    """
    import_transformer_engine()
    from transformer_engine.common import recipe  # noqa: PLC0415
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # noqa: PLC0415

    available, reason = FP8GlobalStateManager.is_fp8_available()
    if not available:
        raise ConfigError.of("model.fp8_format", model.fp8_format, reason, "leave it out")
    assert model.fp8_format is not None
    fp8_format = recipe.Format[model.fp8_format.upper()]
    if model.fp8_recipe == "tensorwise":
        if not hasattr(recipe, "Float8CurrentScaling"):
            raise ConfigError.of("model.fp8_recipe", "tensorwise",
                                 f"Transformer Engine {transformer_engine_version()} does not know it",
                                 "use delayed, or a later Transformer Engine")
        return recipe.Float8CurrentScaling(fp8_format=fp8_format)
    return recipe.DelayedScaling(
        margin=model.fp8_margin, fp8_format=fp8_format, amax_history_len=model.fp8_amax_history_len,
        amax_compute_algo=model.fp8_amax_compute_algo, reduce_amax=shared)


class Fp8:
    """How the layers of this rank's stage compute in FP8."""

    def __init__(self, model: ModelConfig, ctx: ParallelContext, stage: nn.Module) -> None:
        self._te: ModuleType = import_transformer_engine()
        self._group = ctx.stage_group
        self._recipe = fp8_recipe(model, shared=ctx.stage_group is not None)
        self._layers = {name: layer for name, layer in stage.named_modules() if isinstance(layer, self._te.Linear)}
        # Before the first pass, so that what a checkpoint holds is known from the start.
        with torch.no_grad(), self.computing():
            for layer in self._layers.values():
                layer.init_fp8_metadata()

    def computing(self) -> AbstractContextManager[None]:
        """Around the forward pass of a stage; leaving it agrees on the factors of the next one."""
        return fp8_autocast(self._te, enabled=True, recipe=self._recipe, group=self._group)

    def recomputing(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For torch.utils.checkpoint: around a group of layers in the forward pass, and in the backward pass."""
        return _phase(recompute=False), self._second_pass()

    @contextmanager
    def _second_pass(self) -> Iterator[None]:
        """Computes with the factors of the first pass. Leaving FP8 with gradients on would agree on factors once more,
        from values that the first pass has handed in already."""
        with torch.no_grad(), self.computing(), _phase(recompute=True), torch.enable_grad():
            yield

    def state(self) -> dict[str, Tensor]:
        """The factors and the largest values behind them, by layer, as views; empty without delay.

        Read from the layers, not from their `_extra_state`, which is a pickle.
        """
        return {f"{name}/{direction}/{tensor}": getattr(layer.fp8_meta[direction], tensor)
                for name, layer in self._layers.items() for direction in _DIRECTIONS for tensor in _TENSORS
                if hasattr(layer.fp8_meta[direction], tensor)}

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor]) -> bool:
        """Goes on from saved tensors, flat, where they are those of these layers; says whether they are."""
        state = self.state()
        if {name: tensor.numel() for name, tensor in saved.items()} != {name: t.numel() for name, t in state.items()}:
            return False
        for name, tensor in state.items():
            tensor.copy_(saved[name].view_as(tensor))
        return True


def _phase(*, recompute: bool) -> AbstractContextManager[Any]:
    """Lets layers put the factors of a first pass aside, or take them out again."""
    from transformer_engine.pytorch.distributed import activation_recompute_forward  # noqa: PLC0415

    return activation_recompute_forward(activation_recompute=True, recompute_phase=recompute)
