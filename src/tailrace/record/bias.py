"""Which prompts and responses a schedule prefers: those it has trained, against those it has drawn.

A response to a drawn prompt is trained, given up, or still under way. The length of one that is not complete
is censored: it would be longer. So the mean length of all responses is the Kaplan-Meier estimate (Journal of
the American Statistical Association 53, 1958); what it leaves beyond the longest response counts as long as
that. The estimate takes a cut for chance. A loser of a race is cut because it is long, so there the bias is
exaggerated (docs/reference/bias.md). A member of a group that begins again counts once, with its longest
attempt: the noise is the same. Of a resumed run the figures are those of its last process.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tailrace.record import events
from tailrace.record.events import Event, Row
from tailrace.record.figures import in_family
from tailrace.types import Sample, SampleId

BITS = 6
"""Leading bits in which the lengths of a bin agree."""


@dataclass(slots=True)
class _Member:
    """A response to a drawn prompt."""

    num_tokens: int = 0
    is_complete: bool = False
    reward: float | None = None


@dataclass(slots=True)
class _Responses:
    """Responses to drawn prompts: their lengths in bins, and the rewards of those that have one."""

    complete: Counter[int] = field(default_factory=Counter)
    censored: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    """Tokens of all responses of a bin."""
    num_rewards: int = 0
    rewards: float = 0.0
    """Their sum."""

    def add(self, members: Iterable[_Member]) -> None:
        for each in members:
            shift = max(0, each.num_tokens.bit_length() - BITS)
            length = each.num_tokens >> shift << shift
            (self.complete if each.is_complete else self.censored)[length] += 1
            self.tokens[length] += each.num_tokens
            self.num_rewards += each.reward is not None
            self.rewards += each.reward or 0.0

    def __add__(self, other: "_Responses") -> "_Responses":
        bins = (self.complete + other.complete, self.censored + other.censored, self.tokens + other.tokens)
        return _Responses(*bins, self.num_rewards + other.num_rewards, self.rewards + other.rewards)

    @property
    def mean_tokens(self) -> float:
        at_risk, left, total, length = self.complete.total() + self.censored.total(), 1.0, 0.0, 0.0
        for each in sorted(self.complete | self.censored):
            num = self.complete[each] + self.censored[each]
            length, share = self.tokens[each] / num, left * self.complete[each] / at_risk
            total, left, at_risk = total + share * length, left - share, at_risk - num
        return total + left * length


class BiasMeter:
    """Reads events; `figures` compares what was trained until now with what was drawn."""

    def __init__(self) -> None:
        self._open: dict[int, defaultdict[int, _Member]] = {}
        """The members, by number, of each prompt without a fate."""
        self._closed = _Responses()
        """Responses to prompts that have a fate."""
        self._trained = _Responses()
        self._drawn_from, self._trained_from = Counter[str](), Counter[str]()
        """Prompts drawn and samples trained, by data source."""
        self._ages = self._ages_of_tokens = self._round = 0

    def on(self, event: Event) -> None:
        match event:
            case events.RoundStarted():
                self._round = event.round
            case events.GroupDrawn():
                self._drawn_from[event.group.prompt.source] += 1
                self._open[event.group.prompt.index] = defaultdict(_Member)
                for sample in event.group.samples:
                    self._observe(sample.id, sample.num_tokens, sample.scored, sample.reward)
            case events.RequestEnded():
                self._observe(event.sample, event.num_tokens)
            case events.TokensWasted(reason="changed"):
                if event.sample.prompt in self._open:
                    self._open[event.sample.prompt].pop(event.sample.number, None)  # it goes on
            case events.TokensWasted() if event.sample.prompt not in self._open:
                self._closed.add([_Member(event.num_tokens)])  # an abort has outlived its group
            case events.SampleScored():
                self._observe(event.sample, event.num_tokens, True, event.reward)
            case events.GroupEnded():
                self._closed.add(self._open.pop(event.prompt, {}).values())
            case events.Stepped():
                for sample in event.samples:
                    self._train(sample)

    def figures(self) -> Row:
        """The figures so far, after at least one step."""
        alive = _Responses()
        for members in self._open.values():
            alive.add(members.values())
        drawn, trained, num = self._closed + alive, self._trained, self._trained.complete.total()
        row = {
            "bias/length": trained.mean_tokens / drawn.mean_tokens - 1.0 if drawn.mean_tokens else 0.0,
            "bias/delay": self._ages_of_tokens / max(1, trained.tokens.total()) - self._ages / num,
        }
        if trained.num_rewards and drawn.num_rewards:
            row["bias/reward"] = trained.rewards / trained.num_rewards - drawn.rewards / drawn.num_rewards
        all_drawn, shares = self._drawn_from.total(), dict[str, float]()
        for source in sorted(filter(None, self._drawn_from)):
            shares[source] = self._trained_from[source] / num - self._drawn_from[source] / all_drawn
        return row | in_family("bias/source/", shares.items())

    def _observe(
        self, id: SampleId, num_tokens: int, is_complete: bool = False, reward: float | None = None
    ) -> None:
        if (members := self._open.get(id.prompt)) is None:
            return
        member = members[id.number]
        member.num_tokens = max(member.num_tokens, num_tokens)
        if is_complete:
            member.is_complete, member.reward = True, reward

    def _train(self, sample: Sample) -> None:
        age = self._round - sample.group.round_drawn
        self._trained.add([_Member(sample.num_tokens, True, sample.reward)])
        self._trained_from[sample.prompt.source] += 1
        self._ages += age
        self._ages_of_tokens += age * sample.num_tokens
