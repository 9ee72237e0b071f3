"""Folders as Megatron-LM writes them, made by hand from the tensors of a model: of any age, cut for any layout."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_ds.checkpoint.parameters import parameter_shapes
from bert_ds.config.model import ModelConfig

ITERATION = 3000


@dataclass(frozen=True)
class Kind:
    """Which Megatron-LM, and how the model lay in it."""

    style: str = "core"
    """core: local layers. te: Transformer Engine's. legacy, oldest: the model before core."""
    version: float | None = 3.0
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    """Chunks a stage."""
    old_container: bool = False


def megatron_args(config: ModelConfig, kind: Kind, **changes: Any) -> Namespace:
    """What it says of the model; `None` takes an argument away."""
    args: dict[str, Any] = dict(
        num_layers=config.num_layers, hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings, seq_length=config.seq_length, layernorm_epsilon=1e-5,
        tokenizer_type="BertWordPieceLowerCase", padded_vocab_size=config.padded_vocab_size, bias_gelu_fusion=True,
        make_vocab_size_divisible_by=config.make_vocab_size_divisible_by // kind.tp, consumed_train_samples=96000,
        params_dtype=torch.float32, hidden_dropout=0.1, attention_dropout=0.0)
    sizes = {"tensor_model_parallel_size": kind.tp, "pipeline_model_parallel_size": kind.pp}
    if (kind.version or 0) < 3:
        sizes = {"model_parallel_size": kind.tp}
    args |= sizes | changes
    return Namespace(**{name: value for name, value in args.items() if value is not None})


def write_megatron(save: Path, config: ModelConfig, tensors: dict[str, Tensor], kind: Kind, **args: Any) -> Path:
    """Writes `tensors` (our names) as Megatron-LM would have saved them; returns the iteration's folder."""
    folder = save / f"iter_{ITERATION:07d}"
    for rank in range(kind.tp):
        for stage in range(kind.pp):
            suffix = f"_{stage:03d}" if kind.pp > 1 else ""
            path = folder / f"mp_rank_{rank:02d}{suffix}" / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            content = rank_content(config, tensors, kind, rank, stage)
            content["args"] = megatron_args(config, kind, **args)
            torch.save(content, path, _use_new_zipfile_serialization=not kind.old_container)
    (save / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return folder


def rank_content(
    config: ModelConfig, tensors: dict[str, Tensor], kind: Kind, rank: int, stage: int
) -> dict[str, Any]:
    """The object in one rank's file, without arguments."""
    content: dict[str, Any] = {"iteration": ITERATION, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}}
    if kind.version is not None:
        content["checkpoint_version"] = kind.version
    for chunk in range(kind.virtual):
        model = OrderedDict(_chunk(config, tensors, kind, rank, stage, chunk))
        if kind.style in {"legacy", "oldest"}:
            model = _nested(model)
        content["model" if kind.virtual == 1 else f"model{chunk}"] = model
    return content


def _chunk(config: ModelConfig, tensors: dict[str, Tensor], kind: Kind, rank: int, stage: int, chunk: int) -> Any:
    depth = config.num_layers // (kind.pp * kind.virtual)
    first_layer = (chunk * kind.pp + stage) * depth
    is_first, is_last = stage == chunk == 0, (stage, chunk) == (kind.pp - 1, kind.virtual - 1)
    for name, parameter in parameter_shapes(config).items():
        full = tensors[name]
        piece = full if parameter.cut_dim is None else full.chunk(kind.tp, parameter.cut_dim)[rank]
        if match := re.match(r"encoder\.layers\.(\d+)", name):
            local = int(match[1]) - first_layer
            if 0 <= local < depth:
                theirs = _their_name(name.replace(match[0], f"encoder.layers.{local}"), kind.style)
                yield theirs, _their_order(name, piece, config, kind)
        elif is_first if name.startswith("embedding.") else is_last:
            yield _their_name(name, kind.style), piece.clone()
    if is_last and not is_first and not config.untie_embeddings_and_output_weights:
        table = tensors["embedding.word_embeddings.weight"].chunk(kind.tp)[rank]
        yield _their_name("output_layer.weight", kind.style), table.clone()
    if kind.style in {"core", "te"}:
        yield from ((f"encoder.layers.{layer}.mlp.linear_fc1._extra_state", None) for layer in range(depth))


def _their_order(name: str, piece: Tensor, config: ModelConfig, kind: Kind) -> Tensor:
    if "linear_qkv" not in name or (kind.version or 0) >= 2:
        return piece.clone()
    parts = piece.unflatten(0, (-1, 3, config.head_dim))
    order = (1, 0, 2) if (kind.version or 0) < 1 else (0, 2, 1)
    return parts.permute(*order, *range(3, parts.dim())).flatten(0, 2).contiguous()


_TE = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_LEGACY = {
    "self_attention.linear_qkv": "self_attention.query_key_value", "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_norm", "input_layernorm": "input_norm", "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h", "final_layernorm": "final_norm", "lm_head.layer_norm": "lm_head.norm",
    "output_layer.bias": "lm_head.bias", "output_layer.weight": "word_embeddings_for_head.weight",
}
_OLDEST = {"self_attention": "attention", "post_attention_norm": "post_attention_layernorm",
           "input_norm": "input_layernorm", "final_norm": "final_layernorm", "lm_head.norm": "lm_head.layernorm",
           "encoder.": "transformer."}


def _their_name(ours: str, style: str) -> str:
    tables = {"core": (), "te": (_TE,), "legacy": (_LEGACY,), "oldest": (_LEGACY, _OLDEST)}[style]
    for table in tables:
        for old, new in table.items():
            ours = ours.replace(old, new)
    if style in {"legacy", "oldest"} and ours.startswith(("embedding.", "encoder.", "transformer.", "pooler.")):
        return f"language_model.{ours}"
    return ours


def _nested(model: dict[str, Tensor]) -> dict[str, Any]:
    """Dictionaries within dictionaries, flat below the stack of layers, as the legacy model keeps them."""
    nested: dict[str, Any] = {}
    for name, tensor in model.items():
        match = re.match(r"(language_model\.(?:encoder|transformer)|lm_head|binary_head)\.(.*)", name)
        parts = [*match[1].split("."), match[2]] if match else name.split(".")
        place = nested
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = tensor
    return nested
