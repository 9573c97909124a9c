"""The samples that the controller sends to a trainer process: plain values without tensors."""

import msgspec

from tailrace.algo.base import TokenLossName
from tailrace.turns import Branch
from tailrace.types import Sample, SampleId


class TrainingSample(msgspec.Struct, frozen=True):
    """One response with what its loss needs.

    Example:
        >>> sample = TrainingSample(SampleId(7, 0, 1), [5, 6], [8, 9], [-0.5, -0.1], advantage=1.5)
        >>> msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=TrainingSample) == sample
        True
    """

    id: SampleId
    prompt_ids: list[int]
    """At least one token: the first completion token is predicted from the last prompt token."""
    completion_ids: list[int]
    """[num_tokens]. May be empty: the sample is counted and adds no gradient."""
    behavior_logprobs: list[float]
    """[num_tokens]: log-probs under the policy that generated each token, at the sampling temperature."""
    advantage: float
    """Advantage of every token. Under gae: the reward, received at the last token."""
    reference_logprobs: list[float] = []
    """[num_tokens]: log-probs under the reference model. Empty if there is none."""
    num_masked: int = 0
    """Number of leading tokens that are context only: masked out of the loss."""
    is_carried: bool = False
    """Whether an older version than the published one generated some of its tokens."""
    observations: list[tuple[int, list[int]]] = []
    """The environment's tokens, each time with the number of completion tokens before them. The model reads
    them; they are not trained. The last token is one of the completion."""
    branches: list[tuple[int, list[int]]] = []
    """For each later branch (turns.py): the number of completion tokens before it, and its context. The model
    reads it as a sequence of its own; in every other respect its tokens are those of the sample."""

    @classmethod
    def of(cls, sample: Sample, *, published: int = 0) -> "TrainingSample":
        """Make a training sample of a sample. `published`: the version that was published last."""
        branches = sample.branches
        observations = [each for branch in branches for each in branch.observations]
        return cls(
            sample.id,
            list(sample.prompt.ids),
            sample.completion_ids,
            sample.behavior_logprobs,
            sample.advantage,
            sample.reference_logprobs,
            sample.num_masked,
            sample.num_older(published) > 0,
            [each for each in observations if each[0] < sample.num_tokens],
            [
                (branch.start, list(branch.context_ids))
                for branch in branches[1:]
                if branch.start < sample.num_tokens
            ],
        )

    def __post_init__(self) -> None:
        assert self.prompt_ids, f"sample {self.id}: it has no prompt token to predict its first token from"
        assert len(self.behavior_logprobs) == len(self.completion_ids), (
            f"sample {self.id}: {len(self.completion_ids)} tokens, {len(self.behavior_logprobs)} log-probs"
        )

    @property
    def num_loss_tokens(self) -> int:
        """Completion tokens in the loss."""
        return len(self.completion_ids) - self.num_masked

    @property
    def sequences(self) -> list[Branch]:
        """Sequences that the model reads, one by one."""
        starts, contexts = zip((0, self.prompt_ids), *self.branches, strict=True)
        ends = [*starts[1:], len(self.completion_ids)]
        return [
            Branch(context, start, end, [each for each in self.observations if start <= each[0] < end])
            for start, end, context in zip(starts, ends, contexts, strict=True)
        ]

    @property
    def num_input_tokens(self) -> int:
        """Tokens that a forward pass computes: the last token of a sequence is a target only."""
        num_observed = sum(len(ids) for _, ids in (*self.observations, *self.branches))
        num_targets = len(self.completion_ids)
        return len(self.prompt_ids) + num_observed + max(0, num_targets - 1 - len(self.branches))


class TokenLoss(msgspec.Struct, frozen=True):
    """A loss that is a sum over tokens (`losses.token_loss`), with its parameters."""

    name: TokenLossName
    clip_low: float = 0.8
    clip_high: float = 1.2
    beta: float = 0.05


class LossDatum(msgspec.Struct, frozen=True):
    """A sequence with an advantage for each token.

    Args:
        ids: [1 + num_tokens]; the first token is not a target.
        advantages: [num_tokens]; under cross_entropy the weights of the tokens.
        old_logprobs: [num_tokens]; empty where the loss has no ratio.
        sampled: [num_tokens]; other than 0 at the tokens of gspo's mean and of stable_reinforce's KL; empty
            under the other losses.
    """

    ids: list[int]
    advantages: list[float]
    old_logprobs: list[float] = []
    sampled: list[float] = []

    @property
    def in_loss(self) -> list[bool]:
        """[num_tokens]: whether a target changes the loss, but for dro, under which each one does."""
        sampled = self.sampled or [0.0] * len(self.advantages)
        return [bool(advantage or mark) for advantage, mark in zip(self.advantages, sampled, strict=True)]

    @property
    def num_leading(self) -> int:
        """Leading targets that are not in the loss; the last target is none of them."""
        last = len(self.advantages) - 1
        return next((number for number, each in enumerate(self.in_loss[:last]) if each), last)

    def sample(self, number: int, start: int = 0) -> TrainingSample:
        """The sequence as the trainer packs it; the targets before `start` are part of the prompt."""
        old_logprobs = self.old_logprobs[start:] or [0.0] * (len(self.advantages) - start)
        prompt, targets = self.ids[: start + 1], self.ids[start + 1 :]
        return TrainingSample(SampleId(number, 0, 0), prompt, targets, old_logprobs, 0.0)


class LossOutput(msgspec.Struct, frozen=True):
    """The log-probs and losses of a datum, [num_tokens]; `number` is its place in the call."""

    number: int
    logprobs: list[float]
    losses: list[float]


class AdamStep(msgspec.Struct, frozen=True):
    """Parameters of one AdamW step, in place of the settings'. `max_grad_norm` 0: no clipping."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
