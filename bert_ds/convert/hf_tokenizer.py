"""Tokenizer files for Hugging Face: the same text gives the same ids as in training."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from bert_ds.checkpoint import files
from bert_ds.checkpoint.format import VOCABULARY_FILE
from bert_ds.data.tokenizer import MAX_WORD_LENGTH, bert_normalizer
from bert_ds.data.vocabulary import CLS, CONTINUATION_PREFIX, MASK, PAD, SEP, SPECIAL_TOKENS, UNK, Vocabulary


def write_tokenizer(folder: Path, vocabulary_file: Path, *, lower_case: bool, max_length: int) -> None:
    """Writes vocab.txt, tokenizer.json and tokenizer_config.json.

    Args:
        folder: where to.
        vocabulary_file: vocabulary of the run, copied byte for byte.
        lower_case: whether training lower-cased its text and stripped accents.
        max_length: longest row that the model takes, [CLS] and [SEP] included.
    """
    vocabulary = Vocabulary.from_file(str(vocabulary_file))
    files.copy_durably(vocabulary_file, folder / VOCABULARY_FILE)
    tokenizer = fast_tokenizer(vocabulary, lower_case=lower_case)
    files.write_durably(folder / "tokenizer.json", [tokenizer.to_str(pretty=True).encode()])
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": lower_case,
        "strip_accents": None,
        "tokenize_chinese_chars": True,
        "model_max_length": max_length,
        "pad_token": PAD, "unk_token": UNK, "cls_token": CLS, "sep_token": SEP, "mask_token": MASK,
    }
    files.write_durably(folder / "tokenizer_config.json", [json.dumps(settings, indent=2).encode() + b"\n"])


def fast_tokenizer(vocabulary: Vocabulary, *, lower_case: bool) -> Tokenizer:
    """BERT's tokenizer as `transformers` uses it: special tokens are recognised in the text and added around it."""
    id_of = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(WordPiece(id_of, unk_token=UNK, max_input_chars_per_word=MAX_WORD_LENGTH,
                                    continuing_subword_prefix=CONTINUATION_PREFIX))
    tokenizer.normalizer = bert_normalizer(lower_case=lower_case)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(CLS, vocabulary.cls_id), (SEP, vocabulary.sep_id)],
    )
    tokenizer.decoder = WordPieceDecoder(prefix=CONTINUATION_PREFIX)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer
