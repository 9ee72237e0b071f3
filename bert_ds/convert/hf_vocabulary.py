"""The vocabulary of a Hugging Face BERT, and how its text becomes tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import VOCABULARY_FILE
from bert_ds.convert.hf_weights import read_json
from bert_ds.data.vocabulary import SPECIAL_TOKENS
from bert_ds.errors import CheckpointError

LOWER_CASE, CASED = "BertWordPieceLowerCase", "BertWordPieceCase"
TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
_CLASSES = (None, "BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")
_OVERRULE = "use the text that this tokenizer makes of yours, or give --tokenizer-type to take the nearest of ours"


@dataclass(frozen=True)
class FoundVocabulary:
    """The vocabulary of a model folder."""

    content: bytes
    """One token a line."""
    source: Path
    tokenizer_type: str
    reason: str
    """What the type was taken from."""


def read_vocabulary(folder: Path, tokenizer_type: str | None) -> FoundVocabulary:
    """Reads vocab.txt or tokenizer.json, with the tokens that were added to it.

    Args:
        folder: the model's folder.
        tokenizer_type: what the user says that it is; None takes it from the tokenizer's files.

    Raises:
        CheckpointError: there is no vocabulary, or a tokenizer that ours cannot stand for.
    """
    tokenizer = _object_if_there(folder / TOKENIZER_FILE)
    settings = _object_if_there(folder / TOKENIZER_CONFIG_FILE)
    tokens, source = _tokens(folder, tokenizer)
    tokens += _added(tokens, tokenizer, folder / TOKENIZER_FILE)
    if any("\n" in token for token in tokens):
        raise CheckpointError.of("MODEL", source, "has a token with a line break", "use another model")
    content = "".join(f"{token}\n" for token in tokens).encode()
    if tokenizer_type is not None:
        return FoundVocabulary(content, source, tokenizer_type, "as --tokenizer-type says")
    _refuse_other_tokenizers(folder, tokenizer, settings)
    lower_case, reason = _case(tokenizer, settings, tokens)
    return FoundVocabulary(content, source, LOWER_CASE if lower_case else CASED, reason)


def _object_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _tokens(folder: Path, tokenizer: Mapping[str, Any]) -> tuple[list[str], Path]:
    path = folder / VOCABULARY_FILE
    if path.is_file():
        with files.os_errors_reported("MODEL", path):
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError as error:
                raise CheckpointError.of("MODEL", path, f"is not UTF-8 text (byte {error.start})",
                                         "copy it again") from None
        lines = text.removesuffix("\n").split("\n")
        return [line.removesuffix("\r") for line in lines] if lines[0].endswith("\r") else lines, path
    path = folder / TOKENIZER_FILE
    model = tokenizer.get("model") or {}
    if model.get("type", "WordPiece") != "WordPiece" or not model.get("vocab"):
        reason = f"holds a {model.get('type')} model, not WordPiece" if model else "is missing, and vocab.txt too"
        raise CheckpointError.of("MODEL", path, reason, "copy the tokenizer's files of the model into its folder")
    id_of: dict[str, int] = model["vocab"]
    return _in_order(id_of, 0, path), path


def _added(tokens: list[str], tokenizer: Mapping[str, Any], path: Path) -> list[str]:
    """Tokens that tokenizer.json adds to those of the vocabulary, in the order of their ids."""
    known = set(tokens)
    added = {str(token["content"]): int(token["id"]) for token in tokenizer.get("added_tokens") or ()
             if token["content"] not in known}
    return _in_order(added, len(tokens), path)


def _in_order(id_of: Mapping[str, int], first: int, path: Path) -> list[str]:
    ordered = sorted(id_of, key=id_of.__getitem__)
    if [id_of[token] for token in ordered] != list(range(first, first + len(ordered))):
        raise CheckpointError.of("MODEL", path, f"leaves ids out, or gives one twice, from {first} on",
                                 "use the tokenizer's files of the model")
    return ordered


def _refuse_other_tokenizers(folder: Path, tokenizer: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Ours strips accents exactly where it lower-cases, and sets Chinese characters apart."""
    name = settings.get("tokenizer_class")
    if name not in _CLASSES:
        raise CheckpointError.of("MODEL", folder / TOKENIZER_CONFIG_FILE, f"names the tokenizer {name}, which is not "
                                 "BERT's WordPiece", _OVERRULE)
    normalizer = tokenizer.get("normalizer") or {}
    if normalizer.get("type") not in (None, "BertNormalizer"):
        raise CheckpointError.of("MODEL", folder / TOKENIZER_FILE, f"cleans text by a {normalizer['type']}", _OVERRULE)
    lower_case = settings.get("do_lower_case", normalizer.get("lowercase"))
    strip = settings.get("strip_accents", normalizer.get("strip_accents"))
    if None not in (strip, lower_case) and strip != lower_case:
        raise CheckpointError.of("MODEL", folder, f"has a tokenizer with lower case {_word(lower_case)} and accents "
                                 f"{'stripped' if strip else 'kept'}", _OVERRULE)
    if not settings.get("tokenize_chinese_chars", normalizer.get("handle_chinese_chars", True)):
        raise CheckpointError.of("MODEL", folder, "has a tokenizer that does not set Chinese characters apart",
                                 _OVERRULE)


def _case(tokenizer: Mapping[str, Any], settings: Mapping[str, Any], tokens: list[str]) -> tuple[bool, str]:
    if (lower_case := settings.get("do_lower_case")) is not None:
        return bool(lower_case), f"{TOKENIZER_CONFIG_FILE}: do_lower_case {json.dumps(lower_case)}"
    if (lower_case := (tokenizer.get("normalizer") or {}).get("lowercase")) is not None:
        return bool(lower_case), f"{TOKENIZER_FILE}: lowercase {json.dumps(lower_case)}"
    capital = next((token for token in tokens if token not in SPECIAL_TOKENS and not token.startswith("[")
                    and token != token.lower()), None)
    if capital is None:
        return True, "no entry of the vocabulary has a capital letter"
    return False, f"the vocabulary has entries with capital letters, such as {capital}"


def _word(value: object) -> str:
    return "on" if value else "off"
