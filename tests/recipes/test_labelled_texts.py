"""Files of labelled texts: the formats and columns that are understood, and what is said about the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from bert_ds.errors import DataError
from finetuning.labelled_texts import Columns, Example, labels_of, read_examples, require_known_labels

COLA = "gj04\t1\t\tThe car honked.\ngj04\t0\t*\tThe \"car honk.\nl-93\t1\t\tIt rained.\n"
BY_NUMBER = Columns(texts=("4",), label="2")


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_glue_files_with_and_without_a_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [Example(("The car honked.",), "1"), Example(('The "car honk.',), "0"), Example(("It rained.",), "1")]
    assert read_examples(write(tmp_path / "cola.tsv", COLA), BY_NUMBER) == expected
    assert capsys.readouterr().out == ""
    with_header = write(tmp_path / "header.tsv", "source\tlabel\tmark\tsentence\n" + COLA)
    assert read_examples(with_header, BY_NUMBER) == expected
    assert "the first row is taken for a header, since no other has its label 'label'" in (
        capsys.readouterr().out)
    assert read_examples(with_header, Columns(texts=("4",), label="2", header="no"))[0].label == "label"
    for columns in (Columns(), Columns(texts=("sentence",), label="label"), Columns(texts=("4",), label="label"),
                    Columns(texts=("4",), label="2", header="yes")):
        assert read_examples(with_header, columns) == expected
    # A few rows of validation may well begin with a label that does not come again.
    rare = write(tmp_path / "rare.tsv", COLA.replace("gj04\t1", "gj04\t2", 1))
    assert [len(read_examples(rare, BY_NUMBER, known_labels=labels)) for labels in ((), ("0", "1", "2"))] == [2, 3]
    assert len(read_examples(with_header, BY_NUMBER, known_labels=("0", "1"))) == 3
    pair = write(tmp_path / "rte.tsv", "\ufeffindex\tsentence1\tsentence2\tlabel\r\n"
                                       "0\tA cat.\tAn animal.\tentailment\r\n\r\n")
    assert read_examples(pair, Columns()) == [Example(("A cat.", "An animal."), "entailment")]


def test_csv_and_json_lines(tmp_path: Path) -> None:
    table = write(tmp_path / "a.csv", 'text,label\n"One, ""two""\nlines",x\nplain,y\n')
    assert read_examples(table, Columns()) == [Example(('One, "two"\nlines',), "x"), Example(("plain",), "y")]
    lines = write(tmp_path / "a.jsonl", '{"text": "é", "label": 1}\n\n{"label": "0", "text": "b", "more": null}\n')
    assert read_examples(lines, Columns()) == [Example(("é",), "1"), Example(("b",), "0")]
    assert read_examples(write(tmp_path / "data", lines.read_text()), Columns(), "jsonl")[0].label == "1"


@pytest.mark.parametrize(("name", "text", "columns", "message"), [
    ("a.tsv", "", Columns(), "holds no rows"),
    ("a.tsv", "sentence\tlabel\n", Columns(), "holds a header and no rows"),
    ("a.bin", "x", Columns(), "does not tell by its name .* Fix: give --format"),
    ("a.tsv", COLA, Columns(), "none of the usual columns; its first row holds 'gj04', '1', '', 'The car"),
    ("a.tsv", "sentence\tclass\na\tb\n", Columns(), "--label-column=none: .*'sentence', 'class'"),
    ("a.tsv", "sentence\tlabel\na\tb\n", Columns(texts=("text",)), "--text-columns=text: is no column of"),
    ("a.tsv", "sentence\tlabel\na\n", Columns(), "line 2: has 1 columns; number 2 is needed"),
    ("a.tsv", COLA, Columns(texts=("0",), label="2"), "line 1: .* choose other columns; they count from 1"),
    ("a.tsv", COLA, Columns(texts=("4",), label="3", header="no"), "line 1: has an empty label"),
    ("a.tsv", COLA, Columns(texts=("sentence",), header="no"), "--header=no: leaves the columns without names"),
    ("a.csv", 'text,label\n"a,b\n', Columns(), "is no CSV"),
    ("a.jsonl", '{"text": "a", "label": 1}\n[1]\n', Columns(), "line 2: is no JSON object"),
    ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "a"}\n', Columns(), "line 2: has no 'label'"),
    ("a.jsonl", '{"text": ["a"], "label": 1}\n', Columns(), "line 1: has no plain value under 'text'"),
])
def test_what_cannot_be_read(tmp_path: Path, name: str, text: str, columns: Columns, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_examples(write(tmp_path / name, text), columns)


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"sentence\tlabel\ncaf\xe9\t1\n")
    with pytest.raises(DataError, match=r"is not UTF-8 .* at byte 18"):
        read_examples(tmp_path / "a.tsv", Columns())


def test_labels(tmp_path: Path) -> None:
    examples = [Example(("a",), label) for label in ("10", "2", "2")]
    assert labels_of(examples, tmp_path) == ["2", "10"]
    assert labels_of([*examples, Example(("a",), "b")], tmp_path) == ["10", "2", "b"]
    with pytest.raises(DataError, match="has one label only, '10'"):
        labels_of(examples[:1], tmp_path)
    with pytest.raises(DataError, match="has 60 labels for 60 rows: scores, not classes"):
        labels_of([Example(("a",), f"{number / 7:.3f}") for number in range(60)], tmp_path)
    with pytest.raises(DataError, match="has the label '10', which the training file lacks"):
        require_known_labels(examples, ["2", "3"], tmp_path)
