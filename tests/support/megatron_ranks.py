"""megatron-core's own BertModel on gloo ranks: loads, computes and saves checkpoints as Megatron-LM does.

H hidden, B rows, S sequence.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bert_ds.config.model import ModelConfig

VERSION = "0.16.1"


@dataclass(frozen=True)
class Rows:
    """What the model is asked, each [B, S]."""

    input_ids: Tensor
    token_type_ids: Tensor
    mask: Tensor


def compute_and_save(
    config: ModelConfig, rank_files: Path, rows: Rows, save: Path, tp: int, pp: int
) -> tuple[Tensor, Tensor | None] | None:
    """On every rank: loads `rank_files` (an iteration's folder) strictly, computes in fp64, saves in both formats.

    Returns the logits [B, S, V] and those of the binary head on the last stage, None elsewhere. `save` gets `torch` and
    `torch_dist`.
    """
    with _without_a_gpu():
        from megatron.core import dist_checkpointing, parallel_state  # noqa: PLC0415

        parallel_state.initialize_model_parallel(tp, pp)
        tensor_rank, stage = parallel_state.get_tensor_model_parallel_rank(), _stage(parallel_state)
        name = f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
        content = torch.load(rank_files / name / "model_optim_rng.pt", weights_only=False)
        rows_of_table = content["args"].padded_vocab_size
        model = _bert(config, rows_of_table, tp, pp, stage)
        model.load_state_dict(content["model"], strict=True)
        common = {"args": content["args"], "checkpoint_version": 3.0, "iteration": 500}
        path = save / "torch" / "iter_0000500" / name / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save({**common, "model": model.state_dict_for_save_checkpoint()}, path)
        folder = save / "torch_dist" / "iter_0000500"
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save({**common, "model": model.sharded_state_dict()}, str(folder))
        return _logits(model.double().eval(), rows, stage, pp, parallel_state)


def _bert(config: ModelConfig, rows_of_table: int, tp: int, pp: int, stage: int) -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec  # noqa: PLC0415
    from megatron.core.models.bert.bert_model import BertModel  # noqa: PLC0415
    from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: PLC0415

    assert config.lm_head_activation == "gelu"
    settings = TransformerConfig(
        num_layers=config.num_layers, hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads,
        kv_channels=config.head_dim, ffn_hidden_size=config.ffn_size, layernorm_epsilon=config.layernorm_epsilon,
        bias_activation_fusion=config.activation == "gelu_tanh", hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
        use_cpu_initialization=True)
    return BertModel(
        settings, config.num_token_types, bert_layer_local_spec, rows_of_table, config.max_position_embeddings,
        pre_process=stage == 0, post_process=stage == pp - 1, add_binary_head=config.binary_head, parallel_output=False,
        share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
        position_embedding_type=config.position_embedding_type, rotary_percent=config.rotary_percent)


@torch.no_grad()
def _logits(
    model: Any, rows: Rows, stage: int, stages: int, parallel_state: Any
) -> tuple[Tensor, Tensor | None] | None:
    if stage > 0:
        hidden_SBH = torch.empty(rows.mask.size(1), rows.mask.size(0), model.config.hidden_size, dtype=torch.float64)
        dist.recv(hidden_SBH, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden_SBH)
    token_types = rows.token_type_ids if stage == 0 and model.add_binary_head else None
    outputs = model(rows.input_ids, rows.mask, token_types)
    if stage == stages - 1:
        logits, binary = outputs
        return logits, binary
    dist.send(outputs.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return None


def _stage(parallel_state: Any) -> int:
    return int(parallel_state.get_pipeline_model_parallel_rank())


@contextlib.contextmanager
def _without_a_gpu() -> Any:
    """megatron-core asks CUDA for its device, its generators, its memory and to wait; a CPU needs none of it."""
    # It saves with the help of processes of its own, which the ranks of a test otherwise may not start.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
        torch.Tensor.cuda = lambda self, *_: self  # type: ignore[assignment, method-assign]
        from megatron.core import tensor_parallel  # noqa: PLC0415

        class NoGenerators:
            def fork(self, *_: Any) -> Any:
                return contextlib.nullcontext()

        tensor_parallel.get_cuda_rng_tracker = NoGenerators
        yield
