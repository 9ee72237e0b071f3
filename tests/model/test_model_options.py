"""Options of the model: what each computes, counts and keeps for the backward pass, and where it can go."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny_runs import Case, EngineRun
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import gelu, layer_norm

from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.cli.resolve import resolve_run
from bert_ds.config.memory import predict_memory, stage_parameters
from bert_ds.config.model import ModelConfig
from bert_ds.config.parallel import ParallelConfig
from bert_ds.config.run import RunConfig
from bert_ds.config.stages import layer_flops
from bert_ds.convert.huggingface import ExportOptions, export_to_huggingface
from bert_ds.errors import CheckpointError, ConfigError
from bert_ds.model.bert import BertModel, ComputeSettings, vocabulary_logits
from bert_ds.model.dropout import BatchKey
from bert_ds.model.init import initial_std
from bert_ds.parallel.context import ParallelContext
from bert_ds.training import job
from bert_ds.training.throughput import row_flops
from tests.checkpoint.saved_checkpoints import model_config, random_tensors, save

ROPE: dict[str, Any] = {"position_embedding_type": "rope"}
UNTIED: dict[str, Any] = {"untie_embeddings_and_output_weights": True}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {}, "rope": ROPE, "half of rope": {**ROPE, "rotary_percent": 0.5, "rotary_base": 100.0}, "untied": UNTIED,
    "wide heads": {"kv_channels": 12}, "narrow heads": {"kv_channels": 4}, "odd heads": {"num_attention_heads": 5,
    "kv_channels": 8}, "narrow feed-forward": {"ffn_hidden_size": 24}, "post-LN": {"norm_placement": "post"},
    "all": {**ROPE, **UNTIED, "kv_channels": 12, "ffn_hidden_size": 24, "norm_placement": "post", "binary_head": False},
}
by_model = pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())


def config_of(changes: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**{**dict(
        num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, max_position_embeddings=20, vocab_size=100,
        make_vocab_size_divisible_by=16, init_method_std=0.3, attention_backend="unfused"), **changes})


def model_of(config: ModelConfig, compute: ComputeSettings | None = None) -> BertModel:
    model = BertModel(config, ParallelContext.single_process(), compute or ComputeSettings(torch.float64))
    model.initialize(seed=3)
    return model


def batch_of(rows: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    segments = torch.ones(rows, 16, dtype=torch.int32)
    segments[-1, 11:] = 0
    return (torch.randint(100, (rows, 16), generator=generator), torch.randint(2, (rows, 16), generator=generator),
            segments, torch.tensor([[1, 4, 9]]).expand(rows, 3))


def turned(x: Tensor, config: ModelConfig) -> Tensor:
    """The queries or keys [16, D] of one head, turned by their positions where the model asks for it."""
    if config.position_embedding_type != "rope":
        return x
    result, r = x.clone(), int(x.size(1) * config.rotary_percent) // 2
    for position in range(16):
        for i in range(r):
            angle = position / config.rotary_base ** (i / r)
            a, b = x[position, i], x[position, i + r]
            result[position, i] = a * math.cos(angle) - b * math.sin(angle)
            result[position, i + r] = a * math.sin(angle) + b * math.cos(angle)
    return result


def bert_by_hand(config: ModelConfig, weights: dict[str, Tensor], row: int) -> Tensor:
    """Logits [3, V] of one row of `batch_of`, head by head, written down from the papers."""
    ids, types, segments, positions = (tensor[row] for tensor in batch_of())
    N, D, eps = config.num_attention_heads, config.kv_channels or 32 // config.num_attention_heads, 1e-5

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (32,), weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    def attention(x: Tensor, name: str) -> Tensor:
        contexts = []
        for head in linear(x, f"{name}.linear_qkv").view(16, N, 3, D).unbind(1):
            query, key, value = turned(head[:, 0], config), turned(head[:, 1], config), head[:, 2]
            scores = (query @ key.T / math.sqrt(D)).masked_fill(segments == 0, -torch.inf)
            contexts.append(scores.softmax(dim=1) @ value)
        return linear(torch.cat(contexts, dim=1), f"{name}.linear_proj")

    x = weights["embedding.word_embeddings.weight"][ids]
    if config.position_embedding_type != "rope":
        x = x + weights["embedding.position_embeddings.weight"][:16]
    if config.binary_head:
        x = x + weights["embedding.tokentype_embeddings.weight"][types]
    for index in range(config.num_layers):
        layer = f"encoder.layers.{index}"
        normed = norm(x, f"{layer}.input_layernorm")
        x = (normed if config.norm_placement == "post" else x) + attention(normed, f"{layer}.self_attention")
        normed = norm(x, f"{layer}.pre_mlp_layernorm")
        inner = gelu(linear(normed, f"{layer}.mlp.linear_fc1"))
        x = (normed if config.norm_placement == "post" else x) + linear(inner, f"{layer}.mlp.linear_fc2")
    features = norm(gelu(linear(norm(x, "encoder.final_layernorm")[positions], "lm_head.dense")), "lm_head.layer_norm")
    untied = config.untie_embeddings_and_output_weights
    output = weights["output_layer.weight" if untied else "embedding.word_embeddings.weight"]
    return (features @ output.T + weights["output_layer.bias"])[:, :100]


@by_model
@pytest.mark.proves("rope, an untied output weight, head and feed-forward widths, pre- and post-LN compute the "
                    "formulas written out", "1e-9 (float64)")
def test_the_model_is_the_formula(changes: dict[str, Any]) -> None:
    config = config_of(changes)
    assert list(config.problems()) == []
    model = model_of(config)
    weights = dict(model.named_logical_parameters())
    for row, logits in enumerate(vocabulary_logits(model(batch_of()), 100)):
        torch.testing.assert_close(logits, bert_by_hand(config, weights, row), rtol=1e-9, atol=1e-9)


@by_model
def test_parameters_are_those_counted_named_and_placed(changes: dict[str, Any]) -> None:
    config = config_of(changes)
    held = {name: tuple(parameter.shape) for name, parameter in model_of(config).named_logical_parameters()}
    assert held == {name: record.shape for name, record in parameter_shapes(config).items()}
    assert sum(map(math.prod, held.values())) == config.num_parameters
    for stages in (1, 2):
        run = replace(run_of(), model=config, parallel=ParallelConfig(pipeline_model_parallel_size=stages))
        tied_copy = stages > 1 and not config.untie_embeddings_and_output_weights
        copied = config.padded_vocab_size * 32 if tied_copy else 0
        assert sum(stage_parameters(run, stage) for stage in range(stages)) == config.num_parameters + copied
        memory = predict_memory(run, stages)
        assert sum(stage.optimizer for stage in memory) == 12 * config.num_parameters


def test_the_tables_that_options_add_and_remove() -> None:
    plain = config_of({})
    assert plain.num_parameters - config_of(ROPE).num_parameters == 20 * 32
    assert config_of(UNTIED).num_parameters - plain.num_parameters == 112 * 32
    assert "embedding.position_embeddings.weight" not in parameter_shapes(config_of(ROPE))
    assert parameter_shapes(config_of(UNTIED))["output_layer.weight"].cut_dim == 0
    large = ModelConfig(num_layers=24, hidden_size=1024, num_attention_heads=16)
    assert replace(large, **UNTIED).num_parameters == 336_297_858 + 30592 * 1024
    wide = replace(large, kv_channels=128)
    assert wide.num_parameters - large.num_parameters == 24 * (4 * 1024 * 1024 + 3 * 1024)
    assert layer_flops(wide) - layer_flops(large) == 8 * 1024 * 1024 + 4 * 512 * 1024
    assert row_flops(replace(large, **UNTIED), 80) == row_flops(large, 80)


def test_an_output_weight_of_its_own_starts_like_megatrons() -> None:
    config = config_of({**UNTIED, "vocab_size": 2000, "init_method_std": 0.02})
    weights = dict(model_of(config).named_logical_parameters())
    output, words = weights["output_layer.weight"], weights["embedding.word_embeddings.weight"]
    assert initial_std("output_layer.weight", config) == 0.02
    assert float(output.detach().std()) == pytest.approx(0.02, rel=0.02)
    assert abs(float((output * words).detach().sum())) < 0.02 * float((words * words).detach().sum())


# What is recomputed.

RECOMPUTED: list[dict[str, Any]] = [
    {}, {"recompute_granularity": "selective"}, {"recompute_granularity": "full"},
    {"recompute_granularity": "full", "recompute_method": "block"},
]


def trained(cases: list[Case]) -> list[tuple[list[float], dict[str, str]]]:
    """Losses of a case's steps, and hashes of what this rank holds after them."""
    results = []
    for case in cases:
        run = EngineRun(case)
        losses = run.steps(case.steps).losses
        results.append((losses, {local.name: sha256(local.parameter.detach().numpy().tobytes()).hexdigest()
                                 for local in run.pipeline.local_parameters()}))
        run.close()
    return results


