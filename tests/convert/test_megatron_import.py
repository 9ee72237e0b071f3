"""Checkpoints of Megatron-LM are read whatever their age and layout, and nothing in them is executed."""

from __future__ import annotations

import os
import pickle
import random
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.checkpoint.reader import Checkpoint, locate
from bert_ds.checkpoint.run_config import model_config_from
from bert_ds.config.model import ModelConfig
from bert_ds.convert.__main__ import main
from bert_ds.convert.from_megatron import open_source
from bert_ds.convert.megatron_args import StatedByUser, model_config_of
from bert_ds.errors import CheckpointError
from tests.checkpoint.saved_checkpoints import TOKENS, content_of, model_config, random_tensors, write_vocabulary_file
from tests.convert.megatron_folders import Kind, megatron_args, write_megatron

CORE, LEGACY = Kind(), Kind("legacy")
FOUR_RANKS = Kind(tp=2, pp=2)
_MODEL = dict(num_layers=4, make_vocab_size_divisible_by=64)


def megatron_model(**changes: object) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A model as Megatron has it, its table padded to 64 rows, and its tensors."""
    config = model_config(**{**_MODEL, **changes})
    tensors = random_tensors(config, kinds=["weight"])
    return config, {key.removeprefix("weight/"): tensor for key, tensor in tensors.items()}


def convert(folder: Path, out: Path, *flags: str) -> int:
    vocab_file = write_vocabulary_file(out.with_name("vocabulary.txt"))
    return main(["from-megatron", str(folder), str(out), "--vocab-file", str(vocab_file), *flags])


def converted(out: Path) -> tuple[ModelConfig, Callable[[str], Tensor]]:
    checkpoint = Checkpoint.open(locate(out), verify_hashes=True)
    return model_config_from(checkpoint.manifest), lambda name: checkpoint.read_full("weight", name)


def assert_same_weights(out: Path, tensors: dict[str, Tensor]) -> None:
    config, weight = converted(out)
    for name, tensor in tensors.items():
        found = weight(name)
        assert torch.equal(found[:len(tensor)], tensor.float()), name
        assert not found[len(tensor):].any(), name
    assert (config.vocab_size, config.padded_vocab_size) == (len(TOKENS), 128)


@pytest.mark.proves("Megatron-LM's checkpoints of every age and layout give the same weights", "EXACT")
@pytest.mark.parametrize("kind", [
    CORE, FOUR_RANKS, Kind(tp=4, pp=4), Kind("te", tp=2, pp=2), Kind(pp=2, virtual=2), Kind(old_container=True),
    LEGACY, Kind("legacy", tp=2, pp=2), Kind("legacy", version=2.0, tp=2), Kind("legacy", version=1.0, tp=2),
    Kind("oldest", version=None, tp=2, old_container=True), Kind("oldest", version=0, tp=4, pp=2),
], ids=str)
def test_every_age_and_layout_gives_the_same_weights(tmp_path: Path, kind: Kind) -> None:
    config, tensors = megatron_model()
    write_megatron(tmp_path / "megatron", config, tensors, kind)
    before = content_of(tmp_path / "megatron")
    assert convert(tmp_path / "megatron", tmp_path / "out") == 0
    assert_same_weights(tmp_path / "out", tensors)
    assert content_of(tmp_path / "megatron") == before
    manifest = Checkpoint.open(locate(tmp_path / "out")).manifest
    assert (manifest.step, manifest.kinds) == (0, ("weight",))
    assert manifest.config["origin"]["iteration"] == 3000
    assert manifest.config["origin"]["consumed_train_samples"] == 96000


@pytest.mark.parametrize(("kind", "changes", "args", "expected"), [
    (CORE, {}, {}, {"activation": "gelu_tanh", "head_activation": "gelu"}),
    (CORE, {}, {"bias_gelu_fusion": False, "norm_epsilon": 1e-6}, {"activation": "gelu", "layernorm_epsilon": 1e-6}),
    (CORE, {}, {"apply_residual_connection_post_layernorm": True}, {"norm_placement": "pre"}),
    (LEGACY, {}, {"apply_residual_connection_post_layernorm": True, "openai_gelu": True},
     {"norm_placement": "post", "activation": "gelu_tanh", "head_activation": None}),
    (FOUR_RANKS, {"binary_head": False}, {}, {"binary_head": False}),
    (Kind(tp=2), {"untie_embeddings_and_output_weights": True}, {"untie_embeddings_and_output_weights": True},
     {"untie_embeddings_and_output_weights": True}),
    (Kind(tp=2), {"kv_channels": 8}, {}, {"kv_channels": 8}),
    (CORE, {"position_embedding_type": "rope", "kv_channels": 8},
     {"position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_base": 500},
     {"position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_base": 500.0}),
])
def test_the_model_is_what_the_arguments_and_tensors_say(
    tmp_path: Path, kind: Kind, changes: dict[str, Any], args: dict[str, Any], expected: dict[str, Any]
) -> None:
    config, tensors = megatron_model(**changes)
    write_megatron(tmp_path / "megatron", config, tensors, kind, **args)
    assert convert(tmp_path / "megatron", tmp_path / "out") == 0
    assert_same_weights(tmp_path / "out", tensors)
    found, _ = converted(tmp_path / "out")
    assert found == replace(found, **expected)
    assert (found.num_layers, found.num_attention_heads, found.ffn_size) == (4, 4, 40)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("stacked", [True, False])
def test_the_distributed_format(tmp_path: Path, capsys: pytest.CaptureFixture[str], stacked: bool) -> None:
    """Written by torch; core stacks the layers unless they differ."""
    config, tensors = megatron_model()
    folder = tmp_path / "megatron" / "iter_0003000"
    write_distributed(folder, config, tensors, stacked=stacked)
    assert convert(folder, tmp_path / "out") == 0
    assert_same_weights(tmp_path / "out", tensors)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = _Shell(f"touch {tmp_path / 'executed'}")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert convert(folder, tmp_path / "none") == 2
    assert "posix.system, which no checkpoint needs" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    assert convert(folder, tmp_path / "none") == 2
    assert ".metadata: is not what torch writes" in capsys.readouterr().err


def write_distributed(folder: Path, config: ModelConfig, tensors: dict[str, Tensor], *, stacked: bool) -> None:
    """The model and something of the optimizer, as torch.distributed.checkpoint writes them."""
    whole: dict[str, Any] = {"optimizer.state.exp_avg.lm_head.dense.bias": torch.ones(24)}
    for name, tensor in tensors.items():
        layer = re.match(r"encoder\.layers\.\d+\.", name)
        if stacked and layer:
            local = name.removeprefix(layer[0])
            whole[f"encoder.layers.{local}"] = torch.stack([tensors[f"encoder.layers.{i}.{local}"] for i in range(4)])
        else:
            whole[name] = tensor
    whole["encoder.layers.mlp.linear_fc1._extra_state/shard_0_4"] = torch.ones(2)
    dcp.save(whole, checkpoint_id=folder, no_dist=True)
    common = {"args": megatron_args(config, CORE), "iteration": 3000, "checkpoint_version": 3.0}
    torch.save(common, folder / "common.pt")


def test_half_precision_weights_are_taken_as_they_are(tmp_path: Path) -> None:
    config, tensors = megatron_model()
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    write_megatron(tmp_path / "megatron", config, tensors, FOUR_RANKS)
    assert convert(tmp_path / "megatron", tmp_path / "out") == 0
    assert_same_weights(tmp_path / "out", tensors)


def test_a_checkpoint_without_arguments_needs_the_number_of_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As NVIDIA's first released weights."""
    config, tensors = megatron_model()
    folder = write_megatron(tmp_path / "megatron", config, tensors, Kind("oldest", version=0, old_container=True))
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("release\n")
    folder = folder.rename(folder.with_name("release"))
    edit(folder / "mp_rank_00", lambda content: content.pop("args"))
    cased = ["--tokenizer-type", "BertWordPieceCase"]
    assert convert(tmp_path / "megatron", tmp_path / "out", *cased) == 2
    assert "--num-attention-heads (16 for BERT-large)" in capsys.readouterr().err
    assert convert(tmp_path / "megatron", tmp_path / "out", *cased, "--num-attention-heads", "4") == 0
    assert_same_weights(tmp_path / "out", tensors)


