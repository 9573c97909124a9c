"""What flows: Prompt -> Sample -> Group -> trainer. Data without tasks.

Whatever a task learns about a sample is written into the sample at once, so cancelling the task
loses nothing: a sample whose generation was cancelled is a valid shorter sample.

Suffixes: `num_` counts, `_s` seconds, `_tokens` tokens. A `version` is a publication of weights: the
engines start with version 0, and every publish adds one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")

FinishReason = Literal["stop", "length"]
KV = Literal["keep", "recompute"]


class SampleId(NamedTuple):
    """Never reused: a late answer to a sample that was started afresh finds nobody.

    Example:
        >>> str(SampleId(prompt=12, attempt=0, number=3))
        '12.0/3'
    """

    prompt: int
    attempt: int
    number: int

    def __str__(self) -> str:
        return f"{self.prompt}.{self.attempt}/{self.number}"


def noise_seed(seed: int, id: SampleId) -> int:
    """63 bits that depend on the run's seed and the sample, and not on the attempt: to start afresh is not to
    draw again. Whether a response turns out long then never decides whether its noise is trained on, and
    putting prompts off does not bias lengths."""
    digest = blake2b(f"{seed} {id.prompt}/{id.number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Span(NamedTuple):
    """Consecutive tokens that one version of the policy produced."""

    version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data, tokenised once. `index` is its place in the run's order and its identity."""

    index: int
    ids: Sequence[int]
    text: str = ""
    row: Mapping[str, object] = field(default_factory=dict)
    """The row's own columns, for the reward function."""
    row_number: int | None = None
    """Which row of the data it is: the same in every epoch. None where the data never comes again."""


@dataclass(eq=False, slots=True)
class Sample:
    """One response to a prompt."""

    id: SampleId
    group: "Group"
    seed: int = 0
    """The noise of its token t is a function of (seed, t): the same on any engine, in any batch."""
    completion_ids: list[int] = field(default_factory=list)
    """[num_tokens]; empty in a simulation, where only the count is real."""
    logprobs: list[float] = field(default_factory=list)
    """[num_tokens]: of each token, under the version that produced it, at the sampling temperature."""
    reference_logprobs: list[float] = field(default_factory=list)
    """[num_tokens]: under the reference model; empty where there is none. Set before the reward."""
    spans: list[Span] = field(default_factory=list)
    """Who produced which tokens, in order."""
    num_tokens: int = 0
    engine: str | None = None
    """Who serves it or did so last, and may still hold its keys and values; None: nobody."""
    finish_reason: FinishReason | None = None
    """The only truth about 'finished'."""
    text: str = ""
    """The completion as the reward saw it; set when it is scored."""
    reward: float | None = None
    timed_out: bool = False
    """Its reward is zero because the reward function exceeded its time limit."""
    failure: str | None = None
    """Why it has no reward; None while it may still get one."""
    advantage: float = 0.0
    """Set when its group is materialised. Under gae: the shaped reward, of which the critic makes an
    advantage a token."""
    fate: str | None = None
    """'trained', or the reason for which its tokens are waste; None while it lives."""

    @property
    def prompt(self) -> Prompt:
        return self.group.prompt

    @property
    def oldest(self) -> int:
        """The oldest version among its tokens. Engines update at different moments, so not spans[0]."""
        return min(span.version for span in self.spans)

    @property
    def judged(self) -> bool:
        """Rewarded, or known never to be."""
        return self.reward is not None or self.failure is not None

    def grow(self, num_tokens: int, version: int) -> None:
        """Count tokens produced by `version`."""
        if num_tokens == 0:
            return
        self.num_tokens += num_tokens
        born = self.group.oldest_version
        self.group.oldest_version = version if born is None else min(version, born)
        if self.spans and self.spans[-1].version == version:
            num_tokens += self.spans.pop().num_tokens
        self.spans.append(Span(version, num_tokens))

    def extend(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append tokens produced by `version`, each with its log-prob."""
        assert len(ids) == len(logprobs), (len(ids), len(logprobs))
        self.completion_ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.grow(len(ids), version)


@dataclass(eq=False, slots=True)
class Group:
    """The samples of one prompt: the unit that trains.

    Complete when `need` of its samples are finished and judged. Launched with more than `need`, it is a
    race, and the first `need` to finish are kept.
    """

    prompt: Prompt
    num_required: int
    samples: list[Sample]
    num_launched: int = 0
    """How many samples it was drawn with."""
    kept: list[Sample] = field(default_factory=list)
    """Finished first, in the order they finished; at most `need`."""
    attempt: int = 0
    order: int = 0
    """Place in the line of the pool, given at launch."""
    born: int | None = None
    """Version of its oldest token; None before the first."""
    drawn: int = 0
    """The round it was drawn in."""
    deferrals: int = 0
    """How often it was parked or put off."""
    fate: str | None = None
    """'trained', 'filtered' or 'dropped'; None while it lives."""

    @property
    def serving_complete(self) -> bool:
        """All it needs is generated: its place in the frontier is free (RolloutPipe 3.3)."""
        return len(self.kept) == self.need

    @property
    def complete(self) -> bool:
        """Trainable-complete but for the filter: generated and judged (RolloutPipe 3.3)."""
        return self.serving_complete and all(sample.scored for sample in self.kept)

    @property
    def trainable(self) -> list[Sample]:
        """The kept samples that have a reward."""
        return [sample for sample in self.kept if sample.reward is not None]

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)


Batch = Iterable[Group | Sample]
"""What can be trained on: whole groups, or samples of groups already materialised."""


def samples_of(batch: Batch) -> list[Sample]:
    """The samples of a batch that carry a gradient, in order."""
    samples: list[Sample] = []
    for item in batch:
        samples.extend(item.trainable if isinstance(item, Group) else [item])
    return samples


def units_of(batch: Batch) -> list[list[Sample]]:
    """What a trainer is given: groups stay whole; loose samples are one unit together."""
    units: list[list[Sample]] = []
    loose: list[Sample] = []
    for item in batch:
        if isinstance(item, Group):
            units.append(item.trainable)
        else:
            loose.append(item)
    return [*units, loose] if loose else units


def batched(items: Sequence[T], n: int) -> list[list[T]]:
    """Consecutive batches of n, as itertools.batched of Python 3.12."""
    return [list(items[start : start + n]) for start in range(0, len(items), n)]