@pytest.mark.proves("recomputation of all layers, of each stage's first, or of attention alone, with dropout", "EXACT")
@pytest.mark.parametrize("backend", ["unfused", "local"])
def test_recomputation_changes_no_bit_with_dropout_on(backend: str) -> None:
    """`unfused` draws from the device's generator, `local` hashes places."""
    cases = [Case(pp=2, dropout=0.1, backend=backend, steps=2, recompute=every, packed=True, model={**ROPE, **changes})
             for changes in RECOMPUTED for every in ((0, 2) if changes.get("recompute_method") == "block" else (0,))]
    for results in run_ranks(trained, 2, cases):
        losses, weights = results[0]
        for case, (other_losses, other_weights) in zip(cases, results, strict=True):
            assert (other_losses, other_weights) == (losses, weights), case


def kept_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    """Shapes of what a model keeps for the backward pass, parameters left out."""
    model = model_of(replace(config, attention_dropout=0.0), ComputeSettings())
    own = {parameter.data_ptr() for parameter in model.parameters()}
    shapes: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            shapes.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(batch_of(), BatchKey(seed=1, step=0, first_row=0))
    return shapes


def test_selective_recomputation_keeps_no_attention_matrix() -> None:
    def matrices(changes: dict[str, Any]) -> int:
        return sum(shape[-2:] == (16, 16) for shape in kept_shapes(config_of(changes)))

    assert matrices({"attention_backend": "local"}) >= 2
    assert matrices({"attention_backend": "local", "recompute_granularity": "selective"}) == 0


