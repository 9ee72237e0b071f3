from __future__ import annotations

from pathlib import Path

import pytest

from bert_ds.data import documentation_corpus
from bert_ds.data.documentation_corpus import gather_documentation

MODULE = '''"""The module number {0} is about the things of {1}.

It holds a class and a function, which are described below.
"""
import a_module_that_is_not_there

class Thing:
    """A thing of {1} is a part of the module number {0}."""
    def method(self):
        """Return the part of {1} that comes first in the list of the module number {0}."""

def function():
    """The function of {1} does all that is left to do in the module number {0}."""
    def inner():
        """The inner functions are of no use to the readers of a text."""
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    words = ("apples", "rivers", "engines", "letters", "mountains", "kitchens", "winters", "gardens")
    for package, count in (("large", 8), ("small", 2)):
        (folder / package / "tests").mkdir(parents=True)
        for number in range(count):
            topic = words[number] + (" and of hills" if package == "small" else "")
            content = MODULE.format("klmnopqr"[number], topic)
            (folder / package / f"m{number}.py").write_text(content, encoding="utf-8")
        (folder / package / "tests" / "test_x.py").write_text(MODULE.format("z", "tests"), encoding="utf-8")
        (folder / package / "broken.py").write_text('"""Text of the broken file."""\ndef (:\n', encoding="utf-8")
        (folder / package / "dangling.py").symlink_to(folder / "nowhere.py")
        (folder / package / "twice.py").write_text(MODULE.format("k", words[0]), encoding="utf-8")
    return folder


def test_text_is_found_without_duplicates_and_in_one_order(library: Path) -> None:
    documents = gather_documentation(100_000, folders=[library])
    assert documents == gather_documentation(100_000, folders=[library], workers=2)
    texts = {document.source: document.text for document in documents}
    shared = "It holds a class and a function, which are described below."
    assert [paragraph for paragraph in texts["large/m1.py"].split("\n") if paragraph != shared] == [
        "The module number l is about the things of rivers.",
        "A thing of rivers is a part of the module number l.",
        "Return the part of rivers that comes first in the list of the module number l.",
        "The function of rivers does all that is left to do in the module number l.",
    ]
    assert sum(shared in text for text in texts.values()) == 1
    assert sum("things of apples" in text and "hills" not in text for text in texts.values()) == 1
    paragraphs = [paragraph for text in texts.values() for paragraph in text.split("\n")]
    assert len(set(paragraphs)) == len(paragraphs)
    assert not any("inner" in text or "broken" in text or "of tests" in text for text in texts.values())


def test_amount_and_shares_are_bounded(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documentation_corpus, "_FILES_PER_BATCH", 1)
    everything = gather_documentation(100_000, folders=[library])
    some = gather_documentation(1200, folders=[library])
    assert some == [document for document in everything if document in some]
    from_large = sum(len(document.text) for document in some if document.source.startswith("large/"))
    largest = max(len(document.text) for document in everything)
    assert 0.2 * 1200 <= from_large <= 0.2 * 1200 + largest
    assert any(document.source.startswith("small/") for document in some)


def test_long_files_become_several_documents(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documentation_corpus, "_DOCUMENT_CHARACTERS", 100)
    documents = gather_documentation(100_000, folders=[library])
    assert sum(document.source == "large/m3.py" for document in documents) == 2
    assert all(document.sentences >= 2 for document in documents)


def test_the_standard_library_has_text() -> None:
    documents = gather_documentation(30_000)
    assert sum(len(document.text) for document in documents) >= 30_000
