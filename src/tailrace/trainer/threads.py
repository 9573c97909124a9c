"""Python threads for what releases the interpreter: products of matrices and compiled kernels."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache


def side_by_side(jobs: Sequence[Callable[[], None]]) -> None:
    """Do all, a thread each."""
    if len(jobs) == 1:
        jobs[0]()
        return
    list(_pool(len(jobs)).map(lambda job: job(), jobs))


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "side by side")
