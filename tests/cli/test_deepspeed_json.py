from __future__ import annotations

from pathlib import Path

import pytest

from bert_ds.cli.deepspeed_json import engine_json
from bert_ds.cli.resolve import resolve_run

BASE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --train-iters 10 --micro-batch-size 2".split()


def test_fp16_is_complete_and_holds_no_optimizer() -> None:
    run = resolve_run(["--recipe", "340m"], world_size=2)
    assert engine_json(run.config, 2) == {
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0, "steps_per_print": 2**31 - 1, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e7, "allgather_bucket_size": 5e7},
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "activation_checkpoint_interval": 0},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000,
                 "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": False}, "timers": {"throughput": {"enabled": False}},
    }


@pytest.mark.parametrize(("flags", "expected"), [
    (["--bf16"], {"grad_accum_dtype": "fp32"}),
    (["--fp16", "--accumulate-allreduce-grads-in-fp32"], {"grad_accum_dtype": "fp32"}),
    (["--fp16"], None),
    (["--fp32"], None),
])
def test_gradients_are_summed_in_fp32_unless_fp16_is_left_alone(flags: list[str], expected: object) -> None:
    run = resolve_run([*BASE, "--global-batch-size", "2", *flags], world_size=1)
    assert engine_json(run.config, 1).get("data_types") == expected


def test_what_the_user_wrote_travels_on_but_cannot_break_the_pipeline(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text("""{
        "train_batch_size": 4, "steps_per_print": 7, "wall_clock_breakdown": true, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "offload_optimizer": {"device": "cpu"}},
        "pipeline": {"activation_checkpoint_interval": 2}}""")
    run = resolve_run(["--deepspeed_config", str(tmp_path / "own.json"), *BASE], world_size=1)
    completed = engine_json(run.config, 1)
    assert run.config.engine.activation_checkpoint_interval == 2
    assert completed["pipeline"]["activation_checkpoint_interval"] == 0
    assert completed["steps_per_print"] == 7 and completed["wall_clock_breakdown"] is True
    assert completed["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 1000, "allgather_bucket_size": 5e7,
                                              "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(("flags", "reason"), [
    (["--fp16", "--accumulate-allreduce-grads-in-fp32"], "hides fp16 gradients from the sums over stages"),
    (["--zero-stage", "0"], "clips by the first stage's norm only"),
])
def test_pipelines_that_would_train_wrongly_are_refused(flags: list[str], reason: str) -> None:
    argv = [*BASE, "--global-batch-size", "2", *flags]
    resolve_run(argv, world_size=1)
    with pytest.raises(Exception, match=reason):
        resolve_run([*argv, "--pipeline-model-parallel-size", "2"], world_size=2)


@pytest.mark.parametrize(("name", "ranks"), [("tiny", 8), ("110m", 8), ("340m", 8), ("4b", 8), ("20b", 16)])
def test_deepspeed_accepts_every_shipped_configuration(name: str, ranks: int) -> None:
    deepspeed_config = pytest.importorskip("deepspeed.runtime.config")
    run = resolve_run(["--recipe", name], world_size=ranks)
    completed = engine_json(run.config, ranks) | {
        # Outside a process group DeepSpeed counts one rank.
        "train_batch_size": run.config.engine.micro_batch_size, "gradient_accumulation_steps": 1}
    accepted = deepspeed_config.DeepSpeedConfig(completed)
    assert accepted.zero_optimization_stage == 1
    assert accepted.float16_config.enabled == (run.config.engine.precision == "fp16")
    assert accepted.bfloat16_config.enabled == (run.config.engine.precision == "bf16")
    assert accepted.gradient_clipping == 1.0
