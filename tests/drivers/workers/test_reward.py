"""Scoring in processes that may hang, raise or die."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from helpers.episodes import two_turns
from helpers.processes import start_controller
from helpers.worker_cases import Letters, is_running, make_samples, until_gone
from tailrace.drivers.data.settings import RowsSettings
from tailrace.drivers.reward.calls import Call, Scores
from tailrace.drivers.reward.settings import FunctionSettings, RewardSettings
from tailrace.drivers.workers.calls import RemoteWorker
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.drivers.workers.process_tree import children_of
from tailrace.drivers.workers.reward import RewardPool
from tailrace.drivers.workers.reward_process import MAX_LOG_BYTES, RewardJob, RewardWorker, copy_bounded
from tailrace.errors import ConfigError, RewardFailed, WorkerDied
from tailrace.types import Sample

ROWS = RowsSettings(path=Path("rows.jsonl"))


def job(
    function: str = "score", timeout_s: float = 60.0, on_timeout: Literal["zero", "drop"] = "drop"
) -> RewardJob:
    name = f"helpers.reward_cases:{function}"
    reward = RewardSettings(function=name, timeout_s=timeout_s, on_timeout=on_timeout)
    return RewardJob(reward=reward, data=ROWS)


def pool_of(*scorers: RemoteWorker, settings: RewardSettings | None = None) -> RewardPool:
    return RewardPool(scorers, Letters(), settings or RewardSettings(on_timeout="drop"))


@asynccontextmanager
async def scorer(job: RewardJob, logs: Path) -> AsyncIterator[RemoteWorker]:
    scorer = await LocalSpawner(logs).start("scorer-0", RewardWorker, job)
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


def made(one: RemoteWorker, word: str) -> asyncio.Future[list[Scores]]:
    return one.begin(RewardWorker.score, [Call("", word, [], "stop", {})])


async def server_of(one: RemoteWorker) -> int:
    """The process that makes its calls."""
    return await reward_of(one, "pid")


async def reward_of(one: RemoteWorker, word: str) -> int:
    return int((await made(one, word))[0].reward)


async def test_calls_see_prompt_completion_and_row_in_the_order_of_the_samples(tmp_path: Path) -> None:
    async with scorer(job(), tmp_path) as one:
        pool = pool_of(one)
        wrong, right = saying("wrongs", "right")
        right.completion_ids.append(0)  # a special token
        assert await pool.score(wrong) == 6 + len("what?") / 8
        assert await pool.score(right) == 5 + len("what?") / 8 + 1
        assert (wrong.text, right.text) == ("wrongs", "right")
        (episode,) = make_samples(1, row={"answer": "right"})
        two_turns(episode, *(Letters().encode(part) for part in ("ri", "gh", "t")))
        assert await pool.score(episode) == 5 + len("what?") / 8 + 1
        assert (episode.text, episode.num_tokens) == ("right", 3), "the environment's text is scored, too"
        asked: list[str] = []
        begin = one.begin
        one.begin = lambda method, calls: (asked.append(calls[0].completion), begin(method, calls))[1]  # type: ignore
        words = ["one", "two", "three", "four"]
        assert await outcomes(pool, *words) == [len(word) + 5 / 8 for word in words]
        assert asked == words


async def test_each_way_to_fail_has_its_reason_and_the_next_call_is_scored(tmp_path: Path) -> None:
    async with scorer(job(timeout_s=1.0), tmp_path) as one:
        pool = pool_of(one)
        words = ("hang", "lock", "raise", "exit", "quit", "crash", "nan", "text", "fine")
        reasons = ("timeout", "timeout", "raised", "died", "raised", "died", "nan", "not a number", 4.625)
        assert await outcomes(pool, *words) == list(reasons)


async def test_what_ended_a_call_or_kept_it_from_being_made_is_told(tmp_path: Path) -> None:
    async with scorer(job(), tmp_path) as one:
        pool = pool_of(one)
        for word, why in (
            ("exit", "died: the call ended its process: exit code 3"),
            ("crash", "died: the call ended its process: signal SIGSEGV"),
            ("raise", "raised: KeyError: 'no such answer'"),
        ):
            with pytest.raises(RewardFailed) as failed:
                await pool.score(saying(word)[0])
            assert str(failed.value).startswith(why.partition(": ")[0])
            assert str(failed.value).endswith(why.partition(": ")[2])
        for column in (object(), 1 << 70):
            with pytest.raises(RewardFailed) as failed:
                await pool.score(make_samples(1, row={"answer": column})[0])
            assert failed.value.reason == "row"
        assert await outcomes(pool, "fine") == [4.625]


async def test_a_timeout_is_a_reward_of_zero_that_is_marked(tmp_path: Path) -> None:
    one_job = job("score_by_reason", timeout_s=1.0, on_timeout="zero")
    async with scorer(one_job, tmp_path) as one:
        pool = pool_of(one, settings=one_job.reward)
        short, long = saying("abc", "abc")
        short.finish_reason, long.finish_reason = "stop", "length"
        assert [await pool.score(sample) for sample in (short, long)] == [1.0 + 2.0 + 3.0, 0.0]
        assert [sample.timed_out for sample in (short, long)] == [False, True]


async def test_a_process_that_a_hung_call_started_ends_with_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEFT_PROCESS", str(tmp_path / "left"))
    async with scorer(job("leave_process", timeout_s=1.0), tmp_path) as one:
        assert await outcomes(pool_of(one), "hang") == ["timeout"]
        await until_gone(int((tmp_path / "left").read_text()))


async def test_a_process_that_a_call_left_ends_with_the_worker(tmp_path: Path) -> None:
    async with scorer(job("leave_process"), tmp_path) as one:
        left = await reward_of(one, "fine")
        assert is_running(left)
    assert not is_running(left)


async def test_a_process_that_the_import_started_lives_on_when_a_call_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POOL_AT_IMPORT", "1")
    async with scorer(job("pool_lives"), tmp_path) as one:
        assert await outcomes(pool_of(one), "a") == [1.0]
        (loader,) = children_of(one.process.pid)
        (importer,) = children_of(loader)
        (server,) = (child for child in children_of(importer) if os.getpgid(child) == child)
        os.kill(server, signal.SIGKILL)
        while (again := (await outcomes(pool_of(one), "a"))[0]) == "died":
            pass
        assert again == 1.0


async def test_threads_that_the_import_started_work_in_the_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THREADS_AT_IMPORT", "1")
    async with scorer(job("by_thread", timeout_s=2.0), tmp_path) as one:
        assert await outcomes(pool_of(one), "a", "hang", "fine") == [1.0, "timeout", 4.0]


async def test_what_a_call_writes_to_its_descriptors_costs_its_own_reward_alone(tmp_path: Path) -> None:
    async with scorer(job("write_everywhere", timeout_s=1.0), tmp_path) as one:
        assert await outcomes(pool_of(one), "long", "fine", "wrong", "fine") == [
            "timeout",
            1.0,
            "died",
            1.0,
        ]


async def test_what_a_function_prints_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    log = tmp_path / "log"
    with log.open("wb") as target:
        os.write(write_end, b"12345678")
        os.close(write_end)
        copy_bounded(read_end, target.fileno(), limit=8)
        assert log.read_bytes() == b"12345678"
        read_end, write_end = os.pipe()
        os.write(write_end, b"123456789")
        os.close(write_end)
        copy_bounded(read_end, target.fileno(), limit=8)
    assert log.read_text() == ("1234567812345678\n[more than 8 bytes of output: the rest is discarded]\n")
    async with scorer(job("flood"), tmp_path) as one:
        assert await outcomes(pool_of(one), *["a"] * 200) == [1.0] * 200
    written = (tmp_path / "scorer-0.log").read_text()
    assert MAX_LOG_BYTES < len(written) < MAX_LOG_BYTES + 100
    assert written.endswith("the rest is discarded]\n") and "to stderr" in written


async def test_one_row_is_scored_with_an_empty_completion_and_defects_are_refused(tmp_path: Path) -> None:
    one_job = job("first_row", timeout_s=1.0)
    async with scorer(one_job, tmp_path) as one:
        pool = pool_of(one, settings=one_job.reward)

        async def checked(answer: str) -> str | None:
            prompt = make_samples(1, row={"answer": answer})[0].prompt
            return await pool.check_one_row(prompt, "tailrace's signature, given answer")

        assert await checked("fine") is None
        warning = await checked("first word")
        assert warning is not None and warning.endswith("IndexError: list index out of range")
        with pytest.raises(ConfigError, match=r"it failed \(tailrace's signature, given") as wrong:
            await checked("table")
        assert (wrong.value.key, wrong.value.value) == ("reward.function", one_job.reward.function)
        assert "KeyError: 'table'; mend the function; note that a completion" in str(wrong.value)
        with pytest.raises(ConfigError, match=r"reward\.timeout_s = 1\.0: .* no reward within 1 s"):
            await checked("hang")


async def test_values_of_several_functions_and_what_they_report_come_with_the_reward(tmp_path: Path) -> None:
    functions = (
        FunctionSettings(function="helpers.reward_cases:score", weight=2.0),
        FunctionSettings(function="helpers.reward_cases:letters"),
    )
    settings = RewardSettings(functions=functions)
    async with scorer(RewardJob(reward=settings, data=ROWS), tmp_path) as one:
        (sample,) = saying("four")
        assert await pool_of(one).score(sample) == 2 * 4.625 + 3.0
        assert sample.reward_metrics == {"score": 4.625, "letters": 3.0, "letters/different": 4.0}
        assert sample.reward_columns == {"letters/first": "f"}


async def test_asynchronous_rewards_are_scored_and_killed_too(tmp_path: Path) -> None:
    async with scorer(job("score_later", timeout_s=1.0), tmp_path) as one:
        assert await outcomes(pool_of(one), "four", "hang", "fives") == [2.0, "timeout", 2.5]


async def test_a_hung_call_holds_up_no_other_scorer(tmp_path: Path) -> None:
    async with scorer(job(), tmp_path / "a") as first, scorer(job(), tmp_path / "b") as second:
        pool = pool_of(first, second)
        hung = asyncio.create_task(pool.score(saying("hang")[0]))
        assert await outcomes(pool, *["fine"] * 20) == [4.625] * 20
        assert not hung.done()
        hung.cancel()


async def test_a_call_nobody_waits_for_any_more_gives_its_answer_to_nobody_else(tmp_path: Path) -> None:
    async with scorer(job("score_later"), tmp_path) as one:
        pool = pool_of(one)
        forgotten = asyncio.create_task(pool.score(saying("sixsix")[0]))
        await asyncio.sleep(0.005)
        forgotten.cancel()
        assert await outcomes(pool, "four", "fives") == [2.0, 2.5]


async def test_a_fork_killed_between_two_calls_costs_at_most_the_next_one(tmp_path: Path) -> None:
    async with scorer(job(), tmp_path) as one:
        os.kill(await server_of(one), signal.SIGKILL)
        pool = pool_of(one)
        first, *others = await outcomes(pool, *["fine"] * 3)
        assert first in (4.625, "died")
        assert others == [4.625] * 2


async def test_a_scorer_that_dies_as_a_whole_ends_the_run(tmp_path: Path) -> None:
    async with scorer(job(), tmp_path) as one:
        server = await server_of(one)
        call = made(one, "lock")
        await asyncio.sleep(0.1)
        one.kill()
        with pytest.raises(WorkerDied, match=r"scorer-0 .* signal SIGKILL"):
            await call
        await until_gone(server)


async def test_closing_ends_a_call_in_the_midst(tmp_path: Path) -> None:
    async with scorer(job(), tmp_path) as one:
        server = await server_of(one)
        call = made(one, "lock")
        await asyncio.sleep(0.1)
    await until_gone(server, one.process.pid)
    with pytest.raises(WorkerDied, match="ended: exit code 0"):
        await call


async def test_a_function_that_does_not_exist_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as wrong:
        async with scorer(job("scroe"), tmp_path):
            pass
    assert wrong.value.key == "reward.function"
    assert "helpers.reward_cases:scroe" in str(wrong.value)


CONTROLLER = """
import asyncio, sys
from contextlib import AsyncExitStack
from pathlib import Path
from test_reward import job, made, reward_of, scorer, server_of

