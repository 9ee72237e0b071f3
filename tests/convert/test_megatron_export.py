"""What is written for Megatron core is what its BertModel expects; reading it back gives the same checkpoint."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_ds.checkpoint.reader import Checkpoint, locate
from bert_ds.checkpoint.run_config import DEFINING, model_config_from
from bert_ds.config.model import ModelConfig
from bert_ds.convert.__main__ import main
from tests.checkpoint.saved_checkpoints import Layout, content_of, model_config, random_tensors, save

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {}, "no binary head": {"binary_head": False}, "untied": {"untie_embeddings_and_output_weights": True},
    "rope": {"position_embedding_type": "rope", "kv_channels": 8, "rotary_percent": 0.5},
    "Megatron's activations": {"activation": "gelu_tanh", "head_activation": "gelu"},
}


def saved(save_dir: Path, **changes: Any) -> Path:
    config = model_config(**{"num_layers": 4, "make_vocab_size_divisible_by": 128, **changes})
    return save(save_dir, config, random_tensors(config, kinds=["weight"]), layout=Layout(tp=2, pp=2, dp=2))


def to_megatron(source: Path, out: Path, *flags: str, tp: int = 1, pp: int = 1) -> int:
    return main(["to-megatron", str(source), str(out), "--tensor-model-parallel-size", str(tp),
                 "--pipeline-model-parallel-size", str(pp), *flags])


@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (2, 4)])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_there_and_back(tmp_path: Path, changes: dict[str, Any], tp: int, pp: int, implementation: str) -> None:
    source = saved(tmp_path / "save", **changes)
    before = content_of(source)
    assert to_megatron(source, tmp_path / "megatron", "--transformer-impl", implementation, tp=tp, pp=pp) == 0
    assert content_of(source) == before
    assert main(["from-megatron", str(tmp_path / "megatron"), str(tmp_path / "back"), "--vocab-file",
                 str(tmp_path / "megatron" / "vocab.txt")]) == 0
    first, second = (Checkpoint.open(locate(path), verify_hashes=True) for path in (source, tmp_path / "back"))
    assert second.manifest.parameters == first.manifest.parameters
    for name in first.manifest.parameters:
        assert torch.equal(first.read_full("weight", name), second.read_full("weight", name)), name
    configs = [model_config_from(checkpoint.manifest) for checkpoint in (first, second)]
    assert defining(configs[0]) == defining(configs[1])
    assert first.manifest.vocabulary == second.manifest.vocabulary


def defining(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in DEFINING} | {"ffn_hidden_size": config.ffn_size}


def test_the_files_are_what_megatron_looks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "save")
    assert to_megatron(source.parent, tmp_path / "megatron", "--dtype", "bfloat16", tp=2, pp=2) == 0
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "100"
    folder = tmp_path / "megatron" / "iter_0000100"
    assert sorted(path.name for path in folder.iterdir()) == [f"mp_rank_0{t}_00{p}" for t in (0, 1) for p in (0, 1)]
    content = torch.load(folder / "mp_rank_01_001" / "model_optim_rng.pt", weights_only=False)
    args = content["args"]
    assert isinstance(args, Namespace)
    assert (content["iteration"], content["checkpoint_version"], args.consumed_train_samples) == (100, 3.0, 3200)
    assert (args.padded_vocab_size, args.tensor_model_parallel_size, args.params_dtype) == (256, 2, torch.bfloat16)
    assert content["model"]["output_layer.weight"].shape == (128, 24)
    assert content["model"]["encoder.layers.1.self_attention.linear_proj.weight"].shape == (24, 12)
    assert content["model"]["encoder.layers.0.mlp.linear_fc1.layer_norm_bias"].dtype == torch.bfloat16
    assert content["model"]["encoder.layers.0.mlp.linear_fc1._extra_state"] is None
    assert "--use-checkpoint-args" in capsys.readouterr().out


@pytest.mark.parametrize(("changes", "layout", "message"), [
    ({"norm_placement": "post"}, {}, "model.norm_placement=post: is unknown to Megatron core's BertModel"),
    ({"activation": "gelu_tanh"}, {}, "model.head_activation=gelu_tanh: is unknown"),
    ({}, {"tp": 3}, "--tensor-model-parallel-size=3: does not divide the 4 attention heads"),
    ({}, {"pp": 3}, "--pipeline-model-parallel-size=3: does not divide the 4 layers"),
    ({}, {"tp": 0}, "--tensor-model-parallel-size=0"),
])
def test_what_megatron_cannot_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], layout: dict[str, int], message: str
) -> None:
    source = saved(tmp_path / "save", **changes)
    assert to_megatron(source, tmp_path / "megatron", **layout) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "megatron").exists()


def test_outputs_and_sources_are_safe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = saved(tmp_path / "save"), tmp_path / "megatron"
    assert to_megatron(source, out) == 0
    assert to_megatron(source, out) == 2
    assert "exists already" in capsys.readouterr().err
    assert to_megatron(source, out, "--force", pp=2) == 0
    assert to_megatron(out, tmp_path / "again") == 2
    assert to_megatron(source, source.parent, "--force") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron", "save"]
