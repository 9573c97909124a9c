"""The order of rows is that of numpy: a resumed run depends on it."""

import numpy as np
import pytest

from tailrace.contracts.permutation import permutation


@pytest.mark.parametrize("size", [0, 1, 2, 3, 17, 64])
def test_a_permutation_is_that_of_numpy(size: int) -> None:
    for seed in range(1000):
        expected = np.random.default_rng([seed, seed % 7]).permutation(size)
        assert permutation((seed, seed % 7), size).tolist() == expected.tolist(), seed


@pytest.mark.parametrize("seed", [(0,), (2**31, 5), (2**40, 3), (2**70 + 5, 2**33, 1)])
def test_large_seeds_and_many_rows_as_well(seed: tuple[int, ...]) -> None:
    expected = np.random.default_rng(list(seed)).permutation(70_000)
    assert permutation(seed, 70_000).tolist() == expected.tolist()
