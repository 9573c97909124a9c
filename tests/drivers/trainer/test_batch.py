import msgspec
import pytest

from helpers.episodes import answer, two_turns
from tailrace.drivers.trainer.batch import TrainingSample
from tailrace.types import Group, Prompt, Sample, SampleId

SAMPLE = TrainingSample(SampleId(7, 1, 2), [5, 6], [8, 9], [-0.5, -1 / 3], advantage=1.5)


def test_a_sample_crosses_the_wire_unchanged() -> None:
    data = msgspec.msgpack.encode([[SAMPLE]])
    assert msgspec.msgpack.decode(data, type=list[list[TrainingSample]]) == [[SAMPLE]]


@pytest.mark.parametrize(
    ("versions", "num_older"), [((2,), 0), ((1,), 3), ((0, 1, 2), 6), ((1, 2, 1, 2), 9), ((2, 2), 0)]
)
def test_older_tokens_are_those_up_to_the_last_of_an_older_version(
    versions: tuple[int, ...], num_older: int
) -> None:
    group = Group(Prompt(0, [1]), num_required=1, samples=[])
    sample = Sample(SampleId(0, 0, 0), group, reward=1.0, advantage=0.5)
    for version in versions:
        sample.extend([1, 2, 3], [-1.0, -2.0, -3.0], version)
    sample.num_masked = sample.num_older(2)
    crossing = TrainingSample.of(sample, published=2)
    assert (sample.num_older(2), crossing.num_masked) == (num_older, num_older)
    assert crossing.is_carried == (num_older > 0)
    assert sum(span.num_tokens for span in sample.loss_spans) == sample.num_loss_tokens
    assert all(span.version >= 2 for span in sample.loss_spans)
    assert crossing.completion_ids == sample.completion_ids and crossing.advantage == 0.5


def test_a_sample_without_a_prompt_is_a_defect() -> None:
    with pytest.raises(
        AssertionError, match=r"7\.1/2: it has no prompt token to predict its first token from"
    ):
        TrainingSample(SAMPLE.id, [], [8], [-0.5], 0.0)


def test_a_token_without_a_log_prob_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="2 tokens, 1 log-probs"):
        TrainingSample(SAMPLE.id, [5], [8, 9], [-0.5], 0.0)


def test_the_environments_tokens_stand_at_their_places() -> None:
    group = Group(Prompt(0, [1]), num_required=1, samples=[])
    sample = Sample(SampleId(0, 0, 0), group, reward=1.0, advantage=0.5)
    two_turns(sample, [10, 11], [50, 51, 52], [12])
    crossing = TrainingSample.of(sample, published=1)
    assert crossing.observations == [(2, [50, 51, 52])]
    assert (crossing.completion_ids, crossing.is_carried) == ([10, 11, 12], True)
    assert crossing.num_input_tokens == 6, "the last token is a target only"


def test_each_branch_is_a_sequence_of_its_own() -> None:
    group = Group(Prompt(0, [1]), num_required=1, samples=[])
    sample = Sample(SampleId(0, 0, 0), group, reward=1.0, advantage=0.5)
    two_turns(sample, [10, 11], [50], [12])
    sample.turns.pop()
    answer(sample, [1, 60, 61], begins_branch=True)
    two_turns(sample, [13, 14], [51, 52], [15])
    crossing = TrainingSample.of(sample)
    assert crossing.branches == [(3, [1, 60, 61])]
    assert [each.response_ids(crossing.completion_ids) for each in crossing.sequences] == [
        [10, 11, 50, 12],
        [13, 14, 51, 52, 15],
    ]
    assert crossing.num_input_tokens == sample.num_sequence_tokens - 2 == 11
    answer(sample, [1, 70], begins_branch=True)
    assert TrainingSample.of(sample) == crossing, "no token follows"


def test_an_observation_that_no_token_follows_is_left_out() -> None:
    group = Group(Prompt(0, [1]), num_required=1, samples=[])
    sample = Sample(SampleId(0, 0, 0), group, reward=1.0, advantage=0.5, finish_reason="length")
    sample.extend([10, 11], [-0.5, -0.5], 0)
    answer(sample, [50])
    crossing = TrainingSample.of(sample)
    assert (crossing.observations, crossing.num_input_tokens) == ([], 2)
