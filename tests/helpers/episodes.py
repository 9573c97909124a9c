"""Episodes by hand: a turn ends, and an environment answers with tokens."""

from collections.abc import Sequence

from tailrace.types import Sample, Turn


def answer(sample: Sample, ids: Sequence[int], *, begins_branch: bool = False) -> None:
    """End the turn, and begin the next one after the environment's tokens."""
    assert sample.finish_reason is not None
    turn = Turn(sample.num_tokens, sample.finish_reason, observation_ids=list(ids))
    turn.begins_branch = begins_branch
    sample.turns.append(turn)
    sample.finish_reason = None


def two_turns(sample: Sample, first: Sequence[int], observation: Sequence[int], last: Sequence[int]) -> None:
    """Both turns of an episode that has ended, with log-probs of -0.5 and -0.25."""
    sample.extend(first, [-0.5] * len(first), 0)
    sample.finish_reason = "stop"
    answer(sample, observation)
    sample.extend(last, [-0.25] * len(last), 1)
    sample.finish_reason = "stop"
    sample.turns.append(Turn(sample.num_tokens, "stop"))
