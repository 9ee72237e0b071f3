"""English prose out of documentation strings: code, tables, markup and parameter lists are left out.

Works in three steps: cut a documentation string into paragraphs (`_paragraphs`), strip inline markup (`_plain`), keep
the sentences that read like English (`is_english_sentence`). When in doubt a sentence is dropped: there is more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from bert_ds.data.sentences import SentenceSplitter, SplittingError

_BULLET = re.compile(r"(?:[-*+•]|\(?\d{1,2}[.)]|\(?[a-z]\)|#\.)\s+")
_UNDERLINE = re.compile(r"([=\-~^*#\"'+.`])\1{2,}$")
_DIRECTIVE = re.compile(r"\.\.\s+(?:([\w-]+)::)?")
_FIELD = re.compile(r"(?::[\w *.,|\[\]\\`-]+:|@\w+\b)(?:\s|$)")
_TABLE_ROW = re.compile(r"\+[-=+]+\+|.*\|.*\||={3,} +={3,}")
_CODE_LINE = re.compile(r">>>|\.\.\. |\$ |% |In \[|import |from \w+ import|def |class |@\w+$")
_FENCES = ("```", "~~~")
_ADMONITION_INDENT = 3
_ADMONITIONS = frozenset({"attention", "caution", "danger", "hint", "important", "note", "seealso", "tip", "warning"})
_LISTS = ("arg arguments args attributes call-arguments example examples example-usage exceptions fields inputs input "
          "keyword-args keyword-arguments kwargs members methods note-examples options other-parameters output outputs "
          "parameter parameters params raise raises receives reference references return returns see-also shape shapes "
          "throws todo type-parameters usage usage-example usage-examples warns yield yields")
_LIST_SECTIONS = frozenset(name.replace("-", " ") for name in _LISTS.split())

_WORDS = re.compile(r"\w[\w -]*")
_CODE = "="
"""Stands for inline code; a sentence that holds it is not prose."""
_INLINE: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"!?\[([^\]\[]*)\]\([^)\s]*\)"), r"\1"),  # Markdown link
    (re.compile(r":math:`[^`]*`|\$[^$]+\$|\w+\._\w*"), _CODE),
    (re.compile(r":(pep|rfc):`(\d+)`"), lambda match: f"{match[1].upper()} {match[2]}"),
    (re.compile(r":[\w:.+-]+:`~?(?:[^`<]*\.)?([^`<.]+?)(?:\s*<[^>`]*>)?`"), r"\1"),  # :class:`~package.Name`
    (re.compile(r"`([^`<]+?)\s*<[^>`]*>`_{0,2}"), r"\1"),  # `text <link>`_
    (re.compile(r"\s*(?:\[(?:\d+|\w+\d{2,4})\]_?|\[#\w*\]_)"), ""),  # footnotes
    (re.compile(r"\[?``?\[?`?([^`]+?)`?\]?``?\]?(?:_{1,2}(?!\w))?"),  # ``code``, `name`, [`name`]
     lambda match: match[1] if _WORDS.fullmatch(match[1]) else _CODE),
    (re.compile(r"(?<!\w)(\*{1,2}|_{1,2})(\S(?:.*?\S)?)\1(?!\w)"), r"\2"),  # *emphasis*
    (re.compile(r"\b(\w+)_(?=[\s,.;:)]|$)"), r"\1"),  # reference_
    (re.compile(r"\s+"), " "),
)

_TYPOGRAPHIC = str.maketrans({
    "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"',  # quotation marks
    "\u2013": "-", "\u2014": "-", "\u2026": "...", "\u00a0": " ",  # dashes, ellipsis, no-break space
})
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|a\.k\.a|w\.r\.t|vs|etc|cf|resp)\.|\d\.\d")
_NOT_PROSE = re.compile(
    r"[=<>{}\\|@#$^~`_*\[\]+&]"  # operators and markup
    r"|::|->|--|\(\)|\.\.|\w\.\w|\w\(|\)\w|:\w|\w/\w*/|(?:^|\s)[./]\w"  # calls, attributes, paths
    r"|[a-z][A-Z]\w*\b.*[a-z][A-Z]"  # more than one CamelCase name
    r"|\b(?:https?|www|TODO|FIXME|XXX|param|args|kwargs|Licensed|Copyright)\b"
)
_SENTENCE = re.compile(r"[\"'(]?[A-Z].*[.?!][\"')]?$")
_PLAIN_WORD = re.compile(r"[\"'(]*[A-Za-z]+(?:['-][A-Za-z]+)*[\"')]*[,;:.?!]?[\"')]*$")
_DANGLING_END = re.compile(r"\b(?:a|an|and|as|at|by|can|either|for|from|if|into|of|or|self|than|the|their|to|using|"
                           r"when|where|which|with|your)\.$")
_FUNCTION_WORDS = frozenset(
    "a about all also an and any are as at be because been but by can could do does each for from had has have how if "
    "in into is it its may more must no not of on one only or other should since so such than that the their them then "
    "there these they this those to two until use used using was we were what when where whether which while who will "
    "with within without would you your".split()
)


def prose(documentation: str, splitter: SentenceSplitter) -> list[str]:
    """Paragraphs of English sentences found in one documentation string, which must have its indentation removed."""
    paragraphs = [_plain(paragraph) for paragraph in _paragraphs(documentation.translate(_TYPOGRAPHIC))]
    if paragraphs and paragraphs[0][-1:].isalpha():
        # One-line summaries often lack their full stop.
        paragraphs[0] += "."
    return [english for paragraph in paragraphs if (english := _english(paragraph, splitter))]


def is_english_sentence(sentence: str) -> bool:
    """Whether a sentence is plain, complete English: mostly dictionary-like words, function words among them."""
    if not 20 <= len(sentence) <= 400 or not sentence.isascii() or not _SENTENCE.match(sentence):
        return False
    if _NOT_PROSE.search(_ABBREVIATION.sub("", sentence)) or sentence.count("(") != sentence.count(")"):
        return False
    if sentence.count('"') % 2 or _DANGLING_END.search(sentence):
        return False
    words = sentence.split()
    plain = sum(_PLAIN_WORD.match(word) is not None for word in words)
    function_words = sum(word.strip("\"'(),;:.?!").lower() in _FUNCTION_WORDS for word in words)
    return len(words) >= 5 and plain >= 0.85 * len(words) and function_words >= 0.2 * len(words)


def _english(paragraph: str, splitter: SentenceSplitter) -> str:
    """The English sentences of a paragraph, joined by blanks."""
    try:
        return " ".join(sentence for sentence in splitter(paragraph) if is_english_sentence(sentence))
    except SplittingError:
        return ""


def _plain(paragraph: str) -> str:
    for pattern, replacement in _INLINE:
        paragraph = pattern.sub(replacement, paragraph)
    return paragraph.strip()


def _paragraphs(documentation: str) -> Iterator[str]:
    """Paragraphs and list items, each on one line, without headings, code blocks, tables and parameter lists."""
    lines = [line.rstrip() for line in documentation.expandtabs().split("\n")]
    paragraph = list[str]()
    text_indent = position = 0
    while position < len(lines):
        text, indent = lines[position].lstrip(), _indent(lines[position])
        after = _after_block(lines, position)
        is_text = after == position
        bullet = _BULLET.match(text)
        if paragraph and (not is_text or bullet or indent != text_indent):
            yield " ".join(paragraph)
            paragraph = []
        if is_text:
            marker = bullet.end() if bullet else 0
            if not paragraph:
                text_indent = indent + marker
            paragraph.append(text[marker:].replace("::", ":"))
            after = _after_indented(lines, position) if text.endswith("::") else position + 1
        elif (directive := _DIRECTIVE.match(text)) and directive[1] in _ADMONITIONS:
            # The text of an admonition may start on its first line.
            if text[directive.end():]:
                paragraph, text_indent = [text[directive.end():].strip()], indent + _ADMONITION_INDENT
        position = after
    if paragraph:
        yield " ".join(paragraph)


def _after_block(lines: list[str], position: int) -> int:
    """Where the text goes on after the thing that starts here and is no text; `position` itself when this is text."""
    return next((after for rule in _RULES if (after := rule(lines, position)) is not None), position)


def _after_separator(lines: list[str], position: int) -> int | None:
    text = lines[position].lstrip()
    return position + 1 if not text or _UNDERLINE.match(text) or _TABLE_ROW.match(text) else None


def _after_heading(lines: list[str], position: int) -> int | None:
    """Skips an underlined heading, and the section below where it is a list of parameters and the like."""
    if not _is_heading(lines, position):
        return None
    names_list = _names_list(lines[position])
    position += 2
    while names_list and position < len(lines) and not _is_heading(lines, position):
        position += 1
    return position


def _after_code(lines: list[str], position: int) -> int | None:
    text = lines[position].lstrip()
    if _CODE_LINE.match(text):
        return _after_paragraph(lines, position)
    if not text.startswith(_FENCES):
        return None
    position += 1
    while position < len(lines) and not lines[position].lstrip().startswith(text[:3]):
        position += 1
    return position + 1


def _after_directive(lines: list[str], position: int) -> int | None:
    """Skips a directive or comment with its indented content; of an admonition, the first line only."""
    text = lines[position].lstrip()
    directive = _DIRECTIVE.match(text)
    if directive and directive[1] in _ADMONITIONS:
        return position + 1
    return _after_indented(lines, position) if directive or _FIELD.match(text) else None


def _after_list(lines: list[str], position: int) -> int | None:
    """Skips "Args:" and its like, with what is indented below or follows at once."""
    if not lines[position].endswith(":") or not _names_list(lines[position]):
        return None
    return max(_after_indented(lines, position), _after_paragraph(lines, position))


_RULES = (_after_separator, _after_heading, _after_code, _after_directive, _after_list)


def _is_heading(lines: list[str], position: int) -> bool:
    return position + 1 < len(lines) and _UNDERLINE.match(lines[position + 1].lstrip()) is not None


def _names_list(text: str) -> bool:
    return text.strip(" :*#").lower() in _LIST_SECTIONS


def _after_paragraph(lines: list[str], position: int) -> int:
    """Skips to the next blank line."""
    while position < len(lines) and lines[position]:
        position += 1
    return position


def _after_indented(lines: list[str], position: int) -> int:
    """Skips this line and all that are blank or deeper."""
    indent = _indent(lines[position])
    position += 1
    while position < len(lines) and (not lines[position] or _indent(lines[position]) > indent):
        position += 1
    return position


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
