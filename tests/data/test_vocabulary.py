import hashlib
import json
from pathlib import Path

import pytest

from bert_ds.data.vocabulary import SPECIAL_TOKENS, Vocabulary
from bert_ds.errors import DataError


def write(tmp_path: Path, content: str | bytes, name: str = "vocab.txt") -> str:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_line_number_is_the_id_and_only_newline_ends_a_line(tmp_path: Path) -> None:
    content = "[PAD]\nthe\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n\u2028\n\x85\n##s\n ##\n"
    vocabulary = Vocabulary.from_file(write(tmp_path, content))
    assert vocabulary.tokens == ("[PAD]", "the", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2028", "\x85", "##s", " ##")
    assert (vocabulary.pad_id, vocabulary.unk_id, vocabulary.cls_id) == (0, 2, 3)
    assert (vocabulary.sep_id, vocabulary.mask_id) == (4, 5)
    assert vocabulary.is_continuation.tolist() == [False] * 8 + [True, False]
    assert vocabulary.sha256 == hashlib.sha256(content.encode()).hexdigest()
    assert len(vocabulary) == 10


def test_bos_and_eos_follow_the_file_when_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, "\n".join((*SPECIAL_TOKENS, "the", "##s")))
    plain, extended = Vocabulary.from_file(path), Vocabulary.from_file(path, extra_bos_eos=True)
    assert extended.tokens == (*plain.tokens, "[BOS]", "[EOS]")
    assert extended.is_continuation.tolist() == [False] * 6 + [True, False, False]
    assert extended.sha256 == plain.sha256
    assert (plain.document_end, extended.document_end) == ("[SEP]", "[EOS]")
    holds_both = write(tmp_path, "\n".join((*SPECIAL_TOKENS, "[EOS]", "[BOS]", "the")))
    assert len(Vocabulary.from_file(holds_both, extra_bos_eos=True)) == 8


@pytest.mark.parametrize(("content", "reason"), [
    (json.dumps({"[PAD]": 0}), "is JSON"),
    (b"\x80\x04\x95", "is not UTF-8 text (byte 0)"),
    (b"[PAD]\0\0", "binary"),
    ("\n".join(SPECIAL_TOKENS[:4]), r"lacks [MASK]"),
    ("", "lacks [PAD], [UNK], [CLS], [SEP], [MASK]"),
    ("\n".join((*SPECIAL_TOKENS, "the", "the")), "'the' 2 times"),
    ("\r\n".join(SPECIAL_TOKENS), "CR LF"),
])
def test_unusable_files_are_refused_with_the_reason(tmp_path: Path, content: str | bytes, reason: str) -> None:
    path = write(tmp_path, content, "bert-vocab.json")
    with pytest.raises(DataError) as caught:
        Vocabulary.from_file(path)
    assert reason in str(caught.value)
    assert path in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one token a line") as caught:
        Vocabulary.from_file(str(tmp_path / "nowhere.txt"))
    assert "nowhere.txt" in str(caught.value)
