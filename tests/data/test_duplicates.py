from __future__ import annotations

import numpy as np

from bert_ds.data.duplicates import NO_TEXT, SeenDocuments, text_hash


def test_a_set_of_hashes_equals_pythons() -> None:
    generator = np.random.default_rng(1)
    # Half of the values differ in their high bits only, which puts them into the same place of the table.
    values = np.concatenate([generator.integers(0, 5000, 20_000, np.uint64),
                             generator.integers(0, 5000, 20_000, np.uint64) << np.uint64(50)])
    generator.shuffle(values)
    seen, reference = SeenDocuments(), set[int]()
    for part in np.split(values, [0, 3, 10_000, 10_000, 25_000]):
        expected = []
        for value in part.tolist():
            expected.append(value in reference)
            if value != NO_TEXT:
                reference.add(value)
        assert seen.add(part).tolist() == expected


def test_hashes_tell_texts_apart() -> None:
    assert text_hash([""]) == text_hash(["", ""]) == NO_TEXT
    assert len({text_hash(texts) for texts in (["ab", "c"], ["a", "bc"], ["abc", ""], ["", "abc"], ["abc"])}) == 5
    assert text_hash(["The cat."]) == text_hash(["The cat."])
