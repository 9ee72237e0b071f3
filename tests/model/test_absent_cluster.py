"""Any rank of any layout on the meta device, in one process: shapes, names and counts of clusters that are not here."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch

from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.cli.resolve import resolve_run
from bert_ds.config.memory import stage_parameters
from bert_ds.config.model import ModelConfig
from bert_ds.config.parallel import ParallelConfig
from bert_ds.config.stages import stage_bounds
from bert_ds.model.bert import ComputeSettings, bert_layers
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.sharding import sharding_of

LARGE = ModelConfig(num_layers=24, hidden_size=1024, num_attention_heads=16)
FOUR_B = ModelConfig(num_layers=48, hidden_size=2560, num_attention_heads=32)
OPTIONS = ModelConfig(num_layers=24, hidden_size=1024, num_attention_heads=24, kv_channels=128, ffn_hidden_size=3072,
                      position_embedding_type="rope", untie_embeddings_and_output_weights=True)
TWENTY_B = ModelConfig(num_layers=48, hidden_size=6144, num_attention_heads=96)


def stage_of(model: ModelConfig, parallel: ParallelConfig, pp_rank: int, tp_rank: int) -> dict[str, torch.nn.Parameter]:
    """The parameters of one rank by logical name, copies included."""
    ctx = ParallelContext(tp_size=parallel.tensor_model_parallel_size, pp_size=parallel.pipeline_model_parallel_size,
                          tp_rank=tp_rank, pp_rank=pp_rank, dualpipev=parallel.is_dualpipev)
    layers, bounds = bert_layers(model, ctx, ComputeSettings()), stage_bounds(model, parallel)
    found = {}
    for stage in parallel.stages_of(pp_rank):
        start = 2 + bounds[stage][0] if stage else 0
        end = 2 + bounds[stage][1] if stage < parallel.num_stages - 1 else len(layers)
        with torch.device("meta"):
            for layer in layers[start:end]:
                for name, parameter in layer.build().named_parameters():
                    found[layer.logical_name(name)] = parameter
    return found


@pytest.mark.proves("all ranks of 128- and 1,024-rank layouts together are the model", "EXACT")
@pytest.mark.parametrize(("model", "tp", "pp", "schedule"), [
    pytest.param(LARGE, 8, 16, "1f1b", id="340m on 128 ranks"), pytest.param(FOUR_B, 1, 1, "1f1b", id="4b"),
    pytest.param(FOUR_B, 2, 4, "1f1b", id="4b tp2 pp4"), pytest.param(TWENTY_B, 4, 4, "1f1b", id="20b on 16 ranks"),
    pytest.param(OPTIONS, 8, 16, "1f1b", id="rope, untied, wide heads"),
    pytest.param(TWENTY_B, 8, 16, "1f1b", id="20b on 1,024 ranks, data parallel 8"),
    pytest.param(LARGE, 8, 12, "dualpipev", id="340m, two stages a rank"),
    pytest.param(OPTIONS, 8, 8, "dualpipev", id="rope, untied, wide heads, two stages a rank"),
    pytest.param(TWENTY_B, 8, 16, "dualpipev", id="20b, two stages a rank")])
def test_all_ranks_together_are_the_model(model: ModelConfig, tp: int, pp: int, schedule: str) -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_schedule=schedule)
    shapes = parameter_shapes(model)
    held: dict[str, int] = defaultdict(int)
    for pp_rank in range(pp):
        for tp_rank in range(tp):
            for name, parameter in stage_of(model, parallel, pp_rank, tp_rank).items():
                sharding = sharding_of(parameter)
                assert sharding.full_shape == shapes[name].shape, name
                assert (sharding.dim, tuple(parameter.shape)) == (shapes[name].cut_dim, sharding.local_shape), name
                is_copy = name == "embedding.word_embeddings.weight" and pp_rank > 0
                if not is_copy and (sharding.dim is not None or tp_rank == 0):
                    held[name] += parameter.numel()
    assert held == {name: math.prod(record.shape) for name, record in shapes.items()}
    assert sum(held.values()) == model.num_parameters


@pytest.mark.parametrize(("arguments", "ranks"), [
    (["--recipe", "340m", "--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size", "16"], 128),
    (["--recipe", "340m", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4", "--kv-channels",
      "128", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"], 8),
    (["--recipe", "340m", "--pipeline-model-parallel-size", "4", "--pipeline-schedule", "dualpipev"], 4),
    (["--recipe", "20b"], 16), (["--recipe", "4b"], 8)])
def test_the_predicted_parameters_of_every_stage_are_there(arguments: list[str], ranks: int) -> None:
    run = resolve_run([*arguments, "--dry-run", "--world-size", str(ranks)], world_size=1).config
    for pp_rank in range(run.parallel.pipeline_model_parallel_size):
        held = stage_of(run.model, run.parallel, pp_rank, 0)
        stages = run.parallel.stages_of(pp_rank)
        assert sum(parameter.numel() for parameter in held.values()) == sum(
            stage_parameters(run, stage) for stage in stages)
