"""Opens an exported model with Hugging Face transformers: from its folder, without the network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from bert_ds.convert.hf_model import CONFIG_FILE
from bert_ds.errors import ConfigError

_SETTING = "MODEL"
_ENCODER = ("embeddings.", "encoder.")
"""How the weights of the encoder begin in every BERT of transformers; all others belong to a head or the pooler."""


def open_export(folder: Path, auto_class: str, *, new_head: bool, **changes: object) -> tuple[Any, Any]:
    """Tokenizer and model, in fp32, of a folder that `python -m bert_ds.convert to-hf` wrote, or of any like it.

    Args:
        folder: where the export lies.
        auto_class: class of transformers that loads the model, such as AutoModelForMaskedLM.
        new_head: whether weights outside the encoder may be missing; they are then drawn from torch's generator.
        changes: settings of config.json to be replaced, such as num_labels.

    Raises:
        ConfigError: transformers is not installed, or the folder holds no such model.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # noqa: TID251 - transformers takes this switch from nowhere else
    try:
        import transformers  # noqa: PLC0415
    except ImportError:
        raise ConfigError.of("transformers", "not installed", "the exported model is loaded by it",
                             "pip install transformers") from None
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError.of(_SETTING, folder, f"holds no {CONFIG_FILE}",
                             "give the folder that `python -m bert_ds.convert to-hf` wrote")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    repair = "export it again with `python -m bert_ds.convert to-hf`"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, found = getattr(transformers, auto_class).from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True, **changes)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError.of(_SETTING, folder, f"is no model that transformers' {auto_class} can load ({error})",
                             repair) from error
    missing = sorted(name for name in found["missing_keys"] if not new_head or _is_of_encoder(name, model))
    if missing:
        raise ConfigError.of(_SETTING, folder, f"lacks {len(missing)} weights of {type(model).__name__}, {missing[0]} "
                             "for one", f"{repair}, or give a model that was trained for this")
    return tokenizer, model.eval()


def _is_of_encoder(name: str, model: Any) -> bool:
    return name.removeprefix(f"{model.base_model_prefix}.").startswith(_ENCODER)
