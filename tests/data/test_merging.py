from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bert_ds import merge_data
from bert_ds.data import merging
from bert_ds.data.dataset_metadata import read_metadata
from bert_ds.data.document_encoder import EncoderSettings
from bert_ds.data.indexed_dataset import IndexedDatasetWriter
from bert_ds.data.merging import merge
from bert_ds.data.preprocess import PreprocessSettings, preprocess
from bert_ds.data.vocabulary import SPECIAL_TOKENS
from bert_ds.errors import DataError

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def dataset_of(folder: Path, name: str, numbers: range, *, sources: tuple[str, ...] | None = None,
               vocabulary: tuple[str, ...] = (), **encoder: object) -> str:
    """A dataset of documents of 0 to 3 sentences; `sources` preprocesses existing texts instead."""
    vocab_file = folder / f"vocab{len(vocabulary)}.txt"
    vocab_file.write_text("\n".join([*SPECIAL_TOKENS, *LETTERS, *(f"##{x}" for x in LETTERS), ".", *vocabulary]) + "\n")
    path = folder / f"{name}.jsonl"
    if sources is None:
        path.write_text("".join(json.dumps({"text": f"Cat {number}. " * (number % 4)}) + "\n" for number in numbers))
    settings = PreprocessSettings(
        inputs=tuple(f"{folder}/{source}.jsonl" for source in sources or (name,)), output_prefix=f"{folder}/{name}",
        encoder=EncoderSettings(vocab_file=str(vocab_file), **encoder))  # type: ignore[arg-type]
    return preprocess(settings)[0].prefix


@pytest.mark.parametrize("sentences_at_once", [1, 7, 1 << 18])
def test_merging_equals_preprocessing_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               sentences_at_once: int) -> None:
    monkeypatch.setattr(merging, "_SENTENCES_AT_ONCE", sentences_at_once)
    parts = [dataset_of(tmp_path, "a", range(60)), dataset_of(tmp_path, "b", range(100, 133)),
             dataset_of(tmp_path, "c", range(201, 202))]
    together = dataset_of(tmp_path, "all", range(0), sources=("a", "b", "c"))
    assert merge_data.main(["--output-prefix", f"{tmp_path}/merged", *parts]) == 0
    for suffix in (".bin", ".idx", ".json"):
        assert Path(f"{tmp_path}/merged{suffix}").read_bytes() == Path(together + suffix).read_bytes(), suffix


def test_datasets_that_do_not_fit_together_are_all_named(tmp_path: Path) -> None:
    first = dataset_of(tmp_path, "a", range(9))
    vocabulary = dataset_of(tmp_path, "b", range(9), vocabulary=("cat",))
    wide = dataset_of(tmp_path, "c", range(9), vocabulary=tuple(f"w{number}" for number in range(70_000)))
    ended = dataset_of(tmp_path, "d", range(9), append_eod=True)
    with pytest.raises(DataError) as error:
        merge([first, vocabulary, wide, ended], f"{tmp_path}/merged")
    message = str(error.value)
    assert f"{vocabulary}: vocabulary (sha256) is" in message and f"{wide}: holds int32 where" in message
    assert f"{ended}: token at the end of documents is [SEP]" in message and message.count("\n") == 4
    with pytest.raises(DataError, match="is one of the datasets"):
        merge([first, vocabulary], first)
    with pytest.raises(DataError, match="there is no file"):
        merge([first, f"{tmp_path}/nothing"], f"{tmp_path}/merged")
    assert not list(tmp_path.glob("merged*"))


def test_data_without_metadata_can_be_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = dataset_of(tmp_path, "a", range(9))
    with IndexedDatasetWriter(f"{tmp_path}/megatron", np.uint16) as writer:
        writer.add_document(np.arange(5), [2, 3])
    assert merge_data.main([first, f"{tmp_path}/megatron", "--output-prefix", f"{tmp_path}/merged"]) == 0
    assert "note: not all of them have a .json" in capsys.readouterr().out
    assert read_metadata(f"{tmp_path}/merged") is None


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    first, second = dataset_of(tmp_path, "a", range(9)), dataset_of(tmp_path, "b", range(9))
    content = bytearray(Path(f"{second}.idx").read_bytes())
    content[34] += 1
    Path(f"{second}.idx").write_bytes(content)
    with pytest.raises(DataError, match="the entry of sentence 1"):
        merge([first, second], f"{tmp_path}/merged")
