"""Rewards from the controller's side: processes that make one call at a time and may be killed."""

import asyncio
from collections.abc import Sequence

from tailrace.drivers.data.encoding import Tokenizer, text_of
from tailrace.drivers.reward.calls import Call, Scores
from tailrace.drivers.reward.settings import RewardSettings
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.reward_process import RewardWorker
from tailrace.errors import ConfigError, RewardFailed
from tailrace.types import Prompt, Sample


class RewardPool:
    """Rewards (contracts/reward.py) from several reward workers.

    The call of a sample begins as soon as a worker is free, in the order in which samples were given.
    """

    def __init__(
        self, workers: Sequence[RemoteWorker], tokenizer: Tokenizer, settings: RewardSettings
    ) -> None:
        self._text_of = text_of(tokenizer)
        self._settings = settings
        self._free: asyncio.Queue[RemoteWorker] = asyncio.Queue()
        for worker in workers:
            self._free.put_nowait(worker)

    async def score(self, sample: Sample) -> float:
        """Score a sample. When this is cancelled, a call that has begun goes on, and its reward is ignored.
        Raises a WorkerDied if a reward worker as a whole ended."""
        sample.text = self._text_of(sample.scored_ids)
        try:
            scores = await self._call(Call.of(sample))
        except RewardFailed as failed:
            if failed.reason != "timeout" or self._settings.on_timeout == "drop":
                raise
            sample.timed_out = True
            return 0.0
        sample.reward_metrics |= scores.metrics  # beside those of an environment
        sample.reward_columns = scores.columns
        return scores.reward

    async def check_one_row(self, prompt: Prompt, understood: str) -> str | None:
        """Call the reward functions once with an empty completion, before generation begins. Raises a
        ConfigError if the call took too long, ended its process, or raised an exception that shows a defect
        of the function.

        Args:
            prompt: a row of the data.
            understood: how the functions are called, for messages.

        Returns:
            A warning if the call failed in a way that other completions need not share, else None.
        """
        try:
            await self._call(Call(prompt.text, "", [], "stop", prompt.row, prompt.given, prompt.source))
        except RewardFailed as failed:
            where = f"for the first row and an empty completion it failed ({understood}): {failed}"
            if failed.is_defect or failed.reason in ("timeout", "died", "row"):
                key = "reward.timeout_s" if failed.reason == "timeout" else "reward.function"
                value = self._settings.timeout_s if failed.reason == "timeout" else self._settings.named()
                remedy = "mend the function; note that a completion can be empty"
                raise ConfigError(key, value, where, remedy) from failed
            return f"reward.function = {self._settings.named()!r}: {where}"
        return None

    async def _call(self, call: Call) -> Scores:
        """Make a call by the next worker that is free. Raises a RewardFailed with a reason of
        `Scorer`, 'timeout', 'died' (the call ended its process) or 'row' (the row is not plain data)."""
        worker = await self._free.get()
        try:
            scores = worker.begin(RewardWorker.score, call)
        except (TypeError, OverflowError, RecursionError) as error:
            self._free.put_nowait(worker)
            raise RewardFailed("row", str(error)) from error
        scores.add_done_callback(lambda _: self._free.put_nowait(worker))
        return await asyncio.shield(scores)
