import errno
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from bert_ds.data import index_cache
from bert_ds.data.index_cache import load_or_build
from bert_ds.errors import DataError

ARRAY = np.arange(300, dtype=np.uint32).reshape(-1, 3)


class Builder:
    """Counts how often the array had to be computed."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> np.ndarray:
        self.calls += 1
        return ARRAY


def load(folder: Path, builder: Builder, seed: int = 1) -> np.ndarray:
    return load_or_build(folder / "cache", "train", {"seed": seed}, builder)


def test_an_array_is_built_once_for_each_description(tmp_path: Path) -> None:
    builder = Builder()
    for _ in range(3):
        cached = load(tmp_path, builder)
        assert (cached == ARRAY).all()
        assert cached.dtype == ARRAY.dtype
        assert not cached.flags.writeable
    assert builder.calls == 1
    load(tmp_path, builder, seed=2)
    assert builder.calls == 2
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".json", ".json", ".npy", ".npy"]


@pytest.mark.parametrize("suffix", [".npy", ".json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "remove"])
def test_a_damaged_file_is_built_again(tmp_path: Path, suffix: str, damage: str) -> None:
    builder = Builder()
    load(tmp_path, builder)
    [path] = (tmp_path / "cache").glob(f"*{suffix}")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-3] ^= 1
        path.write_bytes(content)
    elif damage == "remove":
        path.unlink()
    else:
        os.truncate(path, len(content) // 2 if damage == "cut" else 0)
    assert (load(tmp_path, builder) == ARRAY).all()
    assert builder.calls == 2


def test_the_files_of_another_array_are_not_taken(tmp_path: Path) -> None:
    builder = Builder()
    load(tmp_path, builder)
    for path in (tmp_path / "cache").iterdir():
        path.rename(path.with_stem("other"))
    load(tmp_path, builder)
    [mine] = (path for path in (tmp_path / "cache").glob("*.npy") if path.stem != "other")
    for suffix in (".npy", ".json"):
        (tmp_path / "cache" / f"other{suffix}").replace(mine.with_suffix(suffix))
    load_or_build(tmp_path / "cache", "train", {"seed": 3}, builder)
    assert builder.calls == 3


def test_a_job_that_finishes_later_leaves_the_file_that_another_has_mapped(tmp_path: Path) -> None:
    """On a network file system a replaced file is gone for the machines that have it mapped."""
    found: dict[str, object] = {}

    def slow() -> np.ndarray:
        found["mapped"] = load(tmp_path, Builder())
        [path] = (tmp_path / "cache").glob("*.npy")
        found["inode"] = path.stat().st_ino
        return ARRAY

    assert (load(tmp_path, slow) == ARRAY).all()  # type: ignore[arg-type]
    [path] = (tmp_path / "cache").glob("*.npy")
    assert path.stat().st_ino == found["inode"]
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_jobs_that_build_at_once_all_get_the_array(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as pool:
        assert pool.map(load_in_a_process, [str(tmp_path)] * 24, chunksize=1) == [True] * 24
    assert len(list((tmp_path / "cache").iterdir())) == 2


def load_in_a_process(folder: str) -> bool:
    return bool((load(Path(folder), Builder()) == ARRAY).all())


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT])
def test_a_file_that_another_machine_has_just_replaced_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(index_cache, "_SECONDS_BETWEEN_ATTEMPTS", 0.01)
    real, failures = np.load, iter([OSError(code, os.strerror(code))] * 2)

    def fails_twice(*arguments: object, **options: object) -> np.ndarray:
        for failure in failures:
            raise failure
        return real(*arguments, **options)

    monkeypatch.setattr(np, "load", fails_twice)
    assert (load(tmp_path, Builder()) == ARRAY).all()


def test_a_file_system_without_links_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    builder = Builder()
    assert (load(tmp_path, builder) == ARRAY).all() and (load(tmp_path, builder) == ARRAY).all()
    assert builder.calls == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DataError, match="--data-cache-path"):
        load(tmp_path, Builder())


def test_a_failing_builder_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> np.ndarray:
        raise DataError.of("--data-path", "x", "has nothing", "give more")

    with pytest.raises(DataError, match="has nothing"):
        load_or_build(tmp_path / "cache", "train", {}, fail)
    assert not (tmp_path / "cache").exists()
