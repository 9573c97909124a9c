"""Judges: models that score completions, beside the reward functions."""

import asyncio
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.errors import ConfigError, RewardFailed
from tailrace.reward.base import Call, Rewards
from tailrace.reward.cases import column_of
from tailrace.reward.judge_settings import JudgeSettings
from tailrace.types import Sample

OWN_NAMES = ("prompt", "completion")
"""What a template may name besides the columns of the data."""
NOT_APPLICABLE = "not applicable"
"""Reason of the failure of a sample to which no reward function applies."""
MAX_ANSWER = 2000
"""Characters of an answer that the record of the sample keeps; the end counts."""
_FIELD = re.compile(r"\{\{([\w.-]+)\}\}|\{([A-Za-z_][\w.-]*)\}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge said of one completion.

    Args:
        score: from 0, the worst, to 1; a reward model's may be any number.
        answer: in words; empty where the judge gives a number only.
    """

    score: float
    answer: str = ""


class Judge(Protocol):
    """A model that scores completions."""

    @property
    def settings(self) -> JudgeSettings: ...

    async def judge(self, call: Call) -> Verdict:
        """Score one completion.

        Raises:
            TimeoutError: it did not answer in time.
            RewardFailed: there is no score.
        """


def names_in(template: str) -> list[str]:
    """Return the names that a template replaces."""
    return [name for _, name in _FIELD.findall(template) if name]


def render(template: str, call: Call) -> str:
    """Fill a template in.

    Raises:
        RewardFailed: the row lacks a column that the template names.
    """

    def value(match: re.Match[str]) -> str:
        literal, name = match.groups()
        if literal:
            return f"{{{literal}}}"
        if name == "prompt":
            return transcript(call)
        found = call.completion if name == "completion" else column_of(call.row, name)
        if found is None:
            raise RewardFailed("judge template", f"the row has no column {name!r}", is_defect=True)
        return str(found)

    return _FIELD.sub(value, template)


def transcript(call: Call) -> str:
    """Return the prompt as the data give it; chat messages with their roles, unless there is one only."""
    if not isinstance(call.given, list):
        return call.prompt if call.given is None else str(call.given)
    contents = [str(message.get("content", "")) for message in call.given]
    if len(contents) == 1:
        return contents[0]
    roles = [message.get("role", "user") for message in call.given]
    return "\n\n".join(f"{role}: {content}" for role, content in zip(roles, contents, strict=True))


def messages_of(settings: JudgeSettings, call: Call) -> list[dict[str, str]]:
    """Return what the judge reads: the template filled in, or without one the conversation.

    Raises:
        RewardFailed: the row lacks a column, or holds text that is not Unicode.
    """
    messages = _messages(settings, call)
    try:
        for message in messages:
            message["content"].encode()
    except UnicodeEncodeError as why:  # JSON can spell halves of surrogate pairs
        raise RewardFailed("judge template", f"the text is not valid Unicode ({why})") from why
    return messages


def _messages(settings: JudgeSettings, call: Call) -> list[dict[str, str]]:
    system = [{"role": "system", "content": settings.system}] if settings.system is not None else []
    if settings.template is not None:
        return [*system, {"role": "user", "content": render(settings.template, call)}]
    asked = call.given if isinstance(call.given, list) else [{"role": "user", "content": transcript(call)}]
    plain = [{"role": str(each.get("role")), "content": str(each.get("content", ""))} for each in asked]
    return [*system, *plain, {"role": "assistant", "content": call.completion}]


def check_templates(judges: Sequence[JudgeSettings], rows: Sequence[Mapping[str, object]]) -> None:
    """Match the templates to the columns of the data before anything starts.

    Raises:
        ConfigError: a template names a column that the data lack.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for judge in judges:
        for name in names_in(judge.template or ""):
            if name not in OWN_NAMES and all(column_of(row, name) is None for row in rows):
                problem = f"{{{name}}} is no column of the data (columns: {', '.join(columns) or 'none'})"
                remedy = f"name a column, or write {{{{{name}}}}} for the text {{{name}}}"
                raise ConfigError("reward.judges.template", judge.template, problem, remedy)


def check_sources(judges: Sequence[JudgeSettings], sources: Collection[str], *, alone: bool) -> None:
    """Check the names of the sources that judges score.

    Args:
        sources: of a mixture; empty: they are known only when rows are read.
        alone: nothing but judges scores samples.

    Raises:
        ConfigError: the data have no such source, or no judge scores one.
    """
    key = "reward.judges.sources"
    for named in [name for judge in judges for name in judge.sources or () if sources]:
        if named not in sources:
            remedy = f"choose from {', '.join(sources)}"
            raise ConfigError(key, named, "the data have no such source", remedy)
    for source in sources if alone else ():
        if not any(judge.applies_to(source) for judge in judges):
            remedy = "add a judge or a function for it"
            raise ConfigError(key, source, "no judge scores this source", remedy)


class NoFunctions:
    """Rewards (reward/base.py) of a run without reward functions."""

    async def score(self, sample: Sample) -> float:
        raise RewardFailed(NOT_APPLICABLE, "no reward function and no judge applies to this sample")


class WithJudges:
    """Rewards (reward/base.py) to which the scores of judges are added.

    Reward functions and judges work at the same time. A judge that does not answer in time gives 0.

    Args:
        others: scores samples apart from the judges.
        drop_timeouts: a timeout fails the sample.
    """

    def __init__(
        self,
        others: Rewards,
        judges: Sequence[Judge],
        text_of: Callable[[Sequence[int]], str],
        *,
        drop_timeouts: bool,
    ) -> None:
        self._others, self._judges, self._text_of = others, judges, text_of
        self._drop_timeouts = drop_timeouts

    async def score(self, sample: Sample) -> float:
        """As Rewards.score."""
        sample.text = self._text_of(sample.scored_ids)
        call = Call.of(sample)
        judges = [judge for judge in self._judges if judge.settings.applies_to(call.source)]
        asked = [self._ask(judge, call) for judge in judges]
        others, *verdicts = await asyncio.gather(self._score(sample), *asked, return_exceptions=True)
        for outcome in (others, *verdicts):
            is_other = isinstance(outcome, RewardFailed) and outcome.reason == NOT_APPLICABLE and judges
            if isinstance(outcome, BaseException) and not is_other:
                raise outcome
        reward = others if isinstance(others, float) else 0.0
        for judge, verdict in zip(judges, verdicts, strict=True):
            name, score = judge.settings.name, 0.0
            if isinstance(verdict, Verdict):
                score = verdict.score
                sample.reward_metrics[name] = score
                if verdict.answer:
                    sample.reward_columns[f"{name}/answer"] = verdict.answer[-MAX_ANSWER:]
            else:
                sample.timed_out = True
            reward += judge.settings.weight * score
        return reward

    async def _score(self, sample: Sample) -> float:
        return float(await self._others.score(sample))

    async def _ask(self, judge: Judge, call: Call) -> Verdict | None:
        """Return the verdict; None after a timeout."""
        try:
            return await judge.judge(call)
        except TimeoutError:
            if self._drop_timeouts:
                raise RewardFailed("timeout", f"{judge.settings.name} did not answer in time") from None
            return None
