"""Rewards from the controller's side: processes that make one call at a time and may be killed."""

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from tailrace.data.encoding import Tokenizer, text_of
from tailrace.errors import ConfigError, RewardFailed, WorkerDied
from tailrace.reward.base import Call, RewardSettings, Scores
from tailrace.types import Prompt, Sample
from tailrace.workers.conversation import Conversation
from tailrace.workers.messages import ScorerJob
from tailrace.workers.remote import RemoteWorker
from tailrace.workers.reward_messages import Failed, FromScorer, Score, Scored, Serving

Outcome: TypeAlias = asyncio.Future[Scores | Failed]


class RemoteScorer(RemoteWorker[ScorerJob]):
    """One reward worker (reward_child.py). A call that takes too long is killed with its process, which the
    worker replaces."""

    module = "tailrace.workers.reward_child"
    decoder = msgspec.msgpack.Decoder(FromScorer)

    def __init__(self, process: Conversation, job: ScorerJob) -> None:
        super().__init__(process, job)
        self._server: int | None = None
        """Process group that makes the calls; None before there is one."""
        self._number = 0
        """Number of the last call."""
        self._outcome: Outcome | None = None
        """Outcome of the call that is being made."""
        self._expired = False
        """The call took too long: its server is killed, and an answer of it does not count."""
        process.on_message = self._hear

    def call(self, call: Call) -> Outcome:
        """Make a call within `timeout_s`.

        Returns:
            A future, which must not be cancelled, and before whose end no other call may be made. It raises
            WorkerDied if the worker as a whole ends. Besides the reasons of `Scorer`, the reason of a Failed
            is 'timeout', 'died' (the call ended its process) or 'row' (the row is not plain data).
        """
        self._number += 1
        self._outcome = outcome = self.process.promise()
        try:
            self.process.send(Score(self._number, call))
        except (TypeError, OverflowError, RecursionError) as error:
            self._finish(Failed("row", str(error)))
            return outcome
        except WorkerDied:  # the promise raises it
            return outcome
        self._expired = False
        timer = asyncio.get_running_loop().call_later(self.job.reward.timeout_s, self._expire)
        outcome.add_done_callback(lambda _: timer.cancel())
        return outcome

    async def close(self) -> None:
        """End the worker's processes; a call being made is killed."""
        if self._outcome is not None:
            self._kill_server()
        await super().close()

    def _hear(self, message: msgspec.Struct) -> None:
        match message:
            case Serving(pid=pid, ended=ended):
                self._server = pid
                if self._expired:
                    self._finish(Failed("timeout", f"no reward within {self.job.reward.timeout_s:g} s"))
                elif ended:
                    self._finish(Failed("died", f"the call ended its process: {ended}"))
            case Scored(number=number, outcome=outcome):
                if number == self._number and not self._expired:
                    self._finish(outcome)
            case _:
                self.process.answer(message)

    def _finish(self, outcome: Scores | Failed) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(outcome)
        self._outcome = None

    def _expire(self) -> None:
        self._expired = True
        self._kill_server()

    def _kill_server(self) -> None:
        if self._server is not None:
            self.process.kill_group(self._server)


class RewardPool:
    """Rewards (reward/base.py) from several reward workers.

    The call of a sample begins as soon as a worker is free, in the order in which samples were given.
    """

    def __init__(
        self, scorers: Sequence[RemoteScorer], tokenizer: Tokenizer, settings: RewardSettings
    ) -> None:
        self._text_of = text_of(tokenizer)
        self._settings = settings
        self._free: asyncio.Queue[RemoteScorer] = asyncio.Queue()
        for scorer in scorers:
            self._free.put_nowait(scorer)

    async def score(self, sample: Sample) -> float:
        """As Rewards.score. When this is cancelled, a call that has begun goes on, and its reward is ignored.

        Raises:
            WorkerDied: a reward worker as a whole ended.
        """
        sample.text = self._text_of(sample.scored_ids)
        match await self._call(Call.of(sample)):
            case Failed(reason="timeout") if self._settings.on_timeout == "zero":
                sample.timed_out = True
                return 0.0
            case Failed() as failed:
                raise RewardFailed(failed.reason, failed.detail, is_defect=failed.is_defect)
            case Scores(reward, metrics, columns):
                sample.reward_metrics |= metrics  # beside those of an environment
                sample.reward_columns = columns
                return reward

    async def check_one_row(self, prompt: Prompt, understood: str) -> str | None:
        """Call the reward functions once with an empty completion, before generation begins.

        Args:
            prompt: a row of the data.
            understood: how the functions are called, for messages.

        Returns:
            A warning if the call failed in a way that other completions need not share, else None.

        Raises:
            ConfigError: the call took too long, ended its process, or raised an exception that shows a defect
                of the function.
        """
        outcome = await self._call(Call(prompt.text, "", [], "stop", prompt.row, prompt.given, prompt.source))
        if not isinstance(outcome, Failed):
            return None
        why = f"{outcome.reason}: {outcome.detail}"
        where = f"for the first row and an empty completion it failed ({understood}): {why}"
        if outcome.is_defect or outcome.reason in ("timeout", "died", "row"):
            key = "reward.timeout_s" if outcome.reason == "timeout" else "reward.function"
            value = self._settings.timeout_s if outcome.reason == "timeout" else self._settings.named()
            raise ConfigError(key, value, where, "mend the function; note that a completion can be empty")
        return f"reward.function = {self._settings.named()!r}: {where}"

    async def _call(self, call: Call) -> Scores | Failed:
        scorer = await self._free.get()
        outcome = scorer.call(call)
        outcome.add_done_callback(lambda _: self._free.put_nowait(scorer))
        return await asyncio.shield(outcome)
