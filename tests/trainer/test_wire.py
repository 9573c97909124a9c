import msgspec
import pytest

from tailrace.trainer.wire import TrainSample
from tailrace.types import SampleId

SAMPLE = TrainSample(SampleId(7, 1, 2), [5, 6], [8, 9], [-0.5, -1 / 3], advantage=1.5)


def test_a_sample_crosses_the_wire_unchanged() -> None:
    data = msgspec.msgpack.encode([[SAMPLE]])
    assert msgspec.msgpack.decode(data, type=list[list[TrainSample]]) == [[SAMPLE]]


def test_a_sample_without_a_prompt_is_a_defect() -> None:
    with pytest.raises(AssertionError, match=r"7\.1/2: nothing to predict the first token from"):
        TrainSample(SAMPLE.id, [], [8], [-0.5], 0.0)


def test_a_token_without_a_log_prob_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="a log-prob for each token"):
        TrainSample(SAMPLE.id, [5], [8, 9], [-0.5], 0.0)
