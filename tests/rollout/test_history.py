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


def test_the_longest_share_of_the_rows_is_predicted_to_be_long() -> None:
    history = History({row: 10 * row for row in range(1, 9)})
    prompts = [Prompt(index=50, ids=[1], row_number=row) for row in range(1, 9)]
    assert [history.predicts_long(prompt, 0.25) for prompt in prompts] == [False] * 6 + [True] * 2
    assert not any(history.predicts_long(prompt, 0.0) for prompt in prompts)


def test_ties_rows_never_trained_and_data_that_never_comes_again_are_not_long() -> None:
    history = History({1: 10, 2: 10, 3: 10})
    history.observe(trained(None, 500))
    assert history.longest == {1: 10, 2: 10, 3: 10}
    for row in (1, 4, None):
        assert not history.predicts_long(Prompt(index=9, ids=[1], row_number=row), 0.5)


def test_a_row_that_became_short_is_short() -> None:
    history = History({1: 10, 2: 20, 3: 99})
    assert history.predicts_long(Prompt(9, [1], row_number=3), 0.34)
    history.observe(trained(3, 5))
    assert not history.predicts_long(Prompt(9, [1], row_number=3), 0.34)
    assert history.predicts_long(Prompt(9, [1], row_number=2), 0.34)


def test_a_row_without_history_is_predicted_to_be_average() -> None:
    history = History({1: 10, 2: 20, 3: 99})
    lengths = [history.predicted(Prompt(9, [1], row_number=row)) for row in (3, 1, 7, None)]
    assert lengths == [99, 10, 20, 20]
    assert History().predicted(Prompt(9, [1], row_number=1)) == 0