@pytest.mark.parametrize("changes", [ROPE, {"recompute_granularity": "selective"}, {**ROPE, **RECOMPUTED[1]}])
def test_a_layer_with_options_is_one_graph(changes: dict[str, Any]) -> None:
    config = config_of({**changes, "attention_backend": "local"})
    gradients = []
    for traced in (False, True):
        model = model_of(config, ComputeSettings())
        if traced:
            for layer in model.layers[2:4]:
                layer._compute = torch.compile(layer._layer, backend="aot_eager", fullgraph=True)
        outputs = model(batch_of(), BatchKey(seed=1, step=0, first_row=0))
        vocabulary_logits(outputs, 100).tanh().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_logical_parameters()})
    for name, gradient in gradients[0].items():
        if gradient is not None:
            torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_predicted_activations_follow_what_is_recomputed() -> None:
    run = run_of("--attention-backend", "local")

    def activations(**changes: Any) -> int:
        model = replace(run.model, **{key: value for key, value in changes.items() if key != "every"})
        engine = replace(run.engine, activation_checkpoint_interval=changes.get("every", 0))
        return predict_memory(replace(run, model=model, engine=engine), 1)[0].activations

    tokens = 4 * 512
    layer, matrix = 34 * tokens * 1024, 5 * 16 * tokens * 512
    assert activations() == 24 * (layer + matrix)
    assert activations(recompute_granularity="selective") == 24 * layer + matrix
    assert activations(recompute_granularity="full") == 24 * 2 * tokens * 1024 + layer + matrix
    assert activations(every=8) == 3 * 2 * tokens * 1024 + 8 * (layer + matrix)
    assert activations(every=8, recompute_method="block") == 8 * 2 * tokens * 1024 + 17 * (layer + matrix)
    wide = activations(kv_channels=128, attention_backend="auto")
    assert wide - activations(attention_backend="auto") == 24 * 8 * tokens * 1024


