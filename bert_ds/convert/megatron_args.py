"""Megatron-LM's arguments and our ModelConfig, both ways.

Sizes come from the tensors; the arguments say what tensors cannot: heads, epsilon, activation, dropout. Defaults are
those of megatron/training/arguments.py; the activations are those of megatron/core/transformer/mlp.py and
megatron/core/models/bert/bert_lm_head.py, and of megatron/legacy/model/{transformer,bert_model}.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bert_ds.config.model import ModelConfig
from bert_ds.convert.megatron_names import OUTPUT_WEIGHT, TRANSFORMER_ENGINE, WORD_TABLE
from bert_ds.convert.megatron_source import MegatronSource
from bert_ds.errors import CheckpointError, Problem, raise_if_any

Activation = Literal["gelu", "gelu_tanh"]
_LAYER = "encoder.layers.0."
_POSITIONS = "embedding.position_embeddings.weight"
_NEEDED = (WORD_TABLE, f"{_LAYER}self_attention.linear_qkv.weight", f"{_LAYER}mlp.linear_fc1.weight")
_REPAIR = "use the checkpoint of a model without it"
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "swiglu": (False,), "squared_relu": (False,), "add_bias_linear": (True,), "disable_bias_linear": (False,),
    "apply_layernorm_1p": (False,), "normalization": ("LayerNorm",), "group_query_attention": (False,),
    "multi_latent_attention": (False,), "qk_layernorm": (False,), "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (1,), "use_rope_scaling": (False,), "softmax_type": ("vanilla",),
    "position_embedding_type": ("learned_absolute", "rope"), "onnx_safe": (False,),
}
"""Arguments that change what the model computes, and the values that are computed here; None is one of them."""


@dataclass(frozen=True, kw_only=True)
class StatedByUser:
    """What a checkpoint without arguments leaves to the user."""

    num_attention_heads: int | None = None
    activation: Activation | None = None


def model_config_of(source: MegatronSource, stated: StatedByUser) -> ModelConfig:
    """The model in `source`. Its vocab_size counts the rows of the word table, padding included.

    Raises:
        CheckpointError: everything in it that no model here computes, or that does not fit together.
    """
    args, shapes = source.args or {}, source.shapes()
    raise_if_any(CheckpointError, _missing(source, stated))
    raise_if_any(CheckpointError, _problems(source, args))
    (rows, hidden), pieces = shapes[WORD_TABLE]
    heads = _heads(source, stated)
    assert isinstance(heads, int), "_missing has checked it"
    has_positions = _POSITIONS in shapes
    positions = shapes[_POSITIONS][0][0] if has_positions else args["max_position_embeddings"]
    activation, head_activation = _activations(args, source.legacy, stated)
    config = ModelConfig(
        num_layers=1 + max(int(name.split(".")[2]) for name in shapes if name.startswith("encoder.layers.")),
        hidden_size=hidden, num_attention_heads=heads, kv_channels=_kv_channels(source, heads, hidden),
        ffn_hidden_size=_full_rows(source, f"{_LAYER}mlp.linear_fc1.weight"),
        seq_length=min(size_in(args, "seq_length", positions), positions), max_position_embeddings=positions,
        position_embedding_type="learned_absolute" if has_positions else "rope",
        rotary_percent=_number(args, "rotary_percent", 1.0), rotary_base=_number(args, "rotary_base", 10000.0),
        vocab_size=rows * pieces, make_vocab_size_divisible_by=1,
        hidden_dropout=_number(args, "hidden_dropout", 0.1), attention_dropout=_number(args, "attention_dropout", 0.1),
        layernorm_epsilon=_number(args, "norm_epsilon", _number(args, "layernorm_epsilon", 1e-5)),
        init_method_std=_number(args, "init_method_std", 0.02),
        # Core has the setting and does not read it; the legacy model's residual then starts as in our post-LN.
        norm_placement="post" if source.legacy and args.get("apply_residual_connection_post_layernorm") else "pre",
        activation=activation, head_activation=None if head_activation == activation else head_activation,
        binary_head="binary_head.weight" in shapes, untie_embeddings_and_output_weights=_is_untied(source, args),
    )
    raise_if_any(CheckpointError, (Problem(f"{source.folder}: {problem.setting}", problem.value, problem.reason,
                                           "use another checkpoint") for problem in config.problems()))
    return config


def args_of(
    config: ModelConfig, *, transformer_impl: str, tensor_parallel: int, pipeline_parallel: int, padded_vocab_size: int,
    tokenizer_type: str,
) -> dict[str, Any]:
    """The arguments that Megatron-LM compares or takes over when it loads a checkpoint (check_checkpoint_args and
    load_args_from_checkpoint in megatron/training/checkpointing.py) and those that say what the model computes."""
    return {
        "num_layers": config.num_layers, "hidden_size": config.hidden_size, "ffn_hidden_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads, "kv_channels": config.head_dim,
        "group_query_attention": False, "num_query_groups": 1,
        "seq_length": config.seq_length, "max_position_embeddings": config.max_position_embeddings,
        "position_embedding_type": config.position_embedding_type, "add_position_embedding": True,
        "use_rotary_position_embeddings": False, "rotary_base": int(config.rotary_base),
        "rotary_percent": config.rotary_percent, "rotary_interleaved": False,
        "add_bias_linear": True, "add_qkv_bias": False, "squared_relu": False, "swiglu": False,
        "untie_embeddings_and_output_weights": config.untie_embeddings_and_output_weights,
        "apply_layernorm_1p": False, "normalization": "LayerNorm", "apply_query_key_layer_scaling": False,
        "norm_epsilon": config.layernorm_epsilon, "layernorm_epsilon": config.layernorm_epsilon,
        "attention_dropout": config.attention_dropout, "hidden_dropout": config.hidden_dropout,
        "init_method_std": config.init_method_std, "bias_gelu_fusion": config.activation == "gelu_tanh",
        "bert_binary_head": config.binary_head, "spec": None if transformer_impl == TRANSFORMER_ENGINE else ["local"],
        "transformer_impl": transformer_impl, "num_experts": None,
        "tokenizer_type": tokenizer_type, "make_vocab_size_divisible_by": config.make_vocab_size_divisible_by,
        "padded_vocab_size": padded_vocab_size, "data_parallel_random_init": False,
        "tensor_model_parallel_size": tensor_parallel, "pipeline_model_parallel_size": pipeline_parallel,
        "virtual_pipeline_model_parallel_size": None, "num_layers_per_virtual_pipeline_stage": None,
        "expert_model_parallel_size": 1, "sequence_parallel": False, "ckpt_format": "torch",
        "consumed_train_samples": 0, "skipped_train_samples": 0, "consumed_valid_samples": 0,
    }


def inexpressible(config: ModelConfig) -> Iterator[Problem]:
    """What Megatron core's BertModel does not compute."""
    if config.norm_placement != "pre":
        yield Problem("model.norm_placement", config.norm_placement, "is unknown to Megatron core's BertModel",
                      "convert a pre-LN model; post-LN models go to Hugging Face")
    if config.lm_head_activation != "gelu":
        yield Problem("model.head_activation", config.lm_head_activation,
                      "is unknown to Megatron core's BertModel, whose head has the exact GELU", "train with "
                      "head_activation gelu, or convert to Hugging Face")
    if config.position_embedding_type == "rope" and config.rotary_base != int(config.rotary_base):
        yield Problem("model.rotary_base", config.rotary_base, "is no whole number, as Megatron-LM's is",
                      "use a model with another one")


