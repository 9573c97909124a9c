"""Rewards, as the controller sees them: processes that make one call after another and may be killed.

What finishes together is scored together: calls that are quick travel in one message, and so does what
waits until they are answered. So a reward that takes microseconds does not cost two wake-ups of the
controller. Where a call hangs or ends its process, those it travelled with are made again, each alone: then
it is known which one it was.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from typing import TypeAlias

import msgspec

from tailrace.clock import now, waiting
from tailrace.data.tokenizer import Tokenizer, text_of
from tailrace.errors import RewardFailed, WorkerDied
from tailrace.types import Sample
from tailrace.workers.exits import kill_group
from tailrace.workers.messages import BadConfig, Call, Failed, FromScorer, Score, Scored, ScorerJob, Serving
from tailrace.workers.process import WorkerProcess

TOGETHER_S = 0.01
"""Calls travel together as long as all of them take less."""
MOST_TOGETHER = 256

Outcomes: TypeAlias = asyncio.Future[list[float | Failed] | Failed]
"""Of each call; or why there are none."""


class RemoteScorer:
    """The calls are made by a fork of the process, one after another. It is replaced when a call hangs or
    ends it (reward_child.py)."""

    def __init__(self, process: WorkerProcess, timeout_s: float) -> None:
        self.process = process
        self._timeout_s = timeout_s
        self._loaded = process.promise()
        self._fork: int | None = None
        """Process group of the fork; None before there is one."""
        self._number = 0
        """Of what was asked last."""
        self._outcomes: Outcomes | None = None
        """Of the calls being made; None when there are none."""
        self._expired = False
        """They took too long: the fork is killed, and what it says does not count."""
        process.on_message = self._hear

    @classmethod
    async def spawn(cls, name: str, job: ScorerJob, *, logs: Path) -> "RemoteScorer":
        """Start the process; `ready` waits until it has loaded the reward function."""
        decoder = msgspec.msgpack.Decoder(FromScorer)
        process = await WorkerProcess.spawn(name, "tailrace.workers.reward_child", job, decoder, logs=logs)
        return cls(process, job.reward.timeout_s)

    async def ready(self) -> None:
        """Wait until the reward function is loaded.

        Raises:
            ConfigError: it cannot be.
        """
        with waiting(f"{self.process.name} to load the reward function"):
            first = await self._loaded
        if isinstance(first, BadConfig):
            raise first.error()

    def call(self, calls: list[Call]) -> Outcomes:
        """Make calls in turn, within `timeout_s`: the only ones until the future is done, which is not to be
        cancelled.

        The future may fail, with WorkerDied, if not the fork but the process that forks ends. What makes it a
        Failed is 'timeout', 'died', or 'row' where a row is not plain data.
        """
        self._number += 1
        self._outcomes = outcomes = self.process.promise()
        try:
            self.process.send(Score(self._number, calls))
        except (TypeError, OverflowError) as error:
            self._finish(Failed("row", str(error)))
            return outcomes
        except WorkerDied:  # so says the promise
            return outcomes
        self._expired = False
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)
        outcomes.add_done_callback(lambda outcomes: self._leave(outcomes, timer))
        return outcomes

    async def close(self) -> None:
        """End the processes; a call being made is killed."""
        if self._outcomes is not None:
            self._kill_fork()
        await self.process.close()

    def _hear(self, message: msgspec.Struct) -> None:
        match message:
            case BadConfig():
                self._loaded.set_result(message)
            case Serving(pid=pid, ended=ended):
                self._fork = pid
                if not self._loaded.done():
                    self._loaded.set_result(message)
                elif self._expired:
                    self._finish(Failed("timeout", f"no reward in {self._timeout_s:g} s"))
                else:
                    self._finish(Failed("died", f"the call ended its process: {ended}"))
            case Scored(number=number, outcomes=outcomes):
                if number == self._number and not self._expired:
                    self._finish(outcomes)

    def _finish(self, outcomes: list[float | Failed] | Failed) -> None:
        if self._outcomes is not None and not self._outcomes.done():
            self._outcomes.set_result(outcomes)
        self._outcomes = None

    def _expire(self) -> None:
        self._expired = True
        self._kill_fork()

    def _leave(self, outcomes: Outcomes, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        if outcomes.exception() is not None:  # nobody else would end the fork
            self._kill_fork()
            self._outcomes = None

    def _kill_fork(self) -> None:
        if self._fork is not None:
            kill_group(self._fork)


@dataclass(slots=True)
class _Wanted:
    call: Call
    reward: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    alone: bool = False
    """It travelled with one that hung or ended its process, or is that one."""

    def settle(self, outcome: float | Failed | BaseException) -> None:
        if self.reward.done():  # nobody waits for it any more
            return
        match outcome:
            case Failed(reason=reason, detail=detail):
                self.reward.set_exception(RewardFailed(reason, detail))
            case BaseException():
                self.reward.set_exception(outcome)
            case _:
                self.reward.set_result(outcome)


class RewardPool:
    """Rewards (reward/base.py) from several scorers."""

    def __init__(self, scorers: Sequence[RemoteScorer], tokenizer: Tokenizer) -> None:
        self._text_of = text_of(tokenizer)
        self._free = deque(scorers)
        self._line: deque[_Wanted] = deque()
        self._most = 1
        """How many calls may travel together now."""

    async def score(self, sample: Sample) -> float:
        """As Rewards.score. When it is cancelled, the call goes on if it has begun, and nobody hears what
        comes of it.

        Raises:
            WorkerDied: a scorer's process ended, not just the call.
        """
        sample.text = self._text_of(sample.completion_ids)
        wanted = _Wanted(Call(sample.prompt.text, sample.text, sample.prompt.row))
        if not self._line:  # what else finishes in this tick of the loop comes along
            asyncio.get_running_loop().call_soon(self._hand_out)
        self._line.append(wanted)
        return await wanted.reward

    def _hand_out(self) -> None:
        while self._free and (wanted := self._next(ceil(len(self._line) / len(self._free)))):
            scorer = self._free.popleft()
            outcomes = scorer.call([each.call for each in wanted])
            outcomes.add_done_callback(partial(self._take_back, scorer, wanted, now()))

    def _next(self, most: int) -> list[_Wanted]:
        """The first of the line that somebody still waits for, at most so many."""
        wanted: list[_Wanted] = []
        while self._line and len(wanted) < min(most, self._most):
            if wanted and (wanted[-1].alone or self._line[0].alone):
                break
            first = self._line.popleft()
            if not first.reward.done():
                wanted.append(first)
        return wanted

    def _take_back(
        self, scorer: RemoteScorer, wanted: list[_Wanted], sent_s: float, outcomes: Outcomes
    ) -> None:
        self._free.append(scorer)
        quick = now() - sent_s < TOGETHER_S
        self._most = min(2 * self._most, MOST_TOGETHER) if quick else max(1, self._most // 2)
        if died := outcomes.exception():
            for each in wanted:
                each.settle(died)
        elif isinstance(judged := outcomes.result(), list):
            for each, outcome in zip(wanted, judged, strict=True):
                each.settle(outcome)
        elif len(wanted) == 1:
            wanted[0].settle(judged)
        else:
            for each in reversed(wanted):
                each.alone = True
                self._line.appendleft(each)
        self._hand_out()
