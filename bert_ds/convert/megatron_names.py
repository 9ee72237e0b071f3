"""Names of Megatron-LM's BERT, of all its ages, and ours.

Ours are those of Megatron core's BertModel with its local layers. With Transformer Engine's layers, core keeps a
LayerNorm inside the linear layer that follows it. The legacy model (megatron/legacy/model, up to 0.17) nests its own
names: megatron/legacy/model/{bert_model,language_model,transformer}.py and, before 2020, `transformer` for `encoder`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from bert_ds.config.model import ModelConfig

WORD_TABLE, OUTPUT_WEIGHT, OUTPUT_BIAS = (
    "embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
QKV = "self_attention.linear_qkv."
TRANSFORMER_ENGINE, LOCAL = TRANSFORMER_IMPLS = ("transformer_engine", "local")

_OF_LAYER = {
    r"input_(?:layer)?norm": "input_layernorm",
    r"self_attention\.linear_qkv\.layer_norm": "input_layernorm",
    r"(?:self_)?attention\.query_key_value": "self_attention.linear_qkv",
    r"self_attention\.linear_qkv": "self_attention.linear_qkv",
    r"(?:self_)?attention\.dense": "self_attention.linear_proj",
    r"self_attention\.linear_proj": "self_attention.linear_proj",
    r"post_attention_(?:layer)?norm": "pre_mlp_layernorm",
    r"pre_mlp_layernorm": "pre_mlp_layernorm",
    r"mlp\.linear_fc1\.layer_norm": "pre_mlp_layernorm",
    r"mlp\.(?:dense_h_to_4h|linear_fc1)": "mlp.linear_fc1",
    r"mlp\.(?:dense_4h_to_h|linear_fc2)": "mlp.linear_fc2",
}
_STACK = r"(?:language_model\.)?(?:encoder|transformer)\."
_OTHERS = {
    r"(?:language_model\.)?embedding\.(word|position|tokentype)_embeddings\.weight": r"embedding.\1_embeddings.weight",
    _STACK + r"final_(?:layer)?norm\.(weight|bias)": r"encoder.final_layernorm.\1",
    r"(?:language_model\.)?pooler\.dense\.(weight|bias)": r"pooler.dense.\1",
    r"lm_head\.dense\.(weight|bias)": r"lm_head.dense.\1",
    r"lm_head\.(?:layer_norm|layernorm|norm)\.(weight|bias)": r"lm_head.layer_norm.\1",
    r"(?:output_layer|lm_head)\.bias": OUTPUT_BIAS,
    r"output_layer\.weight|language_model\.output_layer\.weight|word_embeddings_for_head\.weight": OUTPUT_WEIGHT,
    r"binary_head\.(weight|bias)": r"binary_head.\1",
}
_RULES = tuple((re.compile(pattern), ours) for pattern, ours in (
    *((_STACK + r"layers\.(\d+)\." + theirs + r"[._](weight|bias)", rf"encoder.layers.\1.{ours}.\2")
      for theirs, ours in _OF_LAYER.items()),
    *_OTHERS.items(),
))
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


def is_legacy(name: str) -> bool:
    """Whether only the legacy model has this name."""
    return name.startswith("language_model.")


def is_weightless(name: str) -> bool:
    """Whether the entry is a layer's state beside its weights (FP8 scales)."""
    return name.rpartition(".")[2].startswith("_extra_state")


def logical_name(theirs: str) -> str | None:
    """Our name for theirs, the layer counted as in `theirs`; None where BERT has no such parameter."""
    for pattern, ours in _RULES:
        if match := pattern.fullmatch(theirs):
            return match.expand(ours)
    return None


def layer_of(name: str) -> int | None:
    """The transformer layer of a parameter of ours, if it belongs to one."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def in_layer(name: str, layer: int) -> str:
    """The same parameter of another layer; the name itself where it belongs to none."""
    return _LAYER.sub(f"encoder.layers.{layer}.", name)


def core_name(ours: str, transformer_impl: str) -> str:
    """The name in core's BertModel."""
    if transformer_impl == TRANSFORMER_ENGINE:
        ours = re.sub(r"\binput_layernorm\.", "self_attention.linear_qkv.layer_norm_", ours)
        ours = re.sub(r"\bpre_mlp_layernorm\.", "mlp.linear_fc1.layer_norm_", ours)
    return ours


def extra_states(layers: range) -> Iterator[str]:
    """Entries that core's linear layers add to a state dict, empty without FP8."""
    for layer in layers:
        for module in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
            yield f"encoder.layers.{layer}.{module}._extra_state"


def qkv_in_our_order(piece: Tensor, checkpoint_version: float, config: ModelConfig) -> Tensor:
    """The rows of one rank's query_key_value in the order (head, [q, k, v], D).

    Versions (fix_query_key_value_ordering in megatron/training/checkpointing.py): below 1 ([q, k, v], head, D), 1
    (head, D, [q, k, v]), from 2 on as here.
    """
    D = config.head_dim
    if checkpoint_version >= 2:
        return piece
    if checkpoint_version < 1:
        return piece.unflatten(0, (3, -1, D)).transpose(0, 1).flatten(0, 2)
    return piece.unflatten(0, (-1, D, 3)).transpose(1, 2).flatten(0, 2)


def fit_rows(table: Tensor, rows: int) -> Tensor:
    """The vocabulary table, or its bias, cut or filled with zeros to `rows`; only padding is concerned."""
    if len(table) >= rows:
        return table[:rows]
    return torch.cat([table, table.new_zeros(rows - len(table), *table.shape[1:])])
