"""The table of what is proved is that of the tests."""

from __future__ import annotations

import proofs


def test_the_table_of_proofs_is_that_of_the_tests() -> None:
    assert proofs.IN_README.shown() == proofs.table(), "run: python tests/support/proofs.py"


def test_no_claim_is_made_twice() -> None:
    claims = [proof.claim for proof in proofs.proofs()]
    assert len(claims) > 20
    assert len(claims) == len(set(claims))
