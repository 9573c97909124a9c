"""Selection: which of the complete groups go out now. Pure policies over the line of ready groups.

A selection gets the groups that are ready, in the order they completed, and how many are wanted at
most; it returns those that go now, none meaning: wait.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice

from tailrace.types import Group, samples_of

Select = Callable[[Collection[Group], int], list[Group]]


def earliest(ready: Collection[Group], wanted: int) -> list[Group]:
    """First complete, first out: the trainer's FIFO (RolloutPipe 3.2)."""
    return list(islice(ready, wanted))


def fits(tokens: int) -> Select:
    """The feasible batch (RolloutPipe section 4): the largest prefix of whole groups within a token
    budget; a group over the budget goes alone, and is cut into micro-batches by the trainer."""

    def feasible_batch(ready: Collection[Group], wanted: int) -> list[Group]:
        return next(feasible(islice(ready, wanted), tokens), [])

    return feasible_batch


def feasible(groups: Iterable[Group], tokens: int) -> Iterator[list[Group]]:
    """Cut groups, in order, into feasible batches of at most `tokens` tokens, prompts included."""
    batch: list[Group] = []
    total = 0
    for group in groups:
        size = trained_tokens(group)
        if batch and total + size > tokens:
            yield batch
            batch, total = [], 0
        batch.append(group)
        total += size
    if batch:
        yield batch


def trained_tokens(group: Group) -> int:
    """What a trainer must compute for a group: its trainable samples, prompts included."""
    samples = samples_of([group])
    return len(samples) * len(group.prompt.ids) + sum(sample.num_tokens for sample in samples)
