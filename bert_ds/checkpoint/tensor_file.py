"""Safetensors files written tensor by tensor, so that a file may be far larger than memory.

The container (documentation of the safetensors library, "Format"): the header's length as an unsigned 64-bit
little-endian number, the header as JSON `{name: {dtype, shape, data_offsets}, "__metadata__": {str: str}}` padded with
spaces to a multiple of 8, then the data. The library reads these files; its own writer needs every tensor at once.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bert_ds.checkpoint.files import Buffer, Digest, write_durably

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


@dataclass(frozen=True)
class TensorSpec:
    """What the header says of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensor_file(
    path: Path, specs: Sequence[TensorSpec], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> Digest:
    """Writes `tensors`, one for each of `specs` and in that order, and syncs the file.

    Only one tensor needs to exist at a time; each is brought to the CPU when its turn comes.
    """
    return write_durably(path, _buffers(specs, tensors, metadata))


def _buffers(
    specs: Sequence[TensorSpec], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> Iterator[Buffer]:
    yield _header(specs, metadata)
    for spec, tensor in zip(specs, tensors, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype), spec.name
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield content.data


def _header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.bytes],
        }
        offset += spec.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
