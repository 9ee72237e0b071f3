import hashlib
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_ds.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, dtype_for_vocab
from bert_ds.errors import DataError

HEADER_BYTES = 34


def write_three_documents(prefix: str) -> None:
    """Sentences [1 2 3], [4] | none | [5 6]."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document(np.array([1, 2, 3, 4]), [3, 1])
        writer.add_document(np.array([], np.int64), [])
        writer.add_document(np.array([5, 6], np.uint16), np.array([2]))


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    prefix = str(tmp_path / "corpus_text_sentence")
    write_three_documents(prefix)
    return prefix


def index_bytes(code: int, lengths: list[int], pointers: list[int], documents: list[int]) -> bytes:
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    return header + b"".join(np.array(values, dtype).tobytes()
                             for values, dtype in ((lengths, "<i4"), (pointers, "<i8"), (documents, "<i8")))


def test_files_are_megatrons_byte_for_byte(prefix: str) -> None:
    assert Path(f"{prefix}.bin").read_bytes() == np.arange(1, 7, dtype="<u2").tobytes()
    assert Path(f"{prefix}.idx").read_bytes() == index_bytes(8, [3, 1, 2], [0, 6, 8], [0, 2, 2, 3])
    assert sorted(os.listdir(Path(prefix).parent)) == ["corpus_text_sentence.bin", "corpus_text_sentence.idx"]


def test_reader_gives_back_what_was_written(prefix: str) -> None:
    dataset = IndexedDataset(prefix)
    dataset.verify()
    assert [sentence.tolist() for sentence in dataset] == [[1, 2, 3], [4], [5, 6]]
    assert (len(dataset), dataset.num_documents, dataset.dtype) == (3, 3, np.uint16)
    assert dataset.sequence_lengths.dtype == np.int32
    assert dataset.sequence_pointers.dtype == np.int64
    assert dataset.document_indices.tolist() == [0, 2, 2, 3]


def test_sampled_tokens_come_from_the_whole_file(prefix: str, tmp_path: Path) -> None:
    assert IndexedDataset(prefix).sampled_tokens().tolist() == [1, 2, 3, 4, 5, 6]
    with IndexedDatasetWriter(str(tmp_path / "long"), np.int32) as writer:
        writer.add_document(np.arange(10_000), [10_000])
    sampled = IndexedDataset(str(tmp_path / "long")).sampled_tokens(blocks=5, tokens_of_block=100)
    assert sampled.tolist() == [start + i for start in (0, 2475, 4950, 7425, 9900) for i in range(100)]


def test_many_documents_at_once_give_the_same_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    per_document = rng.integers(0, 6, 2000)
    lengths = rng.integers(1, 9, per_document.sum())
    tokens = rng.integers(0, 70000, lengths.sum())
    with IndexedDatasetWriter(str(tmp_path / "at_once"), np.int32) as writer:
        writer.add_documents(tokens, lengths, per_document)
    with IndexedDatasetWriter(str(tmp_path / "one_by_one"), np.int32) as writer:
        sentence = token = 0
        for count in per_document:
            document_lengths = lengths[sentence:sentence + count]
            size = document_lengths.sum()
            writer.add_document(tokens[token:token + size], document_lengths)
            sentence, token = sentence + count, token + size
    digests = {hashlib.md5((tmp_path / f"{name}{suffix}").read_bytes()).hexdigest()
               for suffix in (".bin", ".idx") for name in ("at_once", "one_by_one")}
    assert len(digests) == 2
    IndexedDataset(str(tmp_path / "at_once")).verify()


def test_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    for tokens, lengths in (([1, 2], [1]), ([70000], [1]), ([-1], [1])):
        with pytest.raises(ValueError, match=r"sum to|do not fit"), \
                IndexedDatasetWriter(str(tmp_path / "x"), np.uint16) as writer:
            writer.add_document(np.array(tokens), lengths)
    assert not os.listdir(tmp_path)


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--output-prefix"):
        IndexedDatasetWriter(str(tmp_path / "file" / "x"), np.uint16)


def test_a_killed_writer_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    script = ("import os, signal, sys, numpy as np\n"
              "from bert_ds.data.indexed_dataset import IndexedDatasetWriter\n"
              "writer = IndexedDatasetWriter(sys.argv[1], np.uint16)\n"
              "writer.add_documents(np.ones(10**6, np.uint16), np.full(10**5, 10), [10**5])\n"
              "os.kill(os.getpid(), signal.SIGKILL)\n")
    prefix = str(tmp_path / "x")
    killed = subprocess.run([sys.executable, "-c", script, prefix], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(DataError, match="there is no file"):
        IndexedDataset(prefix)
    write_three_documents(prefix)
    assert len(IndexedDataset(prefix)) == 3
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]


def test_dtype_follows_megatrons_rule() -> None:
    assert [dtype_for_vocab(size) for size in (30522, 65499, 65500)] == [np.uint16, np.uint16, np.int32]


def test_a_missing_pair_is_explained(prefix: str) -> None:
    folder = Path(prefix).parent
    with pytest.raises(DataError) as caught:
        IndexedDataset(str(folder / "other"))
    assert "python -m bert_ds.build_vocab" in str(caught.value)
    assert "python -m bert_ds.preprocess_data" in str(caught.value)
    assert "--split-sentences" in str(caught.value)
    for name in ("corpus_text_document", "corpus", "corpus_text_sentence.bin"):
        with pytest.raises(DataError, match=f"use {prefix}, which exists"):
            IndexedDataset(str(folder / name))


GOOD = (8, [3, 1, 2], [0, 6, 8], [0, 2, 2, 3])


@pytest.mark.parametrize(("index", "reason"), [
    (b"", "does not start with"),
    (b"PK\x03\x04" + bytes(100), "does not start with"),
    (index_bytes(*GOOD)[:20], "ends within its header"),
    (index_bytes(*GOOD)[:9] + struct.pack("<Q", 2) + index_bytes(*GOOD)[17:], "version 2"),
    (index_bytes(9, *GOOD[1:]), "type code 9"),
    (index_bytes(*GOOD)[:-1], r"has 101 bytes where its header announces 102"),
    (index_bytes(*GOOD)[:18] + struct.pack("<QQ", 2**63, 2**63), "announces"),
    (index_bytes(8, [], [], [0]), "holds no sentence"),
    (index_bytes(8, [3, 1, 2], [0, 6, 8], [0, 2, 2, 4]), "cover sentences 0 to 4"),
    (index_bytes(8, [3, 1, 3], [0, 6, 8], [0, 2, 2, 3]), "cut short: it has 12 bytes"),
    (index_bytes(8, [3, 1, 1], [0, 6, 8], [0, 2, 2, 3]), "do not belong together"),
])
def test_a_damaged_index_is_refused_with_the_reason(prefix: str, index: bytes, reason: str) -> None:
    Path(f"{prefix}.idx").write_bytes(index)
    with pytest.raises(DataError, match=reason):
        IndexedDataset(prefix)


def test_a_bin_of_half_a_token_is_refused(prefix: str) -> None:
    Path(f"{prefix}.idx").write_bytes(index_bytes(8, [3, 1, 2], [0, 6, 9], [0, 2, 2, 3]))
    Path(f"{prefix}.bin").write_bytes(bytes(13))
    with pytest.raises(DataError, match="not a multiple of the 2 of a token"):
        IndexedDataset(prefix)


def test_a_bin_that_is_cut_short_is_refused(prefix: str) -> None:
    os.truncate(f"{prefix}.bin", 11)
    with pytest.raises(DataError, match="cut short: it has 11 bytes"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(("index", "reason"), [
    (index_bytes(8, [3, -1, 2], [0, 6, 8], [0, 2, 2, 3]), "entry of sentence 1"),
    (index_bytes(8, [3, 1, 2], [0, 2**62, 8], [0, 2, 2, 3]), "entry of sentence 1"),
    (index_bytes(8, [3, 1, 2], [0, 6, 8], [0, 7, 2, 3]), "document 1"),
])
def test_verify_finds_a_wrong_entry(prefix: str, index: bytes, reason: str) -> None:
    Path(f"{prefix}.idx").write_bytes(index)
    with pytest.raises(DataError, match=reason):
        IndexedDataset(prefix).verify()


@settings(max_examples=300, deadline=None)
@given(draw=st.data())
def test_random_bytes_never_read_outside_the_file(tmp_path_factory: pytest.TempPathFactory,
                                                      draw: st.DataObject) -> None:
    prefix = str(tmp_path_factory.mktemp("fuzz") / "x")
    good = index_bytes(*GOOD)
    content = bytearray(draw.draw(st.one_of(st.binary(max_size=200), st.just(good))))
    for _ in range(draw.draw(st.integers(0, 4))):
        if content:
            content[draw.draw(st.integers(0, len(content) - 1))] = draw.draw(st.integers(0, 255))
    Path(f"{prefix}.idx").write_bytes(content)
    size = draw.draw(st.integers(0, 24))
    Path(f"{prefix}.bin").write_bytes(bytes(size))
    try:
        dataset = IndexedDataset(prefix)
        for sentence in range(len(dataset)):
            assert dataset[sentence].nbytes <= size
        dataset.verify()
    except DataError:
        assert (bytes(content), size) != (good, 12)
