"""The weights in a Hugging Face model folder, tensor by tensor: safetensors or pickles, whole or in shards.

Pickles are read by PyTorch's weights-only reader, which builds tensors and executes nothing.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bert_ds.checkpoint import files
from bert_ds.errors import CheckpointError

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
_OF_OTHER_PROGRAMS = ("tf_model.h5", "flax_model.msgpack", "model.ckpt.index", "bert_model.ckpt.index")
_READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, and its shape."""

    file: Path
    name: str
    """Its name in the file."""
    shape: tuple[int, ...]


class ModelWeights:
    """Reads the tensors of a model folder. A pickle's tensors are mapped from the file where its format allows that."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError when there are no weights, or a file is missing, damaged or more than tensors."""
        self.files = tuple(_weight_files(folder))
        self._pickled: dict[Path, dict[str, Tensor]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for file in self.files:
            with files.os_errors_reported("MODEL", file):
                for stored in self._tensors_of(file):
                    if stored.name in self.tensors:
                        raise CheckpointError.of("MODEL", file, f"holds {stored.name}, which "
                                                 f"{self.tensors[stored.name].file.name} holds too",
                                                 "remove the files of another export from the folder")
                    self.tensors[stored.name] = stored

    def read(self, name: str) -> Tensor:
        """The tensor in fp32, in memory of its own.

        Raises:
            CheckpointError: it is not made of floating-point numbers, or the file cannot be read.
        """
        stored = self.tensors[name]
        with files.os_errors_reported("MODEL", stored.file):
            tensor = self._load(stored)
        if tensor.dtype not in _READABLE:
            raise CheckpointError.of("MODEL", stored.file, f"{name} is of type {tensor.dtype}",
                                     "use a model that is not quantized")
        return tensor.to(torch.float32, copy=True)

    def _tensors_of(self, file: Path) -> Iterator[StoredTensor]:
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():
                        yield StoredTensor(file, name, tuple(opened.get_slice(name).get_shape()))
            except SafetensorError as error:
                raise CheckpointError.of("MODEL", file, f"is no whole safetensors file ({error})",
                                         "copy it again") from error
            return
        self._pickled[file] = _read_pickle(file)
        for name, tensor in self._pickled[file].items():
            yield StoredTensor(file, name, tuple(tensor.shape))

    def _load(self, stored: StoredTensor) -> Tensor:
        if stored.file in self._pickled:
            return self._pickled[stored.file][stored.name]
        with safe_open(stored.file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(stored.name)
            return tensor


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder.

    Raises:
        CheckpointError: the file is missing or is no JSON object.
    """
    with files.os_errors_reported("MODEL", path):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError.of("MODEL", path, f"is not JSON ({error})", "copy it again") from None
    if not isinstance(content, dict):
        raise CheckpointError.of("MODEL", path, "holds no object", "copy it again")
    return content


def _weight_files(folder: Path) -> Iterator[Path]:
    """Safetensors before pickles, a whole file before shards, as `transformers` looks for them."""
    for name in (SAFETENSORS, PICKLE):
        if (folder / name).is_file():
            yield folder / name
            return
        index = folder / f"{name}.index.json"
        if index.is_file():
            yield from _shards(index)
            return
    others = [name for name in _OF_OTHER_PROGRAMS if (folder / name).is_file()]
    reason = f"holds {' and '.join(others)} only" if others else f"holds neither {SAFETENSORS} nor {PICKLE}"
    raise CheckpointError.of("MODEL", folder, reason, "give a folder with weights for PyTorch, as save_pretrained "
                             "of transformers writes it")


def _shards(index: Path) -> Iterator[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError.of("MODEL", index, "names no files (weight_map)", "copy it again")
    for name in sorted({str(name) for name in weight_map.values()}):
        if PurePosixPath(name).name != name:
            raise CheckpointError.of("MODEL", index, f"names {name}, which is not in the folder", "copy it again")
        if not (index.parent / name).is_file():
            raise CheckpointError.of("MODEL", index.parent / name, f"is missing; {index.name} names it",
                                     "copy the whole folder")
        yield index.parent / name


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):
            # The format before PyTorch 1.6 cannot be mapped.
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError.of("MODEL", file, f"holds more than tensors, and is not executed ({reason})",
                                 f"save the model as {SAFETENSORS} where you trust the file") from error
    except (RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError.of("MODEL", file, f"cannot be read ({error})", "copy it again") from error
    if not isinstance(content, dict) or not _all_tensors(content.values()):
        raise CheckpointError.of("MODEL", file, "is no state dict, names with their tensors",
                                 "save model.state_dict() alone")
    return {str(name): tensor for name, tensor in content.items()}


def _all_tensors(values: Iterable[object]) -> bool:
    return all(isinstance(value, Tensor) for value in values)