def _missing(source: MegatronSource, stated: StatedByUser) -> Iterator[Problem]:
    shapes = source.shapes()
    for name in _NEEDED:
        if name not in shapes or len(shapes[name][0]) != 2:
            yield Problem(str(source.folder), name, "is missing, or no matrix", "use a complete checkpoint of a BERT")
    heads = _heads(source, stated)
    if heads is None:
        yield Problem(str(source.folder), "args", "does not say the number of attention heads",
                      "give --num-attention-heads (16 for BERT-large) and, where it was not exact, --activation")
    elif not isinstance(heads, int) or heads < 1:
        yield Problem(str(source.folder), f"num_attention_heads {heads}", "is no number of heads", "use another one")
    if _POSITIONS not in shapes and not isinstance((source.args or {}).get("max_position_embeddings"), int):
        yield Problem(str(source.folder), _POSITIONS, "is missing", "use a complete checkpoint of a BERT")


def _problems(source: MegatronSource, args: Mapping[str, Any]) -> Iterator[Problem]:
    for name, accepted in _ACCEPTED.items():
        if (value := args.get(name)) is not None and value not in accepted:
            yield Problem(f"{source.folder}: {name}", value, "is not computed here", _REPAIR)
    if args.get("num_experts"):
        yield Problem(f"{source.folder}: num_experts", args["num_experts"], "is not computed here", _REPAIR)
    has_positions = _POSITIONS in source.shapes()
    if (kind := args.get("position_embedding_type")) and has_positions != (kind == "learned_absolute"):
        yield Problem(f"{source.folder}: position_embedding_type", kind,
                      f"does not fit a checkpoint {'with' if has_positions else 'without'} a position table",
                      "use the checkpoint as Megatron-LM wrote it")
    (rows, hidden), pieces = source.shapes()[WORD_TABLE]
    sizes = {"hidden_size": hidden, "padded_vocab_size": rows * pieces}
    if source.layout is not None:
        tensor, stages = source.layout
        sizes |= {"tensor_model_parallel_size": tensor, "model_parallel_size": tensor,
                  "pipeline_model_parallel_size": stages}
    for name, found in sizes.items():
        if (said := args.get(name)) is not None and said != found:
            yield Problem(f"{source.folder}: {name}", said, f"is what the arguments say, and the files are of {found}",
                          "copy the whole checkpoint again, without files of another one")


