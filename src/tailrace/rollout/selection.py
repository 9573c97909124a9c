"""Selection: which of the complete groups go to the trainer now. Pure functions.

A selection gets the ready groups in the order in which they completed, and how many are wanted at most. It
returns the groups that go now; an empty list means: wait.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice

from tailrace.types import Group, samples_of

Select = Callable[[Collection[Group], int], list[Group]]


def earliest(ready: Collection[Group], wanted: int) -> list[Group]:
    """The groups that completed first (the trainer's FIFO, RolloutPipe 3.2)."""
    return list(islice(ready, wanted))


def fits(max_tokens: int) -> Select:
    """The feasible batch (RolloutPipe 4): the largest prefix of whole groups within a token budget.

    A single group over the budget goes alone; the trainer splits it into micro-batches.
    """

    def feasible_batch(ready: Collection[Group], wanted: int) -> list[Group]:
        return next(feasible(islice(ready, wanted), max_tokens), [])

    return feasible_batch


def feasible(groups: Iterable[Group], max_tokens: int) -> Iterator[list[Group]]:
    """Split groups, in order, into feasible batches of at most `max_tokens` tokens, prompts included."""
    batch: list[Group] = []
    total = 0
    for group in groups:
        size = trained_tokens(group)
        if batch and total + size > max_tokens:
            yield batch
            batch, total = [], 0
        batch.append(group)
        total += size
    if batch:
        yield batch


def trained_tokens(group: Group) -> int:
    """Tokens that a trainer computes for a group: its trainable samples, prompts and the environment's tokens
    included."""
    return sum(sample.num_sequence_tokens for sample in samples_of([group]))
