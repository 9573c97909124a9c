"""Rewards, as the controller sees them: processes that make one call at a time and may be killed."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from tailrace.clock import waiting
from tailrace.data.tokenizer import Tokenizer
from tailrace.errors import RewardFailed, WorkerDied
from tailrace.types import Sample
from tailrace.workers.exits import kill_group
from tailrace.workers.messages import BadConfig, Failed, FromScorer, Score, Scored, ScorerJob, Serving
from tailrace.workers.process import WorkerProcess

Outcome: TypeAlias = asyncio.Future[Scored | Failed]


class RemoteScorer:
    """One call at a time. The calls are made by a fork of the process, which is replaced when a call hangs
    or ends it (reward_child.py)."""

    def __init__(self, process: WorkerProcess, timeout_s: float) -> None:
        self.process = process
        self._timeout_s = timeout_s
        self._loaded = process.promise()
        self._fork: int | None = None
        """Process group of the fork; None before there is one."""
        self._number = 0
        """Of the latest call."""
        self._outcome: Outcome | None = None
        """Of the call being made; None between calls."""
        self._expired = False
        """The call being made took too long: its fork is killed, and what it says does not count."""
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

    def call(self, prompt: str, completion: str, row: Mapping[str, object]) -> Outcome:
        """Make a call: the only one until its future is done, which is not to be cancelled.

        The future may fail, with WorkerDied, if not the call but the process that forks ends. Reasons of
        ours are 'timeout', 'died', and 'row' where the row is not plain data.
        """
        self._number += 1
        self._outcome = outcome = self.process.promise()
        try:
            self.process.send(Score(self._number, prompt, completion, row))
        except (TypeError, OverflowError) as error:
            self._finish(Failed(self._number, "row", str(error)))
            return outcome
        except WorkerDied:  # so says the promise
            return outcome
        self._expired = False
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)
        outcome.add_done_callback(lambda outcome: self._leave(outcome, timer))
        return outcome

    async def close(self) -> None:
        """End the processes; a call being made is killed."""
        if self._outcome is not None:
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
                    self._finish(Failed(self._number, "timeout", f"no reward in {self._timeout_s:g} s"))
                else:
                    self._finish(Failed(self._number, "died", f"the call ended its process: {ended}"))
            case Scored(number=number) | Failed(number=number) as answer:
                if number == self._number and not self._expired:
                    self._finish(answer)

    def _finish(self, outcome: Scored | Failed) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(outcome)
        self._outcome = None

    def _expire(self) -> None:
        self._expired = True
        self._kill_fork()

    def _leave(self, outcome: Outcome, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        if outcome.exception() is not None:  # nobody else would end the fork
            self._kill_fork()
            self._outcome = None

    def _kill_fork(self) -> None:
        if self._fork is not None:
            kill_group(self._fork)


class RewardPool:
    """Rewards (reward/base.py) from several scorers."""

    def __init__(self, scorers: Sequence[RemoteScorer], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._free: asyncio.Queue[RemoteScorer] = asyncio.Queue()
        for scorer in scorers:
            self._free.put_nowait(scorer)

    async def score(self, sample: Sample) -> float:
        """As Rewards.score. When it is cancelled, the call goes on, and nobody hears what comes of it.

        Raises:
            WorkerDied: a scorer's process ended, not just the call.
        """
        sample.text = self._tokenizer.decode(sample.completion_ids, skip_special_tokens=True)
        scorer = await self._free.get()
        outcome = scorer.call(sample.prompt.text, sample.text, sample.prompt.row)
        outcome.add_done_callback(lambda _: self._free.put_nowait(scorer))
        judged = await asyncio.shield(outcome)
        if isinstance(judged, Failed):
            raise RewardFailed(judged.reason, judged.detail)
        return judged.reward
