"""A checksum file beside a dataset, to tell whether it arrived whole on another machine.

`<prefix>.sha256` is what `sha256sum` writes: one line a file with its digest and its name without the folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from bert_ds.data.atomic_file import atomic_text_file
from bert_ds.errors import DataError, Problem, raise_if_any

_SUFFIXES = (".bin", ".idx", ".json")
_BUFFER_BYTES = 1 << 20
_SETTING = "PREFIX"


def checksum_file(prefix: str) -> Path:
    return Path(f"{prefix}.sha256")


def write_checksums(prefix: str) -> tuple[str, ...]:
    """Writes the checksums of all files of a dataset and returns their names. Raises DataError."""
    paths = [path for path in map(Path, (prefix + suffix for suffix in _SUFFIXES)) if path.exists()]
    try:
        lines = [f"{_digest(path)}  {path.name}\n" for path in paths]
        with atomic_text_file(checksum_file(prefix)) as file:
            file.writelines(lines)
    except OSError as error:
        raise DataError.of(_SETTING, prefix, f"its checksums cannot be written ({error})",
                           "make its folder readable and writable") from error
    return tuple(path.name for path in paths)


def verify_checksums(prefix: str) -> tuple[str, ...]:
    """Names of the files that are as they were when the checksums were written; raises DataError for all others."""
    path = checksum_file(prefix)
    try:
        lines = [line.split("  ", 1) for line in path.read_text(encoding="utf-8").splitlines()]
        expected = {name: digest for digest, name in lines}
    except (OSError, ValueError) as error:
        raise DataError.of(_SETTING, prefix, f"{path} cannot be read ({error})",
                           "write it where the files are known to be good: python -m bert_ds.inspect_data PREFIX "
                           "--checksum") from None
    raise_if_any(DataError, _differences(path, expected))
    return tuple(expected)


def _differences(path: Path, expected: dict[str, str]) -> Iterator[Problem]:
    for name, digest in expected.items():
        try:
            found = _digest(path.with_name(name))
        except OSError as error:
            yield Problem(_SETTING, path.with_name(name), f"cannot be read ({error.strerror})", "copy it again")
            continue
        if found != digest:
            yield Problem(_SETTING, path.with_name(name), f"has changed: its sha256 is {found[:12]}... where "
                          f"{path.name} says {digest[:12]}...", "copy it again")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while content := file.read(_BUFFER_BYTES):
            digest.update(content)
    return digest.hexdigest()