async def main():
    async with AsyncExitStack() as stack:
        scorers = [
            await stack.enter_async_context(scorer(job(*name), Path(sys.argv[1]) / str(number)))
            for number, name in enumerate(2 * [(), ("leave_process",)])
        ]
        pids, locked = [], []
        for one, two in (scorers[:2], scorers[2:]):
            left = await reward_of(two, "fine")
            pids += [one.process.pid, await server_of(one), two.process.pid, left]
            locked.append(made(one, "lock"))
        print(*pids, flush=True)
        await asyncio.gather(*locked)

asyncio.run(main())
"""


@pytest.mark.slow  # tests/drivers/workers/test_process.py kills a controller that has only stand-ins
async def test_all_processes_of_rewards_end_when_the_controller_is_killed(tmp_path: Path) -> None:
    """A call that holds the interpreter's lock, and a process with a session of its own that a call left.
    Half of them are stopped."""
    controller, words = await start_controller(CONTROLLER, tmp_path)
    pids = [int(pid) for pid in words]
    assert len(pids) == 8
    await asyncio.sleep(0.3)
    assert all(is_running(pid) for pid in pids)
    for pid in pids[4:]:
        os.kill(pid, signal.SIGSTOP)
    controller.kill()
    await until_gone(*pids)
    await controller.communicate()