def _activations(
    args: Mapping[str, Any], legacy: bool, stated: StatedByUser
) -> tuple[Activation, Activation]:
    """Those of the feed-forward layers and of the head. Fused bias and GELU is the tanh approximation."""
    if not args:
        return stated.activation or "gelu", "gelu"
    if legacy and args.get("openai_gelu"):
        return "gelu_tanh", "gelu_tanh"
    return "gelu_tanh" if args.get("bias_gelu_fusion") else "gelu", "gelu"


def _heads(source: MegatronSource, stated: StatedByUser) -> Any:
    return (source.args or {}).get("num_attention_heads") or stated.num_attention_heads


def _is_untied(source: MegatronSource, args: Mapping[str, Any]) -> bool:
    """A last stage of several holds a copy of the tied table; alone, a second table is one of its own."""
    said = args.get("untie_embeddings_and_output_weights")
    if said is not None:
        return bool(said)
    return OUTPUT_WEIGHT in source.shapes() and (source.layout is None or source.layout[1] == 1)


def _kv_channels(source: MegatronSource, heads: int, hidden: int) -> int | None:
    rows = _full_rows(source, f"{_LAYER}self_attention.linear_qkv.weight")
    if rows % (3 * heads):
        raise CheckpointError.of(f"{source.folder}: num_attention_heads", heads,
                                 f"does not divide the {rows // 3} rows of the queries", "give the model's own number")
    channels = rows // (3 * heads)
    return None if channels * heads == hidden else channels


def _full_rows(source: MegatronSource, name: str) -> int:
    shape, pieces = source.shapes()[name]
    return shape[0] * pieces


def size_in(args: Mapping[str, Any], name: str, default: int) -> int:
    """The positive whole number that the arguments have for `name`, or the default."""
    value = args.get(name)
    return value if isinstance(value, int) and value > 0 else default


def _number(args: Mapping[str, Any], name: str, default: float) -> float:
    value = args.get(name)
    return float(value) if isinstance(value, int | float) else default
