"""The samples that wait, in their order, and the groups counted by the oldest version of their tokens."""

import random
from collections import Counter

from tailrace.rollout.in_flight import Ages, SamplesInFlight
from tailrace.types import Group, Prompt, Sample, SampleId


def group_of(index: int) -> Group:
    group = Group(Prompt(index, [1]), 2, [])
    group.samples = [Sample(SampleId(index, 0, number), group) for number in range(2)]
    return group


def test_the_counts_are_those_of_counting_again() -> None:
    chance, ages = random.Random(0), Ages()
    here, gone = [group_of(index) for index in range(20)], list[Group]()
    for group in here:
        ages.add(group)
    for version in range(1000):
        group = chance.choice(here)
        match chance.randrange(4):
            case 0 if len(here) > 5:
                here.remove(group)
                gone.append(group)
                ages.remove([group, *gone])
            case 1 if gone:
                here.append(gone.pop())
                ages.add(here[-1])
            case _:
                chance.choice([*group.samples, *(gone or here)[0].samples]).grow(1, version % 7)
        known = [group.oldest_version for group in here if group.oldest_version is not None]
        assert ages.by_version == Counter(known)


def test_groups_without_tokens_are_held_over_by_a_publication_until_it_has_arrived() -> None:
    ages, has_arrived = Ages(), False
    before, grows, leaves, after = (group_of(index) for index in range(4))
    for group in (before, grows, leaves):
        ages.add(group)
    ages.published(lambda: has_arrived)
    ages.add(after)
    assert ages.may_start_older == {before, grows, leaves}
    grows.samples[0].grow(1, 0)
    ages.remove([leaves])
    assert ages.may_start_older == {before}
    has_arrived = True
    assert ages.may_start_older == set()


def test_the_waiting_samples_are_served_in_an_order_that_may_change() -> None:
    long, short = group_of(0), group_of(1)
    priority = {long: 1.0, short: 2.0}
    samples = SamplesInFlight(lambda sample: (priority[sample.group], sample.id.number), {})
    for sample in (*short.samples, *long.samples):
        samples.wait(sample)
    assert samples.first_waiting() is long.samples[0]
    priority[long] = 3.0
    samples.reorder(long.samples)
    served = []
    while (first := samples.first_waiting()) is not None:
        samples.park(first)
        served.append(first)
    assert served == [*short.samples, *long.samples]
