"""What the past says of a prompt."""

from tailrace.rollout.history import History
from tailrace.types import Group, Prompt, Sample, SampleId


def trained(row: int | None, *lengths: int) -> Group:
    prompt = Prompt(index=100, ids=[1], row_number=row)
    group = Group(prompt, len(lengths), [])
    group.kept = [
        Sample(SampleId(100, 0, number), group, num_tokens=length) for number, length in enumerate(lengths)
    ]
    return group


def test_a_row_is_as_long_as_its_longest_response_the_last_time() -> None:
    history = History()
    for lengths in [(3, 90), (5, 4)]:
        history.observe(trained(7, *lengths))
    assert history.longest == {7: 5}


def test_a_row_without_history_is_predicted_to_be_average() -> None:
    history = History({1: 10, 2: 20, 3: 99})
    lengths = [history.predicted(Prompt(9, [1], row_number=row)) for row in (3, 1, 7, None)]
    assert lengths == [99, 10, 20, 20]
    assert History().predicted(Prompt(9, [1], row_number=1)) == 0
