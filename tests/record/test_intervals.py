import numpy as np
import pytest

from tailrace.record.bounds import merged
from tailrace.record.intervals import (
    EMPTY,
    Intervals,
    at_most,
    complement,
    intersect,
    most_at_once,
    subtract,
    total,
    union,
    union_of,
)


def intervals(*pairs: tuple[float, float]) -> Intervals:
    return np.array(pairs, dtype=float).reshape(-1, 2)


def test_a_union_joins_what_overlaps_or_touches() -> None:
    given = intervals((5, 6), (0, 2), (1, 3), (3, 4), (7, 7))
    assert union(given).tolist() == [[0, 4], [5, 6]]
    assert union([]).tolist() == []
    assert union_of([intervals((0, 1)), EMPTY, intervals((1, 2))]).tolist() == [[0, 2]]


def test_the_union_without_numpy_is_the_same_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    for _ in range(1000):
        given = rng.integers((0, -1), (12, 4), size=(rng.integers(0, 9), 2))
        times = [(start / 7, (start + length) / 7) for start, length in given.tolist()]
        assert [list(each) for each in merged(times)] == union(times).tolist()


def test_a_complement_is_what_is_left_of_the_window() -> None:
    assert complement(intervals((0, 1), (2, 3), (9, 12)), (0.5, 10)).tolist() == [[1, 2], [3, 9]]
    assert complement(EMPTY, (0, 1)).tolist() == [[0, 1]]


def test_intersections_and_differences() -> None:
    one, other = intervals((0, 4), (6, 9)), intervals((1, 2), (3, 7), (8, 20))
    assert intersect(one, other).tolist() == [[1, 2], [3, 4], [6, 7], [8, 9]]
    assert subtract(one, other).tolist() == [[0, 1], [2, 3], [7, 8]]
    assert intersect(one, EMPTY).tolist() == [] and subtract(one, EMPTY).tolist() == one.tolist()


def test_how_many_are_open_at_once() -> None:
    given = intervals((0, 4), (1, 3), (2, 6), (6, 7))
    assert most_at_once(given) == 3
    assert at_most(given, 1).tolist() == [[0, 1], [4, 7]]
    assert at_most(given, 2).tolist() == [[0, 2], [3, 7]]
    assert most_at_once(EMPTY) == 0 and at_most(EMPTY, 1).tolist() == []


@pytest.mark.parametrize("seed", range(3))
def test_set_and_complement_cover_the_window(seed: int) -> None:
    given = union(np.sort(np.random.default_rng(seed).uniform(0, 100, (50, 2)), axis=1))
    assert total(given) + total(complement(given, (0.0, 100.0))) == pytest.approx(100.0)