# What can be set.

def run_of(*flags: str) -> RunConfig:
    return resolve_run(["--recipe", "340m", *flags], world_size=1).config


def test_megatrons_flags() -> None:
    model = run_of("--position-embedding-type", "rope", "--rotary-percent", "0.5", "--rotary-base", "500",
                   "--kv-channels", "128", "--untie-embeddings-and-output-weights").model
    assert (model.position_embedding_type, model.rotary_dim, model.rotary_base) == ("rope", 64, 500.0)
    assert (model.head_dim, model.projection_size, model.untie_embeddings_and_output_weights) == (128, 2048, True)
    assert run_of("--use-rotary-position-embeddings").model.position_embedding_type == "rope"
    for flags, granularity, method, every in [
        ((), None, "uniform", 0), (("--recompute-num-layers", "3"), None, "uniform", 3),
        (("--recompute-activations",), "selective", "uniform", 0),
        (("--recompute-granularity", "selective"), "selective", "uniform", 0),
        (("--recompute-granularity", "full"), "full", "uniform", 1),
        (("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "4"), "full",
         "block", 4),
    ]:
        run = run_of(*flags)
        assert (run.model.recompute_granularity, run.model.recompute_method, run.recompute_interval) == (
            granularity, method, every)


@pytest.mark.parametrize(("flags", "message"), [
    ("--position-embedding-type rope --rotary-percent 0.11", "turns 7 of a head's 64 dimensions, which are no pairs"),
    ("--position-embedding-type rope --rotary-percent 1.5", "is no share of a head"),
    ("--position-embedding-type alibi", "one of learned_absolute, rope"),
    ("--kv-channels 0", "must be at least 1"),
    ("--num-attention-heads 5", "or set kv_channels, the dimension of a head"),
    ("--recompute-activations --recompute-num-layers 2", "contradicts pipeline.activation_checkpoint_interval=2"),
    ("--recompute-method block", "says which whole layers to recompute, and none are"),
    ("--recompute-activations --recompute-granularity full", "contradicts"),
    ("--rotary-interleaved", "rope turns pairs of a head's two halves"),
])
def test_what_cannot_be_is_told(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(*flags.split())


# What Hugging Face can be told.

def test_an_untied_model_exports(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for placement in ("pre", "post"):
        config = model_config(**UNTIED, norm_placement=placement)
        folder = save(tmp_path / placement, config, random_tensors(config, kinds=["weight"]))
        report = export_to_huggingface(folder, tmp_path / f"{placement} out", ExportOptions())
        assert report.difference is not None
        assert report.num_parameters == config.num_parameters - 8 * (2 * 24 + 1)


def test_what_hugging_face_cannot_express_is_refused_in_one_message(tmp_path: Path) -> None:
    config = model_config(**ROPE, kv_channels=8, head_activation="gelu_tanh")
    folder = save(tmp_path / "save", config, random_tensors(config, kinds=["weight"]))
    with pytest.raises(CheckpointError) as refused:
        export_to_huggingface(folder, tmp_path / "out", ExportOptions())
    assert [problem.setting for problem in refused.value.problems] == [
        "model.position_embedding_type", "model.kv_channels", "model.head_activation"]
    assert not (tmp_path / "out").exists()
    assert list(model_config(kv_channels=6, **UNTIED).export_problems()) == []


def test_training_starts_with_one_line_about_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bert_ds.training.job"):
        for flags in ((), ("--position-embedding-type", "rope", "--kv-channels", "128")):
            job._introduce(run_of(*flags), ParallelContext.single_process())
    [line] = [record.getMessage() for record in caplog.records if "Hugging Face" in record.getMessage()]
    assert line.startswith("this model will not export to Hugging Face: model.position_embedding_type=rope: ")
    assert "model.kv_channels=128: " in line
