"""From chunks of raw text to tokens: decode, split into sentences, tokenise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert_ds.data.duplicates import text_hash
from bert_ds.data.sentences import SentenceSplitter, SplittingError, sentence_splitter
from bert_ds.data.text_sources import BadRecord, Chunk, Document
from bert_ds.data.tokenizer import MAX_WORD_LENGTH, WordPieceTokenizer
from bert_ds.data.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """What determines the tokens of a document."""

    vocab_file: str
    tokenizer_type: str = "BertWordPieceLowerCase"
    max_word_length: int = MAX_WORD_LENGTH
    sentence_splitter: str | None = "sentencex"
    """None keeps each document as one sequence."""
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    """Close every document with [SEP], as a part of its last sentence; with [EOS] where the vocabulary is extended."""
    vocab_extra_bos_eos: bool = False
    """Extend the vocabulary by [BOS] and [EOS], as Megatron-LM's tokenizer up to 0.16 does."""
    replace_bad_characters: bool = False
    """Use documents whose bytes are no UTF-8, with replacement characters (which the tokenizer drops); preprocess
    sets it from its `on_error`."""


@dataclass(frozen=True)
class EncodedDocuments:
    """The documents of one chunk and key, as the writer takes them."""

    tokens: NDArray[np.integer]
    """[tokens], all sentences back to back."""
    lengths: NDArray[np.int32]
    """[sentences], tokens of each."""
    sentences_per_document: NDArray[np.int32]
    """[documents]"""

    def only(self, wanted: NDArray[np.bool_]) -> EncodedDocuments:
        """Those documents for which `wanted` [documents] is true."""
        wanted_sentences = np.repeat(wanted, self.sentences_per_document)
        return EncodedDocuments(self.tokens[np.repeat(wanted_sentences, self.lengths)], self.lengths[wanted_sentences],
                                self.sentences_per_document[wanted])


@dataclass(frozen=True)
class EncodedChunk:
    """What a worker hands back for one chunk."""

    of_keys: tuple[EncodedDocuments, ...]
    hashes: NDArray[np.uint64]
    """[documents], of all their texts together."""
    bad_records: tuple[BadRecord, ...]
    size: int
    """Bytes of text."""
    bytes_read: int
    """Bytes of all files, as stored, up to the end of the chunk."""


class DocumentEncoder:
    """Turns chunks of text into tokens."""

    def __init__(self, settings: EncoderSettings) -> None:
        self.settings = settings
        self.vocabulary = Vocabulary.from_file(settings.vocab_file, extra_bos_eos=settings.vocab_extra_bos_eos)
        self.splitter: SentenceSplitter | None = None
        if settings.sentence_splitter is not None:
            self.splitter = sentence_splitter(settings.sentence_splitter)
        self._tokenizer = WordPieceTokenizer(self.vocabulary, settings.tokenizer_type,
                                             max_word_length=settings.max_word_length)
        self.dtype = self._tokenizer.dtype
        document_end = self.vocabulary.tokens.index(self.vocabulary.document_end)
        self._document_end = np.array([document_end], self.dtype).tobytes()

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """Tokens of all documents of the chunk, and the records that cannot be used."""
        bad_records = list[BadRecord]()
        hashes = list[int]()
        of_keys = [list[list[bytes]]() for _ in self.settings.json_keys]
        for document in chunk.documents(self.settings.json_keys, replace=self.settings.replace_bad_characters):
            encoded = document if isinstance(document, BadRecord) else self._encoded_texts(document)
            if isinstance(encoded, BadRecord):
                bad_records.append(encoded)
                continue
            assert isinstance(document, Document), "a record that is not bad"
            if document.flaw is not None:
                bad_records.append(document.flaw)
            hashes.append(text_hash(document.texts))
            for documents, sentences in zip(of_keys, encoded, strict=True):
                documents.append(sentences)
        return EncodedChunk(tuple(map(self._joined, of_keys)), np.array(hashes, np.uint64), tuple(bad_records),
                            chunk.size, chunk.bytes_read)

    def _encoded_texts(self, document: Document) -> list[list[bytes]] | BadRecord:
        try:
            return [self._encoded_sentences(text) for text in document.texts]
        except SplittingError as error:
            return BadRecord(document.location, str(error), "use another --sentence-splitter")

    def _encoded_sentences(self, text: str) -> list[bytes]:
        """Tokens of each sentence; sentences without a token are left out."""
        sentences = self.splitter(text) if self.splitter else [text]
        encoded = [tokens for tokens in map(self._tokenizer.encode_bytes, sentences) if tokens]
        if self.settings.append_eod and encoded:
            encoded[-1] += self._document_end
        return encoded

    def _joined(self, documents: Sequence[list[bytes]]) -> EncodedDocuments:
        sentences = [tokens for document in documents for tokens in document]
        return EncodedDocuments(
            tokens=np.frombuffer(b"".join(sentences), self.dtype),
            lengths=np.array(list(map(len, sentences)), np.int32) // self.dtype.itemsize,
            sentences_per_document=np.array(list(map(len, documents)), np.int32),
        )
