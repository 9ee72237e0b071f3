"""Every parameter of a model by its logical name: full shape and how tensor parallelism cuts it.

H hidden, A heads x head dimension, F feed-forward width, V padded vocabulary.
"""

from __future__ import annotations

from bert_ds.checkpoint.format import ParameterRecord
from bert_ds.config.model import ModelConfig


def parameter_shapes(config: ModelConfig) -> dict[str, ParameterRecord]:
    """Logical name -> record of all trained parameters, in the order of the forward pass."""
    H, V = config.hidden_size, config.padded_vocab_size
    shapes = {"embedding.word_embeddings.weight": ParameterRecord((V, H), 0)}
    if config.num_positions:
        shapes["embedding.position_embeddings.weight"] = ParameterRecord((config.num_positions, H))
    if config.binary_head:
        shapes["embedding.tokentype_embeddings.weight"] = ParameterRecord((config.num_token_types, H))
    for index in range(config.num_layers):
        shapes |= _layer(f"encoder.layers.{index}", H, config.projection_size, config.ffn_size)
    shapes |= _layer_norm("encoder.final_layernorm", H)
    shapes |= _linear("lm_head.dense", H, H) | _layer_norm("lm_head.layer_norm", H)
    if config.untie_embeddings_and_output_weights:
        shapes["output_layer.weight"] = ParameterRecord((V, H), 0)
    shapes["output_layer.bias"] = ParameterRecord((V,), 0)
    if config.binary_head:
        shapes |= _linear("pooler.dense", H, H) | _linear("binary_head", 2, H)
    return shapes


def _layer(prefix: str, H: int, A: int, F: int) -> dict[str, ParameterRecord]:
    return {
        **_layer_norm(f"{prefix}.input_layernorm", H),
        **_linear(f"{prefix}.self_attention.linear_qkv", 3 * A, H, weight_cut=0, bias_cut=0),
        **_linear(f"{prefix}.self_attention.linear_proj", H, A, weight_cut=1),
        **_layer_norm(f"{prefix}.pre_mlp_layernorm", H),
        **_linear(f"{prefix}.mlp.linear_fc1", F, H, weight_cut=0, bias_cut=0),
        **_linear(f"{prefix}.mlp.linear_fc2", H, F, weight_cut=1),
    }


def _layer_norm(prefix: str, H: int) -> dict[str, ParameterRecord]:
    return {f"{prefix}.weight": ParameterRecord((H,)), f"{prefix}.bias": ParameterRecord((H,))}


def _linear(
    prefix: str, outputs: int, inputs: int, *, weight_cut: int | None = None, bias_cut: int | None = None
) -> dict[str, ParameterRecord]:
    return {
        f"{prefix}.weight": ParameterRecord((outputs, inputs), weight_cut),
        f"{prefix}.bias": ParameterRecord((outputs,), bias_cut),
    }
