"""Files of `torch.save`, read without executing them.

A pickle is a program: whatever callable it names, it may call. Here the names of torch's own rebuilding functions are
answered with functions of this file; all other names of libraries that Megatron-LM's checkpoints mention become
`Inert` data, `argparse.Namespace` among them; any further name is refused. Tensors stay on the disk until they are
asked for.

Both containers (torch/serialization.py) are understood: the zip archive, and the one before torch 1.6: pickles of a
magic number, a protocol version, facts of the machine, the object and the keys of its storages, then the storages.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from bert_ds.errors import CheckpointError

_OLD_MAGIC, _OLD_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_ZIP_MAGIC = b"PK\x03\x04"
_ZIP_LOCAL_HEADER = 30
_DAMAGED = (pickle.UnpicklingError, zipfile.BadZipFile, EOFError, ValueError, KeyError, IndexError, TypeError,
            AttributeError, struct.error, RecursionError, OverflowError, MemoryError, NotImplementedError)

_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_INERT_PACKAGES = frozenset({
    "argparse", "collections", "_codecs", "copyreg", "copy_reg", "dataclasses", "datetime", "enum", "functools", "_io",
    "io", "pathlib", "signal", "types", "typing", "apex", "megatron", "numpy", "torch", "transformer_engine",
})
_INERT_BUILTINS = frozenset({
    "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "getattr", "int", "list", "object", "range",
    "set", "slice", "str", "tuple",
})


class Inert:
    """An object of a class, or the result of a call, that the file names and nobody has looked up: only data."""

    source = ""
    """The name in the file."""
    args: tuple[Any, ...]
    """What it would have been called with."""
    state: Any
    """What its attributes would have been set from, usually a dict of them; None without any."""
    items: list[Any]
    """What would have been appended or set."""

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        made = super().__new__(cls)
        made.args, made.state, made.items = args, None, []
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Sequence[Any]) -> None:
        self.items.extend(items)

    def add(self, item: Any) -> None:
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


@dataclass(frozen=True)
class Region:
    """A file, or a part of one."""

    path: Path
    start: int
    length: int

    @classmethod
    def whole(cls, path: Path) -> Region:
        return cls(path, 0, path.stat().st_size)

    def open(self) -> BinaryIO:
        """The region as a file of its own."""
        return io.BufferedReader(_Window(self))


class _Window(io.RawIOBase):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self._file, self._region, self._position = open(region.path, "rb"), region, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._region.length)[whence]
        if self._position < 0:
            raise ValueError("a position before the start")
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._region.length - self._position))
        self._file.seek(self._region.start + self._position)
        read = self._file.readinto(memoryview(buffer)[:wanted])
        self._position += read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass
class _Storage:
    """Numbers of one type in a row, somewhere in the file."""

    dtype: torch.dtype
    numel: int
    start: int = -1
    """First byte, counted from the start of the region; the old container says so only after the object."""
    crc32: int = 0
    """Checksum of its bytes; 0 where the file has none."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is still on the disk."""

    region: Region = field(repr=False)
    storage: _Storage = field(repr=False)
    offset: int
    """First element in the storage."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def row(self, index: int) -> StoredTensor:
        """One index of the first dimension."""
        return replace(self, offset=self.offset + index * self.stride[0], shape=self.shape[1:], stride=self.stride[1:])

    def read(self) -> Tensor:
        """The tensor in memory of its own.

        Raises:
            CheckpointError: the file ends before the tensor does.
        """
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        bytes_before, count = self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize
        if self.offset < 0 or min(self.stride, default=0) < 0 \
                or bytes_before + count > self.storage.numel * self.storage.dtype.itemsize:
            raise _damaged(self.region.path, "a tensor reaches beyond its storage")
        if self.storage.start + bytes_before + count > self.region.length:
            raise _damaged(self.region.path, "it ends within a tensor")
        with _reading(self.region.path), self.region.open() as file:
            file.seek(self.storage.start + bytes_before)
            content = bytearray(file.read(count))
            if count == self.storage.numel * self.storage.dtype.itemsize:
                _check_crc(content, self.storage.crc32)
        return torch.frombuffer(content, dtype=self.dtype).as_strided(self.shape, self.stride).contiguous()


def load_torch_file(source: Path | Region) -> Any:
    """The object that `torch.save` wrote, its tensors as StoredTensor.

    Raises:
        CheckpointError: the file cannot be read, is no such file, or names what no checkpoint needs.
    """
    with _reading(source if isinstance(source, Path) else source.path):
        region = Region.whole(source) if isinstance(source, Path) else source
        with region.open() as file:
            magic = file.read(len(_ZIP_MAGIC))
            file.seek(0)
            return (_load_zip if magic == _ZIP_MAGIC else _load_old)(file, region)


def load_plain_pickle(path: Path) -> Any:
    """The object of a pickle that holds no tensors, everything but containers and numbers as Inert.

    Raises:
        CheckpointError: as load_torch_file.
    """
    with _reading(path), open(path, "rb") as file:
        return _Unpickler(file, None, {}).load()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns whatever reading a file can fail with into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError.of("checkpoint", path, f"cannot be read ({error.strerror or error})",
                                 "check the path and its permissions") from error
    except _DAMAGED as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _load_zip(file: BinaryIO, region: Region) -> Any:
    with zipfile.ZipFile(file) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        names = [name for name in entries if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError("it is a zip archive without data.pkl")
        top = names[0].removesuffix("data.pkl")
    if f"{top}byteorder" in entries and _content(file, entries[f"{top}byteorder"]) != b"little":
        raise ValueError("its numbers are not little-endian")
    storages: dict[str, _Storage] = {}
    result = _Unpickler(io.BytesIO(_content(file, entries[names[0]])), region, storages).load()
    for key, storage in storages.items():
        entry = entries[f"{top}data/{key}"]
        if entry.file_size != storage.numel * storage.dtype.itemsize:
            raise ValueError(f"storage {key} is not what the pickle says")
        storage.start, storage.crc32 = _first_byte(file, entry), entry.CRC
    return result


def _content(file: BinaryIO, entry: zipfile.ZipInfo) -> bytes:
    """The bytes of an entry. zipfile would refuse those without a checksum, which torch.save may be told to omit."""
    file.seek(_first_byte(file, entry))
    content = file.read(entry.file_size)
    _check_crc(content, entry.CRC)
    return content


def _check_crc(content: bytes | bytearray, crc32: int) -> None:
    if crc32 and zlib.crc32(content) != crc32:
        raise ValueError("its content is not what was written (CRC-32)")


def _first_byte(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Where the data of an entry begin: after its local header, whose extra field only the header itself knows."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename} is compressed")
    file.seek(entry.header_offset)
    header = file.read(_ZIP_LOCAL_HEADER)
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    return int(entry.header_offset + _ZIP_LOCAL_HEADER + name_length + extra_length)


def _load_old(file: BinaryIO, region: Region) -> Any:
    storages: dict[str, _Storage] = {}

    def load() -> Any:
        return _Unpickler(file, region, storages).load()

    if load() != _OLD_MAGIC or load() != _OLD_PROTOCOL:
        raise ValueError("it is no file of torch.save")
    if not load().get("little_endian", True):
        raise ValueError("its numbers are not little-endian")
    result = load()
    for key in load():
        (numel,) = struct.unpack("<q", file.read(8))
        if storages[key].numel > numel:
            raise ValueError(f"storage {key} is shorter than its tensors")
        storages[key].start = file.tell()
        file.seek(numel * storages[key].dtype.itemsize, io.SEEK_CUR)
    return result


class _Unpickler(pickle._Unpickler):
    """Looks nothing up: see the head of this file.

    Python's own, not the one in C, which makes room for whatever number of objects a damaged file speaks of.
    """

    def __init__(self, file: BinaryIO, region: Region | None, storages: dict[str, _Storage]) -> None:
        super().__init__(file, encoding="latin1")
        self._region, self._storages = region, storages
        self._inert: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if (known := self._known(module, name)) is not None:
            return known
        if module.partition(".")[0] in _INERT_PACKAGES \
                or (module in {"builtins", "__builtin__"} and name in _INERT_BUILTINS):
            return self._inert.setdefault(full_name, type(name, (Inert,), {"source": full_name}))
        raise pickle.UnpicklingError(f"it names {full_name}, which no checkpoint needs and which may do harm")

    def _known(self, module: str, name: str) -> Any:
        """What tensors and state dicts are made with; None for every other name."""
        if module == "torch._utils" and name.startswith("_rebuild_"):
            return self._rebuilder(name)
        if module in {"torch", "torch.storage"} and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        return {("collections", "OrderedDict"): OrderedDict, ("torch", "Size"): tuple}.get((module, name))

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, numel, *view = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or any(part is not None for part in view):
            raise ValueError(f"it refers to {kind!r}, not to a storage")
        return self._storages.setdefault(str(key), _Storage(dtype, numel))

    def _rebuilder(self, name: str) -> Callable[..., Any]:
        known: dict[str, Callable[..., Any]] = {
            "_rebuild_tensor": self._tensor, "_rebuild_tensor_v2": self._tensor,
            "_rebuild_tensor_v3": lambda *parts: self._tensor(*parts[:4], dtype=parts[6]),
            "_rebuild_parameter": lambda stored, *_: stored, "_rebuild_parameter_with_state": lambda stored, *_: stored,
        }
        if name not in known:
            raise pickle.UnpicklingError(f"it holds a kind of tensor that is not read here (torch._utils.{name})")
        return known[name]

    def _tensor(
        self, storage: _Storage, offset: int, shape: Sequence[int], stride: Sequence[int], *_: Any,
        dtype: torch.dtype | None = None,
    ) -> StoredTensor:
        if self._region is None:
            raise ValueError("it holds tensors")
        return StoredTensor(self._region, storage, offset, tuple(shape), tuple(stride), dtype or storage.dtype)


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError.of("checkpoint", path, f"cannot be used: {reason}",
                              "use a file that torch.save wrote for Megatron-LM, as it was written")
