"""Python threads for what releases the interpreter: products of matrices and compiled kernels."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")


def side_by_side(jobs: Sequence[Callable[[], T]], num_threads: int) -> Iterator[T]:
    """What each job returns, in their order."""
    if num_threads == 1 or len(jobs) == 1:
        return (job() for job in jobs)
    return _pool(num_threads).map(lambda job: job(), jobs)


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "side by side")
