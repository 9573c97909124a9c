"""The tree of lives and the publications that each made.

A life begins with a checkpoint of an earlier life, at the version of that checkpoint. What the earlier life
published later is a dead branch. The staleness of a token is the number of publications, along the tree,
between the one that produced it and the current one.

    life 1   0 - 1 - 2 - 3 - 4         killed; the last checkpoint was of version 2
    life 2           `-- 3 - 4 - 5

At version 5 of life 2, the staleness of a token is 1 for version 4 of life 2, 3 for version 2, and 5 for
version 4 of life 1: two publications back to the fork and three forward.
"""

from collections.abc import Iterator, Mapping

from tailrace.ledger.base import LifeRow


def distance(lives: Mapping[int, LifeRow], one: tuple[int, int], other: tuple[int, int]) -> int:
    """Return the number of publications between two versions, each given as (life, version)."""
    newest = dict(_branches(lives, *one))
    for life, version in _branches(lives, *other):
        if life in newest:
            return one[1] + other[1] - 2 * min(version, newest[life])
    raise AssertionError(f"lives {one[0]} and {other[0]} have no beginning in common")


def _branches(lives: Mapping[int, LifeRow], life: int, version: int) -> Iterator[tuple[int, int]]:
    """Yield each life on the path to the root, with the newest of its versions on that path."""
    while life:
        yield life, version
        version = min(version, lives[life].version)
        life = lives[life].parent
