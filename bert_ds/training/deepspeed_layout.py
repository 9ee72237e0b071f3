"""DeepSpeed's own checkpoint of a run's last state, for tools that read it.

    DIR/latest
    DIR/global_step20/layer_XX-model_YY-model_states.pt           weights of layer XX, tensor-parallel rank YY
    DIR/global_step20/mp_rank_NN_model_states.pt                  counters, configuration, universal_checkpoint_info
    DIR/global_step20/*zero_pp_rank_D_mp_rank_NN_optim_states.pt  masters and moments of data-parallel rank D

`universal_checkpoint_info` says how each parameter is cut (deepspeed/checkpoint/constants.py), so that
`python -m deepspeed.checkpoint.ds_to_universal` merges the files of any layout. DeepSpeed's zero_to_fp32 does not read
checkpoints of pipelines.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from bert_ds.checkpoint import files
from bert_ds.checkpoint.run_config import run_config_as_dict
from bert_ds.compat import quiet
from bert_ds.config.run import RunConfig
from bert_ds.data.vocabulary import Vocabulary
from bert_ds.errors import ConfigError
from bert_ds.model.bert import LayerDef
from bert_ds.parallel.context import ParallelContext
from bert_ds.parallel.sharding import sharding_of
from bert_ds.training.coordination import Coordinator
from bert_ds.training.pipeline import BertPipeline

log = logging.getLogger(__name__)
_INFO_VERSION = 0.4
_ROW_DIM = 1


def check_folder(folder: Path) -> None:
    """Refuses a folder that holds something.

    Raises:
        ConfigError: there is something in it, or it cannot be read.
    """
    with files.os_errors_reported("output.save_deepspeed", folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError.of("output.save_deepspeed", folder, "exists and is not empty", "choose another folder")


def save_deepspeed_layout(
    run: RunConfig, ctx: ParallelContext, coordinator: Coordinator, engine: Any, vocabulary: Vocabulary
) -> None:
    """Writes DIR/global_stepN; called by every rank.

    Raises:
        CheckpointError: the disk refuses.
    """
    assert run.output.save_deepspeed is not None
    folder = Path(run.output.save_deepspeed)
    pipeline: BertPipeline = engine.module
    # DeepSpeed's engine looks for this attribute of the module and writes it into every file of a rank.
    pipeline.universal_checkpoint_info = universal_checkpoint_info(pipeline.layer_defs, run.model.padded_vocab_size)
    client_state = {
        "iteration": engine.global_steps, "consumed_samples": engine.global_samples,
        "bert_ds_config": run_config_as_dict(run), "vocabulary_sha256": vocabulary.sha256,
    }

    def save() -> None:
        with files.os_errors_reported("output.save_deepspeed", folder), quiet():
            engine.save_checkpoint(str(folder), tag=f"global_step{engine.global_steps}", client_state=client_state)

    coordinator.guarded(save)
    coordinator.barrier(f"writing {folder}")
    if ctx.rank == 0:
        log.info("saved DeepSpeed's own checkpoint in %s, for python -m deepspeed.checkpoint.ds_to_universal", folder)


def universal_checkpoint_info(layers: Iterable[LayerDef], padded_vocab_size: int) -> dict[str, Any]:
    """How tensor parallelism cuts each parameter, by patterns of the names that DeepSpeed gives them.

    Parameters that no pattern names are cut along dimension 0. The vocabulary's padding does not depend on the layout,
    so nothing is said of it.
    """
    replicated: list[str] = []
    rows: list[str] = []
    for layer in layers:
        if layer.second_use is not None:
            continue
        prefix = rf"tied_modules\.{layer.tied_key}" if layer.tied_key else r"\d+"
        with torch.device("meta"):
            module = layer.build()
        for name, parameter in module.named_parameters():
            pattern = rf"{prefix}\.{re.escape(name)}$"
            sharding = sharding_of(parameter)
            if sharding.dim is None:
                replicated.append(pattern)
            elif sharding.dim == _ROW_DIM:
                rows.append(pattern)
    return {
        "universal_checkpoint_version": _INFO_VERSION,
        "tp_replicated_parameter_patterns": list(dict.fromkeys(replicated)),
        "parameter_with_row_parallelism_patterns": list(dict.fromkeys(rows)),
        "padded_vocab_size": padded_vocab_size,
        "original_vocab_size": padded_vocab_size,
    }
