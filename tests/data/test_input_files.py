from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bert_ds.data import input_files, records
from bert_ds.data.text_sources import BadRecords, TextSources
from bert_ds.errors import DataError

zstandard = pytest.importorskip("zstandard")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

LINES = b"".join(json.dumps({"text": f"text {number}", "title": f"T{number}"}).encode() + b"\n"
                 for number in range(3000))
TEXTS = [f"text {number}" for number in range(3000)]


def texts(*paths: str, on_error: str = "stop", **settings: float) -> list[str]:
    bad_records = BadRecords(on_error)
    return [document.texts[0] for document in TextSources(paths, **settings).documents(["text"], bad_records)]


def test_zstd_frames_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.zst"
    half = LINES.index(b"\n", len(LINES) // 2) + 1
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(compress(LINES[:half]) + compress(b"") + compress(LINES[half:]))
    assert texts(str(path)) == TEXTS


@pytest.mark.parametrize("kept", [10, 0.4, 0.999])
def test_a_zstd_file_cut_short_is_named_with_its_line(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "corpus.zst"
    content = zstandard.ZstdCompressor().compress(LINES)
    path.write_bytes(content[:int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(DataError, match=r"corpus.zst:\d+: cannot be read further"):
        texts(str(path))
    path.write_bytes(content[:4] + os.urandom(50))
    with pytest.raises(DataError, match=r"corpus.zst:1: cannot be read further"):
        texts(str(path))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zst").write_bytes(zstandard.ZstdCompressor().compress(LINES))
    parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name, package, extra in (("a.zst", "zstandard", "zstd"), ("a.parquet", "pyarrow", "parquet")):
        with pytest.raises(DataError, match=f"needs the package {package}(.|\n)*extra `{extra}`"):
            texts(str(tmp_path / name))


def test_parquet_columns_rows_and_damage(tmp_path: Path) -> None:
    path = str(tmp_path / "corpus.parquet")
    table = pyarrow.table({"text": TEXTS, "n": list(range(3000)), "title": [t.upper() for t in TEXTS]})
    parquet.write_table(table, path, row_group_size=700)
    assert texts(path) == TEXTS
    sources = TextSources([path])
    both = list(sources.documents(["title", "text"], BadRecords("stop")))
    assert both[1200].texts == ("TEXT 1200", "text 1200") and both[1200].location == f"{path}:1201"
    assert list(sources.chunks(["text"]))[-1].bytes_read == sources.total_bytes

    parquet.write_table(pyarrow.table({"text": ["a", None, "c"]}), path)
    with pytest.raises(DataError, match=r':2: has no value in the column "text"'):
        texts(path)
    assert texts(path, on_error="skip") == ["a", "c"]
    # A column that says it is UTF-8 and is not.
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 2, [
        None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0\6\0\0\0"), pyarrow.py_buffer(b"okcaf\xe9")])
    parquet.write_table(pyarrow.table({"text": bad}), path)
    with pytest.raises(DataError, match=r":2: is not UTF-8 \(byte 0xe9 at position 4"):
        texts(path)
    assert texts(path, on_error="replace") == ["ok", "caf\ufffd"]

    for column, reason in (("body", 'has no column "text" .its columns: body'), ("text", "is of type int64")):
        parquet.write_table(pyarrow.table({column: [1]}), path)
        with pytest.raises(DataError, match=reason):
            texts(path)
    Path(path).write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(DataError, match="cannot be read further"):
        texts(path)


@pytest.mark.parametrize("content", [LINES, gzip.compress(LINES), zstandard.ZstdCompressor().compress(LINES)])
def test_standard_input_and_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))  # type: ignore[type-var]
    assert texts("-") == TEXTS
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    assert texts(str(pipe)) == TEXTS
    writer.join()
    assert TextSources(["-"]).total_bytes is None
    with pytest.raises(DataError, match="is given twice"):
        TextSources(["-", "-"])


def test_standard_input_in_small_pieces() -> None:
    code = ("from bert_ds.data.text_sources import *\n"
            "documents = TextSources(['-']).documents(['text'], BadRecords('stop'))\n"
            "print([document.texts for document in documents])")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        for piece in (b"\n", b" \n", b'{"te', b'xt": "a"}\n', b'{"text": "b"}'):
            process.stdin.write(piece)
            process.stdin.flush()
        process.stdin.close()
        assert process.stdout.read() == b"[('a',), ('b',)]\n"


def test_patterns_are_sorted_and_must_match(tmp_path: Path) -> None:
    for name in ("b/wiki_01", "b/wiki_00", "a/wiki_10", "a/other", "[x].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"id": "1", "url": "u", "title": "t", "text": name}) + "\n")
    assert texts(f"{tmp_path}/*/wiki_*") == ["a/wiki_10", "b/wiki_00", "b/wiki_01"]
    assert texts(f"{tmp_path}/**/wiki_0*", f"{tmp_path}/[x].txt") == ["b/wiki_00", "b/wiki_01", "[x].txt"]
    with pytest.raises(DataError) as error:
        TextSources([f"{tmp_path}/*.gz", str(tmp_path / "missing")])
    assert "*.gz: matches no file" in str(error.value) and "missing: cannot be read" in str(error.value)


@pytest.mark.parametrize(("name", "content", "reason"), [
    ("x.txt.bz2", b"BZh91AY", "is compressed with bzip2(.|\n)*bzcat"),
    ("wiki.xml.bz2", b"BZh91AY", "is compressed with bzip2(.|\n)*WikiExtractor"),
    ("wiki.xml", b"<mediawiki xmlns", "is a dump in XML(.|\n)*WikiExtractor"),
    ("wiki_00", b'<doc id="12" url=', "marked-up output(.|\n)*--json"),
])
def test_what_needs_another_program_first(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        texts(str(tmp_path / name))


def test_large_documents_are_refused_without_being_read_into_memory(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_SKIPPED_AT_ONCE", 7)
    long = "x" * 1500
    lines, plain = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", long, "b", "y" * 900, long)))
    plain.write_text(f"a\n\n{'word ' * 150}\n{'word ' * 150}\nend\n\nb\n\n{long}\nend")
    for path, kept in ((lines, ["a", "b", "y" * 900]), (plain, ["a\n", "b\n"])):
        with pytest.raises(DataError, match=r":[23]: is a document of 0.0 MB, more than the 0.001 MB"):
            texts(str(path), largest_document_mb=0.001)
        assert texts(str(path), on_error="skip", largest_document_mb=0.001) == kept
        sources = TextSources([str(path)], largest_document_mb=0.001)
        assert max(len(record.content) for chunk in sources.chunks(["text"]) for record in chunk.records) <= 1000
    assert len(texts(str(lines))) == 5
    # The format is told by the start of a line that is not kept.
    unnamed = tmp_path / "unnamed"
    unnamed.write_text(json.dumps({"text": long}) + "\n" + json.dumps({"text": "b"}) + "\n")
    assert texts(str(unnamed), on_error="skip", largest_document_mb=0.001) == ["b"]


def test_replacement_names_the_place_and_keeps_the_document(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9 x"}\n{"text": "\\ud83d y"}\nbroken \xff\n')
    bad_records = BadRecords("replace")
    documents = TextSources([str(path)]).documents(["text"], bad_records)
    assert [next(documents).texts[0] for _ in range(3)] == ["fine", "caf\ufffd x", "\ufffd y"]
    assert bad_records.replaced == 2
    with pytest.raises(DataError, match=r"corpus.jsonl:4: is not a JSON object"):
        next(documents)


def test_text_bytes_are_estimated_from_what_is_stored(tmp_path: Path) -> None:
    for name, content in (("a", LINES), ("b", gzip.compress(LINES)), ("c", zstandard.ZstdCompressor().compress(LINES))):
        (tmp_path / name).write_bytes(content)
        stored = len(content)
        assert stored <= input_files.estimated_text_bytes(str(tmp_path / name)) <= 4 * stored
