from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bert_ds.data import text_sources
from bert_ds.data.text_sources import BadRecords, TextSources
from bert_ds.errors import DataError


def read(*paths: Path, keys: tuple[str, ...] = ("text",), on_error: str = "stop",
         input_format: str = "auto") -> list[tuple[str, tuple[str, ...]]]:
    sources = TextSources([str(path) for path in paths], input_format)
    return [(document.location.rpartition("/")[2], document.texts)
            for document in sources.documents(keys, BadRecords(on_error))]


def test_formats_are_recognised_and_inputs_follow_each_other(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('\ufeff{"text": "one", "title": "T"}\n\n{"text": "zwei\\nzeilen ü", "title": ""}',
                     encoding="utf-8")
    plain = tmp_path / "b.txt"
    plain.write_bytes(b"\n\nfirst line\r\nsecond\n \t\n\nother doc")
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    packed_plain = tmp_path / "d"
    packed_plain.write_bytes(gzip.compress(b"x\n\ny\n"))
    no_suffix = tmp_path / "e"
    no_suffix.write_text('\n {"text": "sniffed"}\n', encoding="utf-8")
    assert read(lines, plain, packed, packed_plain, no_suffix) == [
        ("a.jsonl:1", ("one",)), ("a.jsonl:3", ("zwei\nzeilen ü",)),
        ("b.txt:3", ("first line\r\nsecond\n",)), ("b.txt:7", ("other doc",)),
        ("c.jsonl.gz:1", ("packed",)), ("d:1", ("x\n",)), ("d:3", ("y\n",)), ("e:2", ("sniffed",)),
    ]
    assert read(lines, keys=("title", "text"))[0] == ("a.jsonl:1", ("T", "one"))
    assert read(no_suffix, input_format="text") == [("e:2", (' {"text": "sniffed"}\n',))]


@pytest.mark.parametrize(("line", "reason"), [
    (b'{"text": "cut', "is not a JSON object (Unterminated string starting at: character 10)"),
    (b"plain words", "is not a JSON object (Expecting value: character 1)"),
    (b'["text"]', "is a JSON list, not an object"),
    (b'{"body": "x", "title": "y"}', 'has no key "text" (its keys: "body", "title")'),
    (b'{"text": null}', 'the value of "text" is of type NoneType, not a string'),
    (b'{"text": "caf\xe9"}', "is not UTF-8 (byte 0xe9 at position 14 of the line)"),
    (b'{"text": "\\ud83d x"}', "\"text\" holds half a surrogate pair ('\\ud83d'), which is no character"),
    (b'{"text": ' + b"[" * 200_000, "is not a usable JSON object"),
    (b'{"text": ' + b"1" * 5000 + b"}", ""),
])
def test_bad_lines_are_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "last"}\n')
    with pytest.raises(DataError) as error:
        read(path)
    assert f"corpus.jsonl:3: {reason}" in str(error.value)
    assert "--on-error skip" in str(error.value)
    assert read(path, on_error="skip") == [("corpus.jsonl:1", ("good",)), ("corpus.jsonl:4", ("last",))]


def test_bad_bytes_in_plain_text_are_placed_by_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"fine\n\nabc\nde\xfff\n\nfine")
    with pytest.raises(DataError, match=r"corpus.txt:4: is not UTF-8 \(byte 0xff at position 3 of the line\)"):
        read(path)
    assert [texts for _, texts in read(path, on_error="skip")] == [("fine\n",), ("fine",)]


def test_skipped_records_are_counted_and_a_few_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources.logger.parent, "propagate", True)
    path = tmp_path / "corpus.jsonl"
    path.write_text("broken\n" * 25, encoding="utf-8")
    bad_records = BadRecords("skip")
    assert not list(TextSources([str(path)]).documents(["text"], bad_records))
    assert bad_records.count == 25
    assert sum("skipped" in record.message and "corpus.jsonl:" in record.message for record in caplog.records) == 10


def test_a_gzip_file_cut_short_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    content = "".join(json.dumps({"text": f"{number * 7919}"}) + "\n" for number in range(5000))
    path.write_bytes(gzip.compress(content.encode())[:-2000])
    with pytest.raises(DataError, match=r"corpus.jsonl.gz:\d+: cannot be read further"):
        read(path, on_error="skip")


def test_files_that_cannot_be_read_are_all_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        TextSources([str(tmp_path / "missing.jsonl"), str(tmp_path)])
    assert "missing.jsonl: cannot be read (No such file or directory)" in str(error.value)
    assert "is a folder" in str(error.value)


def test_a_file_that_vanishes_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "x"}\n', encoding="utf-8")
    sources = TextSources([str(path)])
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        list(sources.chunks(["text"]))


def test_chunks_cover_the_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "_CHUNK_BYTES", 100)
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(57)), encoding="utf-8")
    sources = TextSources([str(path) for path in paths])
    chunks = list(sources.chunks(["text"]))
    assert len(chunks) > 4
    assert sum(chunk.size for chunk in chunks) == sources.total_bytes == chunks[-1].bytes_read
    assert [texts[0] for _, texts in read(*paths)] == [str(number) for number in range(57)] * 2
