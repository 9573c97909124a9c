"""Episodes: a sample is generated in turns between the router, which serves them, and an environment."""

import asyncio
import math
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tailrace.clock import now
from tailrace.contracts.environments import Environment, EpisodeOver, Outcome
from tailrace.contracts.trainer import Reference
from tailrace.errors import EnvironmentBroken, EnvironmentFailed
from tailrace.record.events import Recorder, SampleScored
from tailrace.rollout.episode import Decode, Episode, Rewritten, diverged
from tailrace.rollout.router import Serve, Written, not_written
from tailrace.types import Prompt, Sample

T = TypeVar("T")

MAX_DETAIL = 4000
"""Characters of a traceback that are kept; the end tells most."""


class Episodes:
    """Plays samples with an environment.

    Args:
        decode: text of token ids.
        episode: makes an Episode of a sample; given are its `serve`, `written` and `rewritten`.
        max_failures: consecutive episodes that fail, which end the run.
        episode_timeout_s: of one episode, without the time in which the policy generates. None: no limit.
        history: makes what Episode takes as `rewritten`. None: turns extend what the policy wrote.
        must_reward: an episode without a reward fails, because nothing else gives it one.
        reference: log-probs of the samples that the environment rewards; the others get theirs when they are
            scored. None: the algorithm needs none.
    """

    def __init__(
        self,
        environment: Environment,
        decode: Decode,
        episode: Callable[..., Episode],
        *,
        max_failures: int,
        episode_timeout_s: float | None = None,
        must_reward: bool = False,
        reference: Reference | None = None,
        history: Callable[[Prompt], Rewritten] | None = None,
    ) -> None:
        self._environment, self._decode, self._episode = environment, decode, episode
        self._max_failures, self._reference, self._history = max_failures, reference, history
        self._episode_timeout_s, self._must_reward = episode_timeout_s, must_reward
        self._num_failures, self._first_failure = 0, ""

    async def run(
        self, sample: Sample, serve: Serve, recorder: Recorder, written: Written = not_written
    ) -> None:
        """Run an episode, or go on with one, until it ends. One that has ended is played again over its
        record to be verified (`Sample.to_verify`). It keeps its end and its reward unless a turn changes.

        If the environment raises, the sample fails with the reason "environment NAME". Raises an
        EnvironmentBroken if too many episodes in sequence have failed."""
        broken: list[Exception] = []  # errors of engines, ledger and reference, which end the run

        async def kept(work: Awaitable[T]) -> T:
            try:
                return await work
            except Exception as why:
                broken.append(why)
                raise

        limit = asyncio.timeout(self._episode_timeout_s)

        async def generate(sample: Sample) -> None:
            with _paused(limit):
                await kept(serve(sample))

        had_ended = sample.to_verify and not sample.in_episode
        sample.in_episode = not had_ended
        is_stored = sample.id.prompt >= 0  # not one of an evaluation
        episode = self._episode(
            sample,
            generate,
            written=lambda: kept(written() if is_stored else not_written()),
            rewritten=self._history and self._history(sample.prompt),
        )
        detail = ""
        try:
            outcome = await self._run(sample, episode, limit)
            if sample.to_verify:
                raise diverged()  # it ended before its last turn
            if sample.in_episode and outcome.reward is not None and self._reference:
                sample.reference_logprobs = _checked(await kept(self._reference.logprobs(sample)))
        # An environment may raise CancelledError by itself: a task that it awaits was cancelled.
        except (Exception, asyncio.CancelledError, SystemExit) as why:
            if broken:
                raise broken[0] from None
            _raise_if_cancelled()
            outcome, detail = Outcome(), self._fail(sample, why)
        else:
            self._num_failures = 0
        if not sample.in_episode:
            return  # it had ended, and nothing has changed
        self._end(sample, outcome)
        if sample.scored and is_stored:
            scored = SampleScored(now(), sample.id, sample.reward, sample.failure, sample.num_tokens, detail)
            recorder.emit(scored)

    async def _run(self, sample: Sample, episode: Episode, limit: asyncio.Timeout) -> Outcome:
        try:
            async with limit:
                outcome = await self._environment.run(sample.prompt, episode)
        except EpisodeOver as why:
            if self._must_reward:
                agent = f", and the agent raised {why.__cause__!r}" if why.__cause__ else ""
                is_cut = sample.turns and sample.turns[-1].finish_reason == "length"
                what = "its last turn was cut off" if is_cut else "no room was left for another turn"
                raise _no_reward(what + agent) from why
            return Outcome()
        except TimeoutError as why:
            if not limit.expired():
                raise
            raise EnvironmentFailed("timeout", f"it took more than {self._episode_timeout_s:g} s") from why
        _raise_if_cancelled()
        if not sample.turns:
            raise EnvironmentFailed("no turn", "it ended before the first turn of the policy")
        if outcome.reward is None and self._must_reward:
            raise _no_reward("the environment gave none")
        if outcome.reward is not None and not math.isfinite(outcome.reward):
            raise EnvironmentFailed("reward", f"its reward is {outcome.reward}")
        metrics = {name: float(value) for name, value in outcome.metrics.items()}
        if not all(map(math.isfinite, metrics.values())):
            raise EnvironmentFailed("metrics", f"one of its metrics is not finite: {metrics}")
        return Outcome(outcome.reward, metrics)

    def _end(self, sample: Sample, outcome: Outcome) -> None:
        """All at once, because the sample may be written down at any await."""
        sample.reward_metrics = {f"environment/{name}": value for name, value in outcome.metrics.items()}
        if outcome.reward is not None:
            sample.reward = float(outcome.reward)
        if sample.scored:
            sample.text = self._decode(sample.scored_ids)
        sample.finish_reason = sample.finish_reason or "stop"
        sample.in_episode = False

    def _fail(self, sample: Sample, why: BaseException) -> str:
        """Count the failure. Returns what is known of it."""
        if isinstance(why, EnvironmentFailed):
            reason, detail = why.reason, why.detail
        else:
            reason = type(why).__name__
            detail = "".join(traceback.format_exception(why))[-MAX_DETAIL:]
        sample.failure, sample.reward = f"environment {reason}", None
        sample.in_episode, sample.to_verify = True, False
        self._first_failure = self._first_failure if self._num_failures else f"{reason}: {detail}"
        self._num_failures += 1
        if self._num_failures >= self._max_failures:
            raise EnvironmentBroken(self._num_failures, self._first_failure)
        return detail.encode(errors="replace").decode()  # it may quote what is not Unicode


@contextmanager
def _paused(limit: asyncio.Timeout) -> Iterator[None]:
    """Stop the clock in the block. Raises a TimeoutError if the limit is over and the environment goes on."""
    if limit.expired():
        raise TimeoutError
    when = limit.when()
    left_s = None if when is None else when - now()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(None if left_s is None else now() + left_s)


def _no_reward(why: str) -> EnvironmentFailed:
    remedy = "let the environment give a reward then, or name reward.function"
    return EnvironmentFailed("no reward", f"{why}, and no reward function is named; {remedy}")


def _raise_if_cancelled() -> None:
    """Raises CancelledError if the episode is parked or discarded, whatever its environment made of that."""
    task = asyncio.current_task()
    if task and task.cancelling():
        raise asyncio.CancelledError


def _checked(logprobs: list[float]) -> list[float]:
    if not all(map(math.isfinite, logprobs)):
        raise EnvironmentFailed("reference", "a log-prob under the reference model is not finite")
    return logprobs
