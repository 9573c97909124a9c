"""Rewards with the scores of judges, and what a run asks of a kind of judge."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tailrace.contracts.memory import ProcessMemory
from tailrace.contracts.reward import Rewards
from tailrace.drivers.reward.calls import Call
from tailrace.drivers.reward.settings import JudgeSettings, RewardSettings
from tailrace.errors import RewardFailed
from tailrace.kinds import kind_of
from tailrace.types import Prompt, Sample

NOT_APPLICABLE = "not applicable"
"""Reason of the failure of a sample to which no reward function applies."""


MAX_ANSWER = 2000
"""Characters of an answer that the record of the sample keeps; the end counts."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's answer about one completion.

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

    async def close(self) -> None:
        """Give open questions up, and close all connections."""


class NoFunctions:
    """`Rewards` of a run without reward functions."""

    async def score(self, sample: Sample) -> float:
        raise RewardFailed(NOT_APPLICABLE, "no reward function and no judge applies to this sample")


class WithJudges:
    """`Rewards` of `others` to which the scores of judges are added. All score at the same time. A judge that
    does not answer in time gives 0, or with `drop_timeouts` fails the sample."""

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
        sample.text = self._text_of(sample.scored_ids)
        call = Call.of(sample)
        judges = [judge for judge in self._judges if judge.settings.applies_to(call.source)]
        asked = [self._ask(judge, call) for judge in judges]
        others, *verdicts = await asyncio.gather(self._others.score(sample), *asked, return_exceptions=True)
        for outcome in (others, *verdicts):
            is_other = isinstance(outcome, RewardFailed) and outcome.reason == NOT_APPLICABLE and judges
            if isinstance(outcome, BaseException) and not is_other:
                raise outcome
        reward = others if isinstance(others, float | int) else 0.0
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

    async def _ask(self, judge: Judge, call: Call) -> Verdict | None:
        """Return the verdict; None after a timeout."""
        try:
            return await judge.judge(call)
        except TimeoutError:
            if self._drop_timeouts:
                raise RewardFailed("timeout", f"{judge.settings.name} did not answer in time") from None
            return None


class JudgeKind(ABC):
    """A kind of judge. The settings are always those of this kind."""

    @abstractmethod
    def check(self, judge: Any, reward: RewardSettings, host: Any, prompts: Sequence[Prompt]) -> str | None:
        """Check a judge before anything starts; return a warning or None. Raises a ConfigError if it cannot
        score completions of these prompts. `host`: its settings."""

    def memory(self, judge: Any) -> Iterable[ProcessMemory]:
        """Estimate the memory of its processes on this machine, after `check`."""
        return ()

    @abstractmethod
    async def begin(self, judge: Any, start: Callable[..., Awaitable[Any]], timeout_s: float) -> Judge:
        """Return a judge; begin the start of its worker, if it has one, with `start` (kind, name, job)."""


def judge_kind(judge: Any) -> JudgeKind:
    """Return the kind of a judge."""
    kind: JudgeKind = kind_of("judge", judge.kind, "reward.judges.kind")
    return kind
