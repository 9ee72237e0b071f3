"""Model folders as `transformers` writes them, small, with weights large enough that every detail counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoint.saved_checkpoints import TOKENS, write_vocabulary_file

SHAPE = dict(vocab_size=len(TOKENS), hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
             max_position_embeddings=20, layer_norm_eps=1e-3)


def hf_model(architecture: str, **changes: Any) -> Any:
    """A model of this class of `transformers` with random weights."""
    import transformers  # noqa: PLC0415

    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**{**SHAPE, **changes}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.3, generator=generator)
    return model.eval()


def save_model(folder: Path, model: Any, *, lower_case: bool | None = True) -> Path:
    """The folder with weights, config.json, vocab.txt and tokenizer_config.json."""
    model.save_pretrained(folder)
    write_vocabulary_file(folder / "vocab.txt")
    if lower_case is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower_case}))
    return folder


def replace_weights(folder: Path, tensors: dict[str, Tensor], file: str = "model.safetensors") -> None:
    """Puts `tensors` in place of the folder's weights."""
    from safetensors.torch import save_file  # noqa: PLC0415

    (folder / "model.safetensors").unlink(missing_ok=True)
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
    else:
        torch.save(tensors, folder / file)


def change_config(folder: Path, **changes: object) -> None:
    """Changes config.json; a value of None takes the key out."""
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
