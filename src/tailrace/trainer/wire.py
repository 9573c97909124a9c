"""What crosses from the controller to a trainer process: samples as values, without tensors."""

import itertools

import msgspec

from tailrace.types import Sample, SampleId


class TrainingSample(msgspec.Struct, frozen=True):
    """One response, ready to be trained on.

    Example:
        >>> sample = TrainingSample(SampleId(7, 0, 1), [5, 6], [8, 9], [-0.5, -0.1], advantage=1.5)
        >>> msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=TrainingSample) == sample
        True
    """

    id: SampleId
    prompt_ids: list[int]
    """At least one: the first completion token is predicted from the last of them."""
    completion_ids: list[int]
    """[num_tokens]; may be empty: it then counts as a sample and adds no gradient."""
    logprobs: list[float]
    """[num_tokens]: as recorded when the tokens were drawn, at the sampling temperature."""
    advantage: float
    """Under gae: the reward at the last token."""
    reference_logprobs: list[float] = []
    """[num_tokens]; empty where there is no reference."""
    num_carried: int = 0
    """Leading tokens, up to the last that an older version than the published one drew."""

    @classmethod
    def of(cls, sample: Sample, *, published: int = 0) -> "TrainingSample":
        """published: the version of the weights that were published last."""
        ends = itertools.accumulate(span.num_tokens for span in sample.spans)
        carried = [end for end, span in zip(ends, sample.spans, strict=True) if span.version < published]
        return cls(
            sample.id,
            list(sample.prompt.ids),
            sample.completion_ids,
            sample.behavior_logprobs,
            sample.advantage,
            sample.reference_logprobs,
            max(carried, default=0),
        )

    def __post_init__(self) -> None:
        assert self.prompt_ids, f"sample {self.id}: nothing to predict the first token from"
        assert len(self.logprobs) == len(self.completion_ids), f"sample {self.id}: a log-prob for each token"
