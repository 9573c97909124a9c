"""Scoring in processes that may hang, raise or die."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from worker_cases import Letters, is_running, make_samples, until_gone

from tailrace.data.base import RowsSettings
from tailrace.errors import ConfigError, RewardFailed, WorkerDied
from tailrace.reward.base import RewardSettings
from tailrace.types import Sample
from tailrace.workers.messages import Call, Failed, ScorerJob
from tailrace.workers.reward import Outcomes, RemoteScorer, RewardPool

Drive = Callable[[Any], Any]
ROWS = RowsSettings(path=Path("rows.jsonl"))


def job(function: str = "score", timeout_s: float = 60.0) -> ScorerJob:
    reward = RewardSettings(function=f"reward_cases:{function}", timeout_s=timeout_s)
    return ScorerJob(reward=reward, data=ROWS)


@asynccontextmanager
async def scorer(job: ScorerJob, logs: Path) -> AsyncIterator[RemoteScorer]:
    scorer = await RemoteScorer.spawn("scorer-0", job, logs=logs)
    try:
        await scorer.ready()
        yield scorer
    finally:
        await scorer.close()


def saying(*words: str) -> list[Sample]:
    samples = make_samples(len(words), row={"answer": "right"})
    for sample, word in zip(samples, words, strict=True):
        sample.extend(Letters().encode(word), [0.0] * len(word), version=0)
    return samples


async def outcomes(pool: RewardPool, *words: str) -> list[float | str]:
    """Of completions scored side by side: the reward, or the reason why there is none."""
    found = await asyncio.gather(*(pool.score(s) for s in saying(*words)), return_exceptions=True)
    return [str(o.reason) if isinstance(o, RewardFailed) else o for o in found]  # type: ignore[misc]


def made(one: RemoteScorer, *words: str) -> Outcomes:
    """Calls that travel together."""
    return one.call([Call("", word, {}) for word in words])


async def fork_of(one: RemoteScorer) -> int:
    """The process that makes its calls."""
    (pid,) = await made(one, "pid")
    assert isinstance(pid, float)
    return int(pid)


def test_a_reward_sees_prompt_completion_and_row_and_the_sample_keeps_the_text(
    tmp_path: Path, drive: Drive
) -> None:
    async def main() -> None:
        async with scorer(job(), tmp_path) as one:
            pool = RewardPool([one], Letters())
            wrong, right = saying("wrongs", "right")
            right.completion_ids.append(0)  # a special token
            assert await pool.score(wrong) == 6 + len("what?") / 8
            assert await pool.score(right) == 5 + len("what?") / 8 + 1
            assert (wrong.text, right.text) == ("wrongs", "right")

    execute(main())


def test_each_way_to_fail_has_its_reason_and_the_next_call_is_scored(tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        async with scorer(job(timeout_s=2.0), tmp_path) as one:
            pool = RewardPool([one], Letters())
            words = ("hang", "lock", "raise", "exit", "quit", "crash", "nan", "text", "fine")
            reasons = ("timeout", "timeout", "raised", "died", "raised", "died", "nan", "not a number", 4.625)
            assert await outcomes(pool, *words) == list(reasons)

    execute(main())


def test_what_ended_a_call_is_told(tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        async with scorer(job(), tmp_path) as one:
            pool = RewardPool([one], Letters())
            for word, why in (
                ("exit", "died: the call ended its process: exit code 3"),
                ("crash", "died: the call ended its process: signal SIGSEGV"),
                ("raise", "raised: KeyError: 'no such answer'"),
            ):
                with pytest.raises(RewardFailed) as failed:
                    await pool.score(saying(word)[0])
                assert str(failed.value) == why

    execute(main())


def test_a_row_that_is_not_plain_data_costs_its_sample(tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        async with scorer(job(), tmp_path) as one:
            pool = RewardPool([one], Letters())
            for column in (object(), 1 << 70):
                with pytest.raises(RewardFailed) as failed:
                    await pool.score(make_samples(1, row={"answer": column})[0])
                assert failed.value.reason == "row"
            assert await outcomes(pool, "fine") == [4.625]

    execute(main())


def test_calls_that_travel_together_are_answered_in_order(tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        async with scorer(job(), tmp_path) as one:
            fine, raised, nan, fives = await made(one, "fine", "raise", "nan", "fives")
            assert (fine, fives) == (4.0, 5.0)
            assert raised == Failed("raised", "KeyError: 'no such answer'")
            assert nan == Failed("nan", "")

    execute(main())


def test_quick_calls_come_to_travel_together(tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        async with scorer(job(), tmp_path) as one:
            pool, sizes, call = RewardPool([one], Letters()), [], one.call

            def counted(calls: list[Call]) -> Outcomes:
                sizes.append(len(calls))
                return call(calls)

            one.call = counted  # type: ignore[method-assign]
            assert await outcomes(pool, *["fine"] * 63) == [4.625] * 63
            assert sizes[0] == 1
            assert len(sizes) < 63
            assert sum(sizes) == 63

    execute(main())


def test_of_calls_that_travel_together_only_the_one_that_ends_the_process_fails(
    tmp_path: Path, drive: Drive
) -> None:
    async def main() -> None:
        async with scorer(job(timeout_s=2.0), tmp_path) as one:
            pool = RewardPool([one], Letters())
            await outcomes(pool, *["fine"] * 30)
            words = ("fine", "exit", "fives", "hang", "fine")
            assert await outcomes(pool, *words) == [4.625, "died", 5.625, "timeout", 4.625]

    execute(main())


def test_asynchronous_rewards_are_scored_and_killed_too(tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        async with scorer(job("score_later", timeout_s=2.0), tmp_path) as one:
            assert await outcomes(RewardPool([one], Letters()), "four", "hang", "fives") == [
                2.0,
                "timeout",
                2.5,
            ]

    execute(main())


def test_a_hung_call_holds_up_no_other_scorer(tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        async with scorer(job(), tmp_path / "a") as first, scorer(job(), tmp_path / "b") as second:
            pool = RewardPool([first, second], Letters())
            hung = asyncio.create_task(pool.score(saying("hang")[0]))
            assert await outcomes(pool, *["fine"] * 20) == [4.625] * 20
            assert not hung.done()
            hung.cancel()

    execute(main())


def test_a_call_nobody_waits_for_any_more_gives_its_answer_to_nobody_else(
    tmp_path: Path, drive: Drive
) -> None:
    async def main() -> None:
        async with scorer(job("score_later"), tmp_path) as one:
            pool = RewardPool([one], Letters())
            forgotten = asyncio.create_task(pool.score(saying("sixsix")[0]))
            await asyncio.sleep(0.005)
            forgotten.cancel()
            assert await outcomes(pool, "four", "fives") == [2.0, 2.5]

    execute(main())


def test_a_fork_killed_between_two_calls_costs_at_most_the_next_one(tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        async with scorer(job(), tmp_path) as one:
            os.kill(await fork_of(one), signal.SIGKILL)
            pool = RewardPool([one], Letters())
            first, *others = await outcomes(pool, *["fine"] * 3)
            assert first in (4.625, "died")
            assert others == [4.625] * 2

    execute(main())


def test_a_scorer_that_dies_as_a_whole_ends_the_run(tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        async with scorer(job(), tmp_path) as one:
            fork = await fork_of(one)
            call = made(one, "lock")
            await asyncio.sleep(0.1)
            one.process.kill()
            with pytest.raises(WorkerDied, match=r"scorer-0 .* signal SIGKILL"):
                await call
            await until_gone(fork)

    execute(main())


def test_closing_ends_a_call_in_the_midst(tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        async with scorer(job(), tmp_path) as one:
            fork = await fork_of(one)
            call = made(one, "lock")
            await asyncio.sleep(0.1)
        await until_gone(fork, one.process.pid)
        assert await call == Failed("died", "the call ended its process: signal SIGKILL")

    execute(main())


def test_a_function_that_does_not_exist_is_a_config_error(tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError) as wrong:
            async with scorer(job("scroe"), tmp_path):
                pass
        assert wrong.value.key == "reward.function"
        assert "reward_cases:scroe" in str(wrong.value)

    execute(main())


CONTROLLER = """
import asyncio, sys
from pathlib import Path
from test_reward import fork_of, job, made, scorer

async def main():
    async with scorer(job(), Path(sys.argv[1])) as one:
        fork = await fork_of(one)
        print(one.process.pid, fork, flush=True)
        await made(one, "lock")

asyncio.run(main())
"""


def test_a_call_that_holds_the_lock_ends_when_the_controller_is_killed(tmp_path: Path, drive: Drive) -> None:
    async def main() -> None:
        controller = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CONTROLLER, str(tmp_path)),
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parent,
        )
        assert controller.stdout is not None
        pids = [int(pid) for pid in (await controller.stdout.readline()).split()]
        assert len(pids) == 2
        await asyncio.sleep(0.3)
        assert all(is_running(pid) for pid in pids)
        controller.kill()
        await until_gone(*pids)
        await controller.communicate()

    execute(main())
