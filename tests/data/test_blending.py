from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_ds.data.blending import Blend, BlendedDataset, blend_order, parse_data_path, samples_of_each
from bert_ds.data.samples import SampleBatch
from bert_ds.errors import ConfigError, DataError


class NumberedSamples:
    """Sample i has i everywhere, plus a base."""

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.size = size

    def __len__(self) -> int:
        return self.size

    def build_batch(self, indices: np.ndarray) -> SampleBatch:
        batch = SampleBatch.empty(len(indices), 4, 8)
        for field in batch[:-1]:
            field[:] = self.base + indices[:, None]
        batch.truncated[:] = False
        return batch


def test_order_is_megatrons() -> None:
    order = blend_order([0.5, 0.3, 0.2], 12)
    assert order["dataset"].tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1]
    assert order["sample"].tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3]


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6), size=st.integers(1, 400))
def test_every_dataset_keeps_up_with_its_weight(weights: list[float], size: int) -> None:
    order = blend_order(weights, size)
    for dataset, weight in enumerate(weights):
        samples = order["sample"][order["dataset"] == dataset].tolist()
        assert samples == list(range(len(samples)))
        assert abs(len(samples) - size * Fraction(weight) / sum(map(Fraction, weights))) <= len(weights)


def test_sizes_round_up_and_add_the_surplus() -> None:
    assert samples_of_each([3, 1, 1], 1000) == [600, 200, 200]
    assert samples_of_each([3, 1, 1], 1001) == [601, 201, 201]
    assert samples_of_each([3, 1, 1], 1000, 0.005) == [603, 201, 201]


def test_the_three_forms_of_data_path() -> None:
    assert parse_data_path(["a"]) == Blend(("a",), None)
    assert parse_data_path(["a", "b"]) == Blend(("a", "b"), None)
    assert parse_data_path(["0.3", "a", "2", "b "]) == Blend(("a", "b"), (0.3, 2.0))


@pytest.mark.parametrize(("words", "reason"), [
    (["3", "a", "b", "c"], "mixes weights and prefixes"),
    (["a", "1", "b", "2"], "mixes weights and prefixes"),
    (["1", "a", "2"], "mixes weights and prefixes"),
    (["-1", "a"], "has the weight -1"),
    (["0", "a", "1", "b"], "has the weight 0"),
    (["nan", "a"], "has the weight nan"),
])
def test_other_forms_are_refused(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_data_path(words)


def test_a_blend_gives_each_row_its_own_sample() -> None:
    order = blend_order([0.5, 0.3, 0.2], 12)
    blend = BlendedDataset([NumberedSamples(100 * number, 9) for number in range(3)], order, source="blend")
    assert len(blend) == 12
    batch = blend.build_batch(np.array([11, 0, 2, 6]))
    for field in batch[:-1]:
        assert field[:, 0].tolist() == [103, 0, 200, 201]


def test_a_blend_that_outgrows_a_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="dataset 1 of the blend has 3 samples where 4 are needed"):
        BlendedDataset([NumberedSamples(0, 9), NumberedSamples(0, 3), NumberedSamples(0, 9)],
                       blend_order([0.5, 0.3, 0.2], 12), source="blend")
