"""Rewards from the controller's side: processes that make one call at a time and may be killed."""

import asyncio
from collections.abc import Sequence

from tailrace.drivers.data.encoding import Tokenizer, text_of
from tailrace.drivers.reward.calls import Call, Scores
from tailrace.drivers.reward.settings import RewardSettings
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.reward_process import RewardWorker
from tailrace.errors import ConfigError, RewardFailed
from tailrace.types import Group, Prompt, Sample


class RewardPool:
    """Rewards (contracts/reward.py) from several reward workers.

    The call of a sample begins as soon as a worker is free, in the order in which samples were given. With
    `reward.batch = "group"` that of a group begins when its last member was given.
    """

    def __init__(
        self, workers: Sequence[RemoteWorker], tokenizer: Tokenizer, settings: RewardSettings
    ) -> None:
        self._text_of = text_of(tokenizer)
        self._settings = settings
        self._free: asyncio.Queue[RemoteWorker] = asyncio.Queue()
        for worker in workers:
            self._free.put_nowait(worker)
        self._waiting: dict[Group, dict[Sample, asyncio.Future[tuple[asyncio.Task[list[Scores]], int]]]] = {}
        """Members that wait for the others of their group; each gets the call of all, and its place in it."""

    async def score(self, sample: Sample) -> float:
        """Score a sample. When this is cancelled, a call that has begun goes on, and its reward is ignored.
        Raises a WorkerDied if a reward worker as a whole ended."""
        sample.text = self._text_of(sample.scored_ids)
        try:
            scores = await self._scores(sample)
        except RewardFailed as failed:
            if failed.reason != "timeout" or self._settings.on_timeout == "drop":
                raise
            sample.timed_out = True
            return 0.0
        sample.reward_metrics |= scores.metrics  # beside those of an environment
        sample.reward_columns = scores.columns
        return scores.reward

    async def _scores(self, sample: Sample) -> Scores:
        """Return the scores of a sample, in batches as [reward] has them. Raises as `_call`."""
        group = sample.group
        if self._settings.batch == "sample" or group.prompt.index < 0:
            return (await self._call([Call.of(sample)]))[0]
        waiting = self._waiting.setdefault(group, {})
        begun: asyncio.Future[tuple[asyncio.Task[list[Scores]], int]] = asyncio.Future()
        waiting[sample] = begun
        members = sorted(group.samples, key=lambda each: each.id)
        if all(each in waiting or each.scored for each in members):
            for each in members:
                each.text = each.text or self._text_of(each.scored_ids)
            call = asyncio.create_task(self._call([Call.of(each) for each in members]))
            for each, future in waiting.items():
                if future.done():  # another call, of tokens that have changed since
                    continue
                if each in members:
                    future.set_result((call, members.index(each)))
                else:  # the group began again without it
                    future.cancel()
        try:
            call, place = await begun
            return (await asyncio.shield(call))[place]
        finally:
            if waiting.get(sample) is begun:
                del waiting[sample]
            if not waiting and self._waiting.get(group) is waiting:
                del self._waiting[group]

    async def check_one_row(self, prompt: Prompt, understood: str, num_members: int = 1) -> str | None:
        """Call the reward functions once with empty completions, before generation begins. Raises a
        ConfigError if the call took too long, ended its process, or raised an exception that shows a defect
        of the function.

        Args:
            prompt: a row of the data.
            num_members: completions of the call.
            understood: how the functions are called, for messages.

        Returns:
            A warning if the call failed in a way that other completions need not share, else None.
        """
        try:
            empty = Call(prompt.text, "", [], "stop", prompt.row, prompt.given, prompt.source)
            await self._call([empty] * num_members)
        except RewardFailed as failed:
            where = f"for the first row and an empty completion it failed ({understood}): {failed}"
            if failed.is_defect or failed.reason in ("timeout", "died", "row"):
                key = "reward.timeout_s" if failed.reason == "timeout" else "reward.function"
                value = self._settings.timeout_s if failed.reason == "timeout" else self._settings.named()
                remedy = "mend the function; note that a completion can be empty"
                raise ConfigError(key, value, where, remedy) from failed
            return f"reward.function = {self._settings.named()!r}: {where}"
        return None

    async def _call(self, calls: list[Call]) -> list[Scores]:
        """Make a call, of completions to one prompt, by the next worker that is free. Raises a RewardFailed
        with a reason of `Scorer`, 'timeout', 'died' (the call ended its process) or 'row' (the row is not
        plain data)."""
        worker = await self._free.get()
        try:
            scores = worker.begin(RewardWorker.score, calls)
        except (TypeError, OverflowError, RecursionError) as error:
            self._free.put_nowait(worker)
            raise RewardFailed("row", str(error)) from error
        scores.add_done_callback(lambda _: self._free.put_nowait(worker))
        return await asyncio.shield(scores)
