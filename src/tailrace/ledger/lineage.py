"""Lives and the publications they made: a tree.

A life begins with the checkpoint of another one, at its version; whatever that one published later is a dead
branch. The staleness of a token is how many publications lie between the one that produced it and the current
one, along the tree.

    life 1   0 - 1 - 2 - 3 - 4         killed; the last checkpoint was of version 2
    life 2           `-- 3 - 4 - 5

Seen from version 5 of life 2, a token of its own version 4 is 1 old, one of version 2 is 3 old, and one of
life 1's version 4 is 5 old: two publications back to the fork, and three on.
"""

from collections.abc import Iterator, Mapping

from tailrace.ledger.base import LifeRow


def distance(lives: Mapping[int, LifeRow], one: tuple[int, int], other: tuple[int, int]) -> int:
    """Publications between two of them, each (life, version)."""
    newest = dict(_branches(lives, *one))
    for life, version in _branches(lives, *other):
        if life in newest:
            return one[1] + other[1] - 2 * min(version, newest[life])
    raise AssertionError(f"lives {one[0]} and {other[0]} have no beginning in common")


def _branches(lives: Mapping[int, LifeRow], life: int, version: int) -> Iterator[tuple[int, int]]:
    """Each life on the way to the first, and the newest of its versions that lies on it."""
    while life:
        yield life, version
        version = min(version, lives[life].version)
        life = lives[life].parent
