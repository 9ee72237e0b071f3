"""Real English text that every machine has: the documentation strings of Python's standard library and of the
installed packages.

Source files are parsed, never imported. The same installation gives the same corpus: files are taken in the order of a
hash of their names, so that any amount is a mixture of all packages.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bert_ds.data.prose import prose
from bert_ds.data.sentences import SentenceSplitter, sentence_splitter
from bert_ds.data.worker_pool import worker_pool

_SITE_FOLDERS = frozenset({"site-packages", "dist-packages"})
_SKIPPED_FOLDERS = _SITE_FOLDERS | {"tests", "test", "testing", "_vendor", "idle_test"}
# The reference manual of the language, kept as strings of a dictionary.
_MANUAL = "pydoc_data/topics.py"
_DOCUMENT_CHARACTERS = 4000
_LARGEST_SHARE = 0.2
_HELD_OUT_OF = 100
_FILES_PER_BATCH = 512
_FILES_PER_TASK = 16


@dataclass(frozen=True)
class SourceFile:
    """One Python file of the installation."""

    package: str
    name: str
    """Path below its package folder, with "/" between the parts; the same on every machine."""
    path: Path


@dataclass(frozen=True)
class CorpusDocument:
    """One document of the corpus."""

    text: str
    """Paragraphs, one a line."""
    source: str
    sentences: int
    is_held_out: bool
    """Belongs to the one document in a hundred that a training text should not hold."""


def gather_documentation(max_bytes: int, *, folders: Sequence[Path] | None = None,
                         workers: int = 1) -> list[CorpusDocument]:
    """Text of about `max_bytes`, or what there is, from `folders` (default: this interpreter's libraries).

    No paragraph comes twice, and no package contributes much more than a fifth of `max_bytes`.
    """
    splitter = sentence_splitter("sentencex")
    bytes_of = Counter[str]()
    seen = set[str]()
    documents = list[CorpusDocument]()
    with worker_pool(workers) as pool:
        for files in _batches(_source_files(library_folders() if folders is None else folders)):
            wanted = [file for file in files if bytes_of[file.package] < _LARGEST_SHARE * max_bytes]
            prose_of_files = pool.map(partial(_prose_of, splitter=splitter), wanted, chunksize=_FILES_PER_TASK)
            for file, prose_of_file in zip(wanted, prose_of_files, strict=True):
                for document in _documents(file, prose_of_file, splitter, seen):
                    documents.append(document)
                    bytes_of[file.package] += len(document.text)
                if bytes_of.total() >= max_bytes:
                    return documents
    return documents


def library_folders() -> list[Path]:
    """The standard library's folder and those of installed packages."""
    candidates = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"),
                  *(entry for entry in sys.path if Path(entry).name in _SITE_FOLDERS)]
    return list(dict.fromkeys(Path(entry).resolve() for entry in candidates))


def _source_files(folders: Sequence[Path]) -> list[SourceFile]:
    """All Python files, in the order of the hash of their names."""
    files = dict[str, SourceFile]()
    for folder in folders:
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).parts
            if not _SKIPPED_FOLDERS.intersection(parts):
                package = parts[0] if folder.name in _SITE_FOLDERS else "python"
                files.setdefault("/".join(parts), SourceFile(package, "/".join(parts), path))
    return sorted(files.values(), key=lambda file: (_hash(file.name), file.name))


def _batches(files: Sequence[SourceFile]) -> Iterator[Sequence[SourceFile]]:
    return (files[start:start + _FILES_PER_BATCH] for start in range(0, len(files), _FILES_PER_BATCH))


def _prose_of(file: SourceFile, splitter: SentenceSplitter) -> list[list[str]]:
    """The paragraphs of each documentation string of the file."""
    return [prose(documentation, splitter) for documentation in _documentation_strings(file)]


def _documents(file: SourceFile, prose_of_file: Sequence[Sequence[str]], splitter: SentenceSplitter,
               seen: set[str]) -> Iterator[CorpusDocument]:
    """The prose of a file, cut between documentation strings; `seen` holds the paragraphs met so far."""
    paragraphs, characters = list[str](), 0
    for prose_of_string in prose_of_file:
        for paragraph in prose_of_string:
            key = "".join(filter(str.isalpha, paragraph.lower()))
            if key not in seen:
                seen.add(key)
                paragraphs.append(paragraph)
                characters += len(paragraph)
        if characters >= _DOCUMENT_CHARACTERS:
            yield from _document(paragraphs, file, splitter)
            paragraphs, characters = [], 0
    yield from _document(paragraphs, file, splitter)


def _document(paragraphs: Sequence[str], file: SourceFile, splitter: SentenceSplitter) -> Iterator[CorpusDocument]:
    """The document, if it has at least two sentences."""
    text = "\n".join(paragraphs)
    sentences = sum(len(splitter(paragraph)) for paragraph in paragraphs)
    if sentences >= 2:
        yield CorpusDocument(text, file.name, sentences, is_held_out=_hash(text) % _HELD_OUT_OF == 0)


def _documentation_strings(file: SourceFile) -> Iterator[str]:
    """The documentation strings of a module, its classes, methods and functions, in their order."""
    try:
        content = file.path.read_bytes()
        if b'"""' not in content and b"'''" not in content:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(content)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    yield from _docstrings_below(module)
    if file.name == _MANUAL:
        yield from (node.value for node in ast.walk(module)
                    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value)


def _docstrings_below(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    documentation = ast.get_docstring(node)
    if documentation:
        yield documentation
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings_below(child)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
