"""Rewards, as the controller sees them: processes that make one call at a time and may be killed."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tailrace.clock import waiting
from tailrace.data.tokenizer import Tokenizer
from tailrace.errors import RewardFailed, WorkerDied
from tailrace.types import Sample
from tailrace.workers.exits import kill_group
from tailrace.workers.messages import BadConfig, Failed, FromScorer, Score, Scored, ScorerJob, Serving
from tailrace.workers.process import WorkerProcess


class RemoteScorer:
    """One call at a time. The calls are made by a fork of the process, which is replaced when a call hangs
    or ends it (reward_child.py)."""

    def __init__(self, process: WorkerProcess, timeout_s: float) -> None:
        self.process = process
        self._timeout_s = timeout_s
        self._fork: int | None = None
        """Process group of the fork; None before there is one."""
        self._number = 0
        """Of the call being made: what comes of another is ignored."""
        self._heard: asyncio.Future[msgspec.Struct] | None = process.promise()
        """What is being waited for: the fork, or what comes of a call; None between calls."""
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
        assert self._heard is not None, "ready is asked once"
        with waiting(f"{self.process.name} to load the reward function"):
            first = await self._heard
        self._heard = None
        if isinstance(first, BadConfig):
            raise first.error()

    async def score(self, prompt: str, completion: str, row: Mapping[str, object]) -> float:
        """Make a call; when it takes longer than the timeout, kill it.

        Raises:
            RewardFailed: it did; also 'timeout', 'died', and 'row' where the row is not plain data.
            WorkerDied: the process that loads and forks is gone.
        """
        self._number += 1
        try:
            self.process.send(Score(self._number, prompt, completion, row))
        except (TypeError, OverflowError) as error:
            raise RewardFailed("row", str(error)) from error
        try:
            return _reward(await self._outcome())
        except WorkerDied:
            self._kill_call()
            raise
        finally:
            self._heard = None

    async def close(self) -> None:
        """End the processes; a call being made is killed."""
        if self._heard is not None:
            self._kill_call()
        await self.process.close()

    async def _outcome(self) -> msgspec.Struct:
        self._heard = self.process.promise()
        done, _ = await asyncio.wait([self._heard], timeout=self._timeout_s)
        if done:
            return self._heard.result()
        self._kill_call()
        self._number += 1  # the answer may have been on its way when the kill came
        self._heard = self.process.promise()
        await self._heard
        return Failed(self._number, "timeout", f"no reward in {self._timeout_s:g} s")

    def _kill_call(self) -> None:
        if self._fork is not None:
            kill_group(self._fork)

    def _hear(self, message: msgspec.Struct) -> None:
        if isinstance(message, Serving):
            self._fork = message.pid
        late = isinstance(message, Scored | Failed) and message.number != self._number
        if self._heard is not None and not self._heard.done() and not late:
            self._heard.set_result(message)


def _reward(outcome: msgspec.Struct) -> float:
    match outcome:
        case Scored(reward=reward):
            return reward
        case Failed(reason=reason, detail=detail):
            raise RewardFailed(reason, detail)
        case Serving(ended=ended):
            raise RewardFailed("died", f"the call ended its process: {ended}")
    raise AssertionError(outcome)


class RewardPool:
    """Rewards (reward/base.py) from several scorers."""

    def __init__(self, scorers: Sequence[RemoteScorer], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._free: asyncio.Queue[RemoteScorer] = asyncio.Queue()
        self._calls: set[asyncio.Task[float]] = set()
        for scorer in scorers:
            self._free.put_nowait(scorer)

    async def score(self, sample: Sample) -> float:
        """As Rewards.score. When it is cancelled, the call goes on, and nobody hears what comes of it.

        Raises:
            WorkerDied: a scorer's process ended, not just the call.
        """
        sample.text = self._tokenizer.decode(sample.completion_ids, skip_special_tokens=True)
        scorer = await self._free.get()
        prompt = sample.prompt
        call = asyncio.create_task(scorer.score(prompt.text, sample.text, prompt.row))
        self._calls.add(call)
        call.add_done_callback(lambda call: self._release(call, scorer))
        return await asyncio.shield(call)

    def _release(self, call: asyncio.Task[float], scorer: RemoteScorer) -> None:
        self._calls.discard(call)
        self._free.put_nowait(scorer)
        if not call.cancelled():
            call.exception()  # its caller may be gone; asyncio would complain that nobody asked