def edit(rank_folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the content of one rank's file."""
    path = rank_folder / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


class _Shell:
    """Unpickled in the usual way, it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("old_container", [False, True])
def test_no_pickle_is_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old_container: bool
) -> None:
    config, tensors = megatron_model()
    folder = write_megatron(tmp_path / "megatron", config, tensors, CORE)
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    torch.save(content | {"rng_state": _Shell(f"touch {tmp_path / 'executed'}")}, path,
               _use_new_zipfile_serialization=not old_container)
    assert convert(tmp_path / "megatron", tmp_path / "out") == 2
    assert "posix.system, which no checkpoint needs" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "out").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "executed").exists(), "the file does not do what the test is about"


def _lose_a_rank(folder: Path) -> None:
    (folder / "mp_rank_01_000" / "model_optim_rng.pt").unlink()


def _cut_short(folder: Path) -> None:
    path = folder / "mp_rank_00_001" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:2000])


def _flip_a_bit(folder: Path) -> None:
    path = folder / "mp_rank_00_001" / "model_optim_rng.pt"
    content = bytearray(path.read_bytes())
    where = content.index(torch.load(path, weights_only=False)["model"]["lm_head.dense.weight"].numpy().tobytes())
    content[where] ^= 1
    path.write_bytes(content)


def _no_torch_file(folder: Path) -> None:
    (folder / "mp_rank_00_001" / "model_optim_rng.pt").write_text("a Git LFS pointer")


def _change_the_tied_copy(folder: Path) -> None:
    edit(folder / "mp_rank_01_001", lambda content: content["model"]["output_layer.weight"].add_(1e-3))


def _change_a_replica(folder: Path) -> None:
    edit(folder / "mp_rank_01_000",
         lambda content: content["model"]["encoder.layers.0.input_layernorm.weight"].mul_(2))


def _add_a_decoder(folder: Path) -> None:
    edit(folder / "mp_rank_00_000",
         lambda content: content["model"].update({"decoder.layers.0.input_layernorm.weight": torch.ones(24)}))


def _lose_a_tensor(folder: Path) -> None:
    for rank in ("00", "01"):
        edit(folder / f"mp_rank_{rank}_001", lambda content: content["model"].pop("lm_head.dense.bias"))


def _another_shape(folder: Path) -> None:
    edit(folder / "mp_rank_01_000",
         lambda content: content["model"].update({"embedding.word_embeddings.weight": torch.ones(24, 24)}))


def _of_another_save(folder: Path) -> None:
    edit(folder / "mp_rank_01_001", lambda content: content.update(iteration=2000))


def _lose_a_piece(folder: Path) -> None:
    edit(folder / "mp_rank_00_000", lambda content: content["model"].pop("embedding.word_embeddings.weight"))


def _newer(folder: Path) -> None:
    edit(folder / "mp_rank_00_000", lambda content: content.update(checkpoint_version=4.0))


def _other_args(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        args = megatron_args(megatron_model()[0], FOUR_RANKS, **changes)
        edit(folder / "mp_rank_00_000", lambda content: content.update(args=args))

    return change


def _tracker(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder.parent / "latest_checkpointed_iteration.txt").write_text(text) and None  # type: ignore


@pytest.mark.parametrize(("damage", "message"), [
    (_lose_a_rank, "mp_rank_01_000/model_optim_rng.pt: is missing among 2 tensor-parallel ranks x 2 stages"),
    (_cut_short, "mp_rank_00_001/model_optim_rng.pt: cannot be used"),
    (_flip_a_bit, "its content is not what was written (CRC-32)"),
    (_no_torch_file, "mp_rank_00_001/model_optim_rng.pt: cannot be used"),
    (_change_the_tied_copy, "has copies of the tied word table that differ, by up to 1.0e-03"),
    (_change_a_replica, "encoder.layers.0.input_layernorm.weight that differ"),
    (_add_a_decoder, "decoder.layers.0.input_layernorm.weight is no parameter of a BERT"),
    (_lose_a_tensor, "lm_head.dense.bias: is missing"),
    (_another_shape, "should be [32, 24] floating-point numbers"),
    (_of_another_save, "is of iteration 2000, that of the first rank of 3000"),
    (_lose_a_piece, "lacks embedding.word_embeddings.weight of tensor-parallel rank 0"),
    (_newer, "is newer than 3.0"),
    (_other_args(swiglu=True, num_experts=8), "num_experts=8: is not computed here"),
    (_other_args(tensor_model_parallel_size=4), "the files are of 2"),
    (_other_args(hidden_size=32), "the files are of 24"),
    (_other_args(num_attention_heads=5), "num_attention_heads=5"),
    (_other_args(tokenizer_type="GPT2BPETokenizer"), "say which it was: BertWordPieceLowerCase or BertWordPieceCase"),
    (_tracker("1000"), "is what latest_checkpointed_iteration.txt names, and is no checkpoint"),
    (_tracker("soon"), "says 'soon'"),
])
def test_what_cannot_be_used_is_told_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], message: str
) -> None:
    config, tensors = megatron_model()
    damage(write_megatron(tmp_path / "megatron", config, tensors, FOUR_RANKS))
    before = content_of(tmp_path / "megatron")
    assert convert(tmp_path / "megatron", tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert message in told
    assert ". Fix: " in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron", "vocabulary.txt"]
    assert content_of(tmp_path / "megatron") == before


@pytest.mark.parametrize("old_container", [False, True])
def test_damage_anywhere_is_an_error_or_harmless(tmp_path: Path, old_container: bool) -> None:
    """Random bytes; the pickle stands at the beginning of the file, where most of them go."""
    config, tensors = megatron_model()
    kind = Kind("legacy", version=1.0, old_container=old_container)
    folder = write_megatron(tmp_path / "megatron", config, tensors, kind)
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    good, choose, refused = path.read_bytes(), random.Random(1), 0
    for _ in range(150):
        bad = bytearray(good)
        for _ in range(choose.choice([1, 1, 2, 8])):
            bad[choose.randrange(choose.choice([len(bad), 12000, 12000]))] = choose.randrange(256)
        path.write_bytes(bad)
        try:
            source = open_source(folder)
            found = model_config_of(source, StatedByUser())
            for name, parameter in parameter_shapes(found).items():
                if name in source.shapes():
                    source.read(name, parameter, found)
        except CheckpointError:
            refused += 1
    assert refused > 75


def test_the_vocabulary_has_to_be_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, tensors = megatron_model()
    write_megatron(tmp_path / "megatron", config, tensors, CORE)
    other = write_vocabulary_file(tmp_path / "other.txt", [*TOKENS, *(f"w{i}" for i in range(40))])
    arguments = ["from-megatron", str(tmp_path / "megatron"), str(tmp_path / "out"), "--vocab-file"]
    assert main([*arguments, str(other)]) == 2
    assert "give the run's own vocabulary, of 1 to 64 entries" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "none.txt")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_bos_and_eos_of_megatrons_tokenizer_can_be_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, tensors = megatron_model()
    write_megatron(tmp_path / "megatron", config, tensors, CORE)
    assert convert(tmp_path / "megatron", tmp_path / "out", "--vocab-extra-bos-eos") == 0
    assert "--finetune --use-checkpoint-args --vocab-extra-bos-eos" in capsys.readouterr().out
    assert converted(tmp_path / "out")[0].vocab_size == len(TOKENS) + 2


def test_an_output_that_exists_is_replaced_by_force_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, tensors = megatron_model()
    folder = write_megatron(tmp_path / "megatron", config, tensors, CORE)
    assert convert(folder, tmp_path / "out") == 0
    assert convert(folder, tmp_path / "out") == 2
    assert "exists already" in capsys.readouterr().err
    assert convert(folder, tmp_path / "out", "--force") == 0
    assert convert(folder, tmp_path / "megatron", "--force") == 2
    assert convert(tmp_path, tmp_path / "none") == 2
    assert "holds neither latest_checkpointed_iteration.txt nor mp_rank_... folders" in capsys.readouterr().err


def test_arguments_are_data(tmp_path: Path) -> None:
    """Enumerations, generators' states and classes that are not installed do not hinder."""
    from signal import SIGTERM  # noqa: PLC0415

    import numpy as np  # noqa: PLC0415

    config, tensors = megatron_model()
    folder = write_megatron(tmp_path / "megatron", config, tensors, CORE, exit_signal=SIGTERM, cache=tmp_path)
    edit(folder / "mp_rank_00", lambda content: content.update(
        rng_state=[{"np_rng_state": np.random.get_state(), "states": {"a": torch.get_rng_state()}}],
        more=Namespace(seen={1, 2}, numbers=np.arange(3), when=np.float64(1.5))))
    assert convert(folder, tmp_path / "out") == 0
    with pytest.raises(CheckpointError, match="is no folder"):
        locate(tmp_path / "nowhere")
