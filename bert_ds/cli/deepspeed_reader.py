"""Reads a DeepSpeed configuration: what a run is made of becomes settings, the rest travels on, nothing is ignored."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hjson

from bert_ds.cli import deepspeed_keys as keys
from bert_ds.cli.coerce import WrongTypeError, coerce
from bert_ds.cli.nearest import suggestion
from bert_ds.cli.settings import Given, Settings, wrong_type
from bert_ds.cli.shipped_files import display
from bert_ds.errors import ConfigError, Problem

DTYPE_NAMES = {"fp32": "fp32", "float32": "fp32", "float": "fp32", "torch.float32": "fp32",
               "fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
               "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16"}
ADAM_SWITCHES = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False}
"""Parameters of DeepSpeed's AdamW that have one possible value here."""


@dataclass(kw_only=True)
class DeepSpeedJson:
    """What a DeepSpeed configuration holds beyond settings."""

    accumulation: Given | None = None
    """gradient_accumulation_steps, which only together with a batch size says something."""
    handed_on: dict[str, Any] = field(default_factory=dict)
    """Keys for DeepSpeed, as the user wrote them."""


def read_deepspeed_json(path: Path, settings: Settings) -> DeepSpeedJson:
    """Gives `settings` what the JSON says of batch, precision, optimizer and ZeRO; what cannot be served becomes a
    problem. Comments are allowed. Raises ConfigError when the file is not JSON or holds a key twice.
    """
    return _Reader(display(path), settings).read(_load(path))


def _load(path: Path) -> dict[str, Any]:
    try:
        loaded = hjson.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, OSError) as error:
        raise ConfigError.of("deepspeed_config", display(path), " ".join(str(error).split()),
                             "repair the file") from error
    if not isinstance(loaded, dict):
        raise ConfigError.of("deepspeed_config", display(path), "is not a JSON object", "write { ... }")
    return loaded


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key} is written twice")
        found[key] = value
    return found


