"""What the past says of a prompt."""

from tailrace.rollout.history import History
from tailrace.types import MAX_REFERENCE_TOKENS, Group, Prompt, Sample, SampleId


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


def answered(row: int | None, *responses: list[int]) -> Group:
    group = trained(row, *map(len, responses))
    for sample, ids in zip(group.kept, responses, strict=True):
        sample.completion_ids = ids
    return group


def test_the_newest_responses_of_a_row_are_kept_up_to_a_limit_of_tokens() -> None:
    """Four of a row; the rows that were trained longest ago are dropped first."""
    history = History(responses={1: [[1, 1]], 2: [[2]]}, max_tokens=8)
    history.observe(answered(1, *([number] for number in range(5))))
    assert history.last_responses(Prompt(0, [0], row_number=1)) == [[4], [3], [2], [1]]
    history.observe(answered(3, [3, 3, 3, 3]))
    assert history.responses == {1: [[4], [3], [2], [1]], 3: [[3, 3, 3, 3]]}
    history.observe(answered(1, [9] * 5))
    assert history.responses == {1: [[9] * 5]}
    history.observe(answered(None, [9]))
    assert history.responses == {1: [[9] * 5]}
    assert history.last_responses(Prompt(0, [0], row_number=3)) == ()
    assert history.last_responses(Prompt(0, [0])) == ()


def test_no_responses_are_kept_where_no_engine_drafts() -> None:
    history = History(responses={1: [[1, 1]]})
    history.observe(answered(2, [2]))
    assert history.responses == {}


def test_a_sample_refers_to_finished_members_then_to_the_last_responses_of_its_row() -> None:
    group = answered(7, [1], [2], [3] * (MAX_REFERENCE_TOKENS + 1))
    group.earlier = [[4], [5], [6]]
    sample = Sample(SampleId(100, 0, 3), group)
    long = [3] * MAX_REFERENCE_TOKENS
    assert sample.references == [long, [2], [1], [4]]
    assert group.kept[1].references == [long, [1], [4], [5]]
    sample.in_episode = True
    assert sample.references == []
