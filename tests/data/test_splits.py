import pytest

from bert_ds.data.splits import document_range, parse_split
from bert_ds.errors import ConfigError, DataError


def test_bookends_are_megatrons_sums() -> None:
    # Shares over their sum, added from the left in double precision; values of megatron-core 0.16.1.
    assert parse_split("949,50,1") == ((0.0, 0.949), (0.949, 0.999), (0.999, 1.0))
    assert parse_split("0.7, 0.2, 0.1") == ((0.0, 0.7000000000000001), (0.7000000000000001, 0.9000000000000001),
                                            (0.9000000000000001, 1.0000000000000002))
    assert parse_split("99/1/0") == ((0.0, 0.99), (0.99, 1.0), None)
    assert parse_split("1") == ((0.0, 1.0), None, None)


def test_ranges_cover_the_documents_in_order_and_round_halves_to_even() -> None:
    ranges = [document_range("949,50,1", name, 10000, source="corpus") for name in ("train", "valid", "test")]
    assert ranges == [(0, 9490), (9490, 9990), (9990, 10000)]
    assert document_range("1,1", "train", 5, source="corpus") == (0, 2)
    assert document_range("1,1", "valid", 5, source="corpus") == (2, 5)
    assert document_range("1,1", "train", 7, source="corpus") == (0, 4)


@pytest.mark.parametrize("split", ["", "a,b", "1e2,5,5", "-1,2", "1,2,3,4", "0,0,0", "1.2.3"])
def test_what_is_no_split_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match="949,50,1"):
        parse_split(split)


@pytest.mark.parametrize(("split", "name"), [("949,50,1", "test"), ("1,0,0", "valid"), ("0,1", "train")])
def test_a_split_without_documents_is_refused(split: str, name: str) -> None:
    with pytest.raises(DataError, match=f"leaves none of the 20 documents of corpus to {name}") as caught:
        document_range(split, name, 20, source="corpus")
    assert ("--eval-interval none" in str(caught.value)) == (name != "train")