class _Reader:
    """One pass over one file."""

    def __init__(self, origin: str, settings: Settings) -> None:
        self._origin = origin
        self._settings = settings
        self._result = DeepSpeedJson()

    def read(self, loaded: dict[str, Any]) -> DeepSpeedJson:
        known = keys.READ | keys.HANDED_ON
        for key, value in loaded.items():
            if key == "scheduler":
                self._refuse_scheduler(value)
            elif key in keys.REFUSED:
                self._refuse(key, value, keys.REFUSED[key])
            elif key in keys.HANDED_ON:
                self._result.handed_on[key] = value
            elif key not in keys.READ:
                self._problem(key, value, "is not a key of DeepSpeed", suggestion(key, known))
        self._batch(loaded)
        self._precision(loaded)
        self._zero(loaded)
        self._optimizer(loaded)
        self._pipeline(loaded)
        self._values_that_break_the_engine(loaded)
        return self._result

    def _batch(self, loaded: dict[str, Any]) -> None:
        self._give("train_batch_size", loaded, "engine.global_batch_size")
        self._give("train_micro_batch_size_per_gpu", loaded, "engine.micro_batch_size")
        self._give("gradient_clipping", loaded, "engine.gradient_clipping")
        written = "gradient_accumulation_steps"
        if written in loaded:
            try:
                value = coerce(loaded[written], int)
            except WrongTypeError as wrong:
                self._settings.problems.append(wrong_type(f"{self._origin}: {written}", loaded[written], wrong))
            else:
                self._result.accumulation = Given(value=value, origin=self._origin, written=written)

    def _precision(self, loaded: dict[str, Any]) -> None:
        fp16 = self._block(loaded, "fp16", keys.FP16_KEYS, keys.FP16_HANDED_ON)
        bf16 = self._block(loaded, "bf16", keys.BF16_KEYS, keys.BF16_HANDED_ON)
        types = self._block(loaded, "data_types", keys.DATA_TYPES_KEYS)
        for key in keys.FP16_KEYS - {"enabled"}:
            self._give(f"fp16.{key}", fp16, f"loss_scaling.{key}")
        enabled = [name for name, block in (("fp16", fp16), ("bf16", bf16)) if self._is_enabled(name, block)]
        if len(enabled) == 2:
            self._problem("fp16.enabled", True, "contradicts bf16.enabled=true", "enable one of the two")
        elif enabled:
            self._settings.give("engine.precision", enabled[0], origin=self._origin, written=f"{enabled[0]}.enabled")
        dtype = types.get("grad_accum_dtype")
        if dtype is not None:
            self._settings.give("engine.grad_accum_dtype", DTYPE_NAMES.get(str(dtype), dtype), origin=self._origin,
                                written="data_types.grad_accum_dtype")

    def _is_enabled(self, name: str, block: dict[str, Any]) -> bool:
        enabled = block.get("enabled", False)
        if not isinstance(enabled, bool):
            self._problem(f"{name}.enabled", enabled, "is not true or false", "correct it, or leave it out for false")
        return enabled is True

    def _zero(self, loaded: dict[str, Any]) -> None:
        zero = self._block(loaded, "zero_optimization", keys.ZERO_KEYS, keys.ZERO_HANDED_ON)
        stage = zero.get("stage", 0)
        written = "zero_optimization.stage"
        if stage in (2, 3):
            self._problem(written, stage, "shards gradients or weights, which the pipeline engine reads whole",
                          "use stage 1, and activation recomputation or a larger model-parallel size for memory")
        elif "zero_optimization" in loaded:
            self._settings.give("engine.zero_stage", stage, origin=self._origin, written=written)
        offload = zero.get("offload_optimizer")
        if offload is None:
            return
        if not isinstance(offload, dict) or offload.get("device", "none") not in ("cpu", "none"):
            self._problem("zero_optimization.offload_optimizer", offload, "needs ZeRO stage 3 or is not a block",
                          'write {"device": "cpu"}')

    def _optimizer(self, loaded: dict[str, Any]) -> None:
        optimizer = self._block(loaded, "optimizer", frozenset({"type", "params"}))
        kind = optimizer.get("type", "AdamW")
        if str(kind).lower() not in ("adamw", "adam"):
            self._problem("optimizer.type", kind, "is not served: checkpoints hold the two moments of AdamW",
                          "use AdamW")
        params = optimizer.get("params", {})
        if not isinstance(params, dict):
            self._problem("optimizer.params", params, "is not an object", "write { ... }")
            return
        for key, value in params.items():
            name = f"optimizer.params.{key}"
            if key in keys.OPTIMIZER_PARAMS:
                self._settings.give(f"engine.{key}", value, origin=self._origin, written=name)
            elif key in ADAM_SWITCHES:
                if value is not ADAM_SWITCHES[key]:
                    self._problem(name, value, "is another optimizer than AdamW", "leave it out")
            elif key == "max_grad_norm":
                self._problem(name, value, "was removed from DeepSpeed", "set gradient_clipping")
            elif key != "torch_adam":
                self._problem(name, value, "is not a parameter of AdamW", suggestion(key, keys.OPTIMIZER_PARAMS))

    def _pipeline(self, loaded: dict[str, Any]) -> None:
        pipeline = self._block(loaded, "pipeline", keys.PIPELINE_KEYS)
        self._give("pipeline.activation_checkpoint_interval", pipeline, "engine.activation_checkpoint_interval")
        for key in ("pipe_partitioned", "grad_partitioned"):
            if pipeline.get(key, False) is not False:
                self._problem(f"pipeline.{key}", pipeline[key], "cuts integer tensors between stages wrongly",
                              "leave it out")

    def _values_that_break_the_engine(self, loaded: dict[str, Any]) -> None:
        if loaded.get("managed_gradient_accumulation", True) is not True:
            self._problem("managed_gradient_accumulation", False, "is not served by the pipeline engine",
                          "leave it out")
        if loaded.get("gradient_allreduce_op", "mean") != "mean":
            self._problem("gradient_allreduce_op", loaded["gradient_allreduce_op"],
                          "multiplies the gradient by the data-parallel size", "leave it out")

    def _refuse_scheduler(self, block: Any) -> None:
        params = block.get("params", {}) if isinstance(block, dict) else {}
        kind = block.get("type") if isinstance(block, dict) else block
        values = {"schedule.lr_warmup_iters": params.get("warmup_num_steps"),
                  "schedule.lr_decay_iters": params.get("total_num_steps"),
                  "schedule.lr_warmup_init": params.get("warmup_min_lr")}
        told = [f"{name}={value}" for name, value in values.items() if value is not None]
        self._problem("scheduler", kind, "belongs to the recipe, whose schedule can end above 0",
                      "set schedule.lr_decay_style and " + (", ".join(told) or "schedule.lr_warmup_iters") +
                      " in the recipe, and the peak in optimizer.params.lr")

    def _block(self, loaded: dict[str, Any], name: str, read: Collection[str],
               handed_on: Collection[str] = ()) -> dict[str, Any]:
        """The block `name`, its keys checked; those that DeepSpeed is to get are noted."""
        block = loaded.get(name, {})
        if not isinstance(block, dict):
            self._problem(name, block, "is not an object", "write { ... }")
            return {}
        for key, value in block.items():
            dotted = f"{name}.{key}"
            if dotted in keys.REFUSED_IN_BLOCKS:
                self._refuse(dotted, value, keys.REFUSED_IN_BLOCKS[dotted])
            elif key.startswith("stage3_"):
                self._refuse(dotted, value, keys.STAGE_3_ONLY)
            elif key in handed_on:
                self._result.handed_on.setdefault(name, {})[key] = value
            elif key not in read:
                self._problem(dotted, value, "is not a known key", suggestion(key, {*read, *handed_on}))
        return block

    def _refuse(self, key: str, value: Any, why: tuple[str, str]) -> None:
        """Refuses a key that is switched on; one that is switched off is dropped."""
        is_off = value is False or value is None or (isinstance(value, dict) and value.get("enabled") is False)
        if not is_off:
            shown = "{...}" if isinstance(value, dict) else value
            self._problem(key, shown, *why)

    def _give(self, dotted: str, block: dict[str, Any], setting: str) -> None:
        """Takes the last part of `dotted` from its block when it is there."""
        key = dotted.rpartition(".")[2]
        if key in block:
            self._settings.give(setting, block[key], origin=self._origin, written=dotted)

    def _problem(self, key: str, value: Any, reason: str, repair: str) -> None:
        self._settings.problems.append(Problem(f"{self._origin}: {key}", value, reason, repair))
