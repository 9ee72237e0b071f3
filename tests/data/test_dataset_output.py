from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_ds.data.dataset_metadata import DatasetMetadata, read_metadata
from bert_ds.data.dataset_output import dataset_writers, publish
from bert_ds.data.indexed_dataset import IndexedDataset
from bert_ds.errors import DataError

METADATA = DatasetMetadata(
    vocab_file="v", vocab_size=9, vocab_sha256="00", tokenizer_type="BertWordPieceCase", max_word_length=100,
    sentence_splitter=None, sentence_splitter_version="", document_end_token=None, inputs=("a",), json_key="text",
    documents=1, documents_of_two_sentences=0, sentences=1, tokens=3, unknown_tokens=0, skipped_records=0)


def write(folder: Path, token: int) -> None:
    with dataset_writers([f"{folder}/a", f"{folder}/b"], np.dtype(np.uint16)) as writers:
        for writer in writers:
            writer.add_document(np.full(token, token), [token])
        publish(writers, [METADATA.__class__(**{**vars(METADATA), "tokens": token})] * 2)


def whole_datasets(folder: Path) -> list[int]:
    """Tokens of each dataset that looks finished, which must agree with its metadata."""
    found = []
    for index in folder.glob("*.idx"):
        prefix = str(index.with_suffix(""))
        tokens = len(IndexedDataset(prefix).tokens)
        metadata = read_metadata(prefix)
        assert metadata is not None and metadata.tokens == tokens
        found.append(tokens)
    return found


@pytest.mark.parametrize("older", [False, True])
def test_a_crash_at_any_step_leaves_whole_datasets_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        older: bool) -> None:
    """Every call that changes a folder or syncs a file is, in its turn, the last one of the process."""
    class Died(BaseException):
        pass

    seen = set[tuple[int, ...]]()
    for last_step in itertools.count():
        folder = tmp_path / f"{last_step}"
        folder.mkdir()
        if older:
            write(folder, 3)
        steps = itertools.count()

        def counted(call: Any, at: Any = steps, last: int = last_step) -> Any:
            def step(*arguments: Any, **named: Any) -> Any:
                if next(at) >= last:
                    raise Died
                return call(*arguments, **named)
            return step

        with monkeypatch.context() as patched:
            for owner, name in ((Path, "unlink"), (Path, "replace"), (os, "fsync")):
                patched.setattr(owner, name, counted(getattr(owner, name)))
            try:
                write(folder, 5)
            except Died:
                seen.add(tuple(sorted(whole_datasets(folder))))
                continue
        assert whole_datasets(folder) == [5, 5]
        break
    assert last_step > 10
    assert seen == ({(3, 3), (3,), (3, 5), (5,), (5, 5)} if older else {(), (5,), (5, 5)})


def test_two_processes_do_not_write_the_same_dataset(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    with dataset_writers([prefix], np.dtype(np.uint16)) as (writer,):
        with pytest.raises(DataError, match="another process is writing it"), \
                dataset_writers([prefix], np.dtype(np.uint16)):
            pass
        writer.add_document(np.array([1, 2]), [2])
        publish([writer], [None])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    with dataset_writers([prefix], np.dtype(np.uint16)):
        pass
    assert len(IndexedDataset(prefix)) == 1
    assert not list(tmp_path.glob("*.partial"))
