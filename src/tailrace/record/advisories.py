"""Advice from the optimizer steps for a person: the same sentences in the page, the terminal and
summary.json. Each names a key of the config."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from statistics import fmean
from typing import NamedTuple

from tailrace.record.events import Row
from tailrace.record.figures import CALLS

NUM_STEPS = 5
"""The steps that are looked at."""
NUM_SURE = 3
"""Steps after which the terminal and the summary speak: a single one may be chance."""
ZERO_VARIANCE_SHARE = 0.8
HARD, EASY = 0.1, 0.9
"""Mean rewards, of a right answer worth 1, up to and from which groups of equal rewards are of one kind."""
TRUNCATED_SHARE = 0.25
FAILED_SHARE = 0.2
BIASED_SHARE = 0.1
"""Difference between what was trained and what was drawn above which a schedule counts as biased."""
COLLAPSED_SHARE = 0.1
"""Share of the first steps' entropy below which the policy counts as collapsed."""

Figures = Mapping[str, float | None]
"""A step's object of metrics.jsonl."""


class Advisory(NamedTuple):
    kind: str
    text: str


class Advisor:
    """Reads the steps of a run one by one, and keeps the first advisory of each kind."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        """The texts by kind, each with the step at which it appeared."""
        self._steps: list[Row] = []

    def add(self, row: Row) -> list[Advisory]:
        """Return what appears with a step."""
        self._steps.append(row)
        del self._steps[NUM_STEPS:-NUM_STEPS]  # the first ones and the last ones are looked at
        num = len(self._steps)
        new = [each for each in advisories_of_steps(self._steps) if each.kind not in self.found]
        new = [each for each in new if num >= NUM_SURE or each.kind == "no calls"]
        self.found |= {each.kind: f"step {row['step']:.0f}: {each.text}" for each in new}
        return new


def advisories_of_steps(steps: Sequence[Figures]) -> list[Advisory]:
    """Compare the last steps of a run with its first ones."""
    if not (recent := steps[-NUM_STEPS:]):
        return []
    found = (_zero_variance(recent), _truncation(recent), _failures(recent), _no_calls(recent))
    biased = _bias(recent) if len(steps) >= 2 * NUM_STEPS else ()  # at first the long ones are under way
    return [*chain.from_iterable(found), *_entropy(steps[:NUM_STEPS], recent), *biased]


def _zero_variance(steps: Sequence[Figures]) -> Iterator[Advisory]:
    share, reward = _mean(steps, "frac_reward_zero_std"), _mean(steps, "reward")
    filtered = sums(steps, "groups/filtered/")["zero_variance"]
    trained = sum(row.get("groups/trained") or 0.0 for row in steps)
    if filtered:
        share = (share * trained + filtered) / (trained + filtered)
    if share < ZERO_VARIANCE_SHARE:
        return
    if not any(row.get("reward_std") or row.get("reward") for row in steps):
        why = "no sample is right. The prompts ([data]) are too hard, or reward.function recognises no answer"
    elif 0 < reward <= HARD:
        why = "most groups are all wrong: the prompts ([data]) are too hard. Use easier ones"
    elif EASY <= reward <= 1:
        why = "most groups are all right: the prompts ([data]) are too easy. Use harder ones"
    elif reward > 0:
        why = "most groups are all right or all wrong. Use prompts of middling difficulty ([data])"
    else:
        why = "most groups get the same reward. Look at reward.function and at the prompts ([data])"
    text = f"In {share:.0%} of the groups of {last_steps(steps)} all rewards are equal, so these teach "
    text += f"nothing. The mean reward is {reward:g}: {why}."
    yield Advisory("groups without variance", text)


def _truncation(steps: Sequence[Figures]) -> Iterator[Advisory]:
    share = _mean(steps, "completions/clipped_ratio")
    if share >= TRUNCATED_SHARE:
        longest = max(row.get("completions/max_length") or 0.0 for row in steps)
        text = f"{share:.0%} of the samples of {last_steps(steps)} end at the length limit "
        text += f"({longest:.0f} tokens): their rewards are those of unfinished answers. "
        yield Advisory("truncation", text + "Raise sampling.max_completion_tokens, or shorten the answers.")


def _failures(steps: Sequence[Figures]) -> Iterator[Advisory]:
    failed = sums(steps, "completions/failed/")
    num, trained = sum(failed.values()), sum(row.get("samples/trained") or 0.0 for row in steps)
    if num and num >= FAILED_SHARE * (num + trained):
        reason = max(failed, key=failed.__getitem__)
        text = f"{num:.0f} samples of {last_steps(steps)} have no reward, most by: {reason}. See "
        text += "reward.function, reward.timeout_s and reward.workers."
        yield Advisory("rewards fail", text)


def _no_calls(steps: Sequence[Figures]) -> Iterator[Advisory]:
    if all(row.get(f"rewards/{CALLS}") == 0.0 for row in steps):
        text = f"No sample of {last_steps(steps)} calls a tool. Either the model does not know the tools, or "
        text += "it writes calls in another format than environment.parser: look at samples."
        yield Advisory("no calls", text)


def _entropy(first: Sequence[Figures], steps: Sequence[Figures]) -> Iterator[Advisory]:
    """Entropy that is gone while rewards have not risen. A policy that has learned has little, too."""
    before, now = _mean(first, "entropy"), _mean(steps, "entropy")
    if now < COLLAPSED_SHARE * before and _mean(steps, "reward") <= _mean(first, "reward"):
        text = f"The entropy of the policy has fallen from {before:.3g} to {now:.3g} nats a token, and the "
        text += "reward has not risen: samples of a prompt are nearly the same. "
        yield Advisory("entropy collapse", text + "Lower trainer.learning_rate.")


def _bias(steps: Sequence[Figures]) -> Iterator[Advisory]:
    """Figures that are far from 0 in each of the steps."""
    remedy = "See groups/dropped/, tail/wasted_tokens/ and age/ in metrics.jsonl; another schedule.name may "
    remedy += "train what this one leaves."
    for key in sorted(key for key in steps[-1] if key.startswith("bias/")):
        values = [row.get(key) or 0.0 for row in steps]
        value = min(values, key=abs)
        if abs(value) < BIASED_SHARE or min(values) * max(values) < 0.0:
            continue
        if key == "bias/length":
            than = f"{abs(value):.0%} {'longer' if value > 0.0 else 'shorter'} than all that were drawn"
            yield Advisory("length bias", f"The trained responses are at least {than}. {remedy}")
        elif source := key.partition("bias/source/")[2]:
            text = f"The share of {source!r} in what was trained differs by {value:+.0%} from its share in "
            yield Advisory(f"bias of {source}", f"{text}what was drawn. {remedy}")


def last_steps(steps: Sequence[Figures]) -> str:
    return f"the last {len(steps)} steps" if len(steps) > 1 else "the last step"


def _mean(steps: Sequence[Figures], key: str) -> float:
    values = [value for row in steps if (value := row.get(key)) is not None and isfinite(value)]
    return fmean(values) if values else 0.0


def sums(steps: Sequence[Figures], prefix: str) -> Mapping[str, float]:
    """The sums of the figures that begin with the prefix, by the rest of their names."""
    sums: defaultdict[str, float] = defaultdict(float)
    for row in steps:
        for key, value in row.items():
            if key.startswith(prefix) and value:
                sums[key.removeprefix(prefix)] += value
    return sums
