"""What keeps a run from FP8, and the flags of it."""

from __future__ import annotations

from typing import Any

import pytest

from bert_ds.cli.parse_flags import parse_flags
from bert_ds.config.engine import EngineConfig
from bert_ds.config.fp8 import fp8_problems
from bert_ds.config.model import ModelConfig
from bert_ds.config.parallel import ParallelConfig

FP8: dict[str, Any] = {"transformer_impl": "transformer_engine", "fp8_format": "hybrid"}


def problems(
    tokens: int = 2048, tensor: int = 1, precision: str = "bf16", *, sequence_parallel: bool = False, **model: Any
) -> list[str]:
    config = ModelConfig(**{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, **FP8, **model})
    parallel = ParallelConfig(tensor_model_parallel_size=tensor, sequence_parallel=sequence_parallel)
    engine = EngineConfig(micro_batch_size=4, global_batch_size=4, precision=precision)
    return [str(problem) for problem in fp8_problems(config, parallel, engine, {"rows": tokens})]


def test_a_run_that_fits_has_none() -> None:
    assert problems() == problems(tensor=4) == problems(tokens=64, tensor=4, sequence_parallel=True) == []
    assert problems(tokens=3, fp8_format=None, transformer_impl="local") == []


@pytest.mark.parametrize(("changes", "message"), [
    ({"transformer_impl": "local"}, "model.fp8_format=hybrid: is computed by Transformer Engine only. Fix: set "
                                    "model.transformer_impl to transformer_engine"),
    ({"precision": "fp32"}, "would cut the matrices of an fp32 run to 8 bits"),
    ({"hidden_size": 72}, "model.hidden_size=72: is no multiple of 16, as FP8 matrix products want. Fix: use 80"),
    ({"ffn_hidden_size": 96, "tensor": 4}, "model.ffn_hidden_size / tensor_model_parallel_size=24: is no multiple"),
    ({"tensor": 8, "num_attention_heads": 8, "ffn_hidden_size": 256},
     "heads x their dimension / tensor_model_parallel_size=8: is no multiple of 16"),
    ({"tokens": 40}, "rows=40 tokens of a micro-batch: is no multiple of 16"),
    ({"tokens": 96, "tensor": 4, "sequence_parallel": True}, "rows=96 tokens of a micro-batch: is no multiple of 64"),
])
def test_what_does_not_fit_is_named_with_its_repair(changes: dict[str, Any], message: str) -> None:
    assert any(message in found for found in problems(**changes)), problems(**changes)


def test_compiled_layers_of_transformer_engine_are_refused() -> None:
    model = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, compile=True, **FP8)
    assert ["model.compile"] == [problem.setting for problem in model.problems()]


def test_megatrons_flags() -> None:
    line = parse_flags(["--transformer-impl", "transformer_engine", "--fp8-format", "e4m3", "--fp8-recipe",
                        "tensorwise", "--fp8-margin", "1", "--fp8-interval", "1", "--fp8-amax-history-len", "1024",
                        "--fp8-amax-compute-algo", "max"])
    assert not line.problems
    assert {setting: value for setting, ((_, value),) in line.values.items()} == {
        "model.transformer_impl": "transformer_engine", "model.fp8_format": "e4m3", "model.fp8_recipe": "tensorwise",
        "model.fp8_margin": 1, "model.fp8_amax_history_len": 1024, "model.fp8_amax_compute_algo": "max"}
    assert line.remarks == ("--fp8-interval has no effect: Transformer Engine updates its scaling factors after every "
                            "pass",)
    assert [problem.setting for problem in parse_flags(["--no-fp8-wgrad"]).problems] == ["--no-fp8-wgrad"]
