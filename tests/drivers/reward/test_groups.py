"""`reward.batch = "group"`: functions of TRL's signature get all members of a group in one call."""

import asyncio
import tomllib
from contextlib import closing
from pathlib import Path
from unittest.mock import ANY

import pytest

from helpers.small_run import write_small_run
from helpers.worker_cases import Letters, make_samples
from tailrace.api import load_config
from tailrace.drivers.assembly.schedule import resolve
from tailrace.drivers.data.settings import RowsSettings
from tailrace.drivers.reward.calls import Call
from tailrace.drivers.reward.functions import RewardFunction, Scorer
from tailrace.drivers.reward.settings import FunctionSettings, RewardSettings
from tailrace.drivers.workers.process import LocalSpawner
from tailrace.drivers.workers.reward import RewardPool
from tailrace.drivers.workers.reward_process import RewardJob, RewardWorker
from tailrace.errors import ConfigError, RewardFailed

ROWS = RowsSettings(path=Path("rows.jsonl"))
GROUP = RewardSettings(function="helpers.reward_cases:ranks", batch="group")


def scorer_of(*functions) -> Scorer:
    settings = FunctionSettings(function="mine.py:f")
    return Scorer([RewardFunction(each, settings, "reward.function", "group") for each in functions])


def calls(*completions: str) -> list[Call]:
    return [Call("q", each, [n], "stop", {"answer": "b"}) for n, each in enumerate(completions)]


def test_a_function_of_lists_gets_the_members_in_order_and_gives_each_its_number_and_report():
    def rank(prompts, completions, answer, completion_ids, log_extra, log_metric):
        log_extra("length", [len(each) for each in completions])
        log_metric("longest", max(map(len, completions)))
        assert (prompts, answer, completion_ids) == (["q"] * 3, ["b"] * 3, [[0], [1], [2]])
        return [sorted(completions, key=len).index(each) for each in completions]

    def same(completion, answer):
        return float(completion == answer)

    with closing(scorer_of(rank, same)) as scorer:
        scores = scorer.score(calls("ccc", "b", "aa"))
    assert [each.reward for each in scores] == [2.0, 1.0, 1.0]
    assert [each.metrics["same"] for each in scores] == [0.0, 1.0, 0.0]
    assert [each.columns for each in scores] == [{"rank/length": n} for n in (3, 1, 2)]
    assert {each.metrics["rank/longest"] for each in scores} == {3.0}
    assert (
        scorer.functions[0].describe().startswith("rank (weight 1): TRL's signature, called with lists of a ")
    )


@pytest.mark.parametrize("result", [1.0, [1.0], None, [1.0, 2.0, 3.0]])
def test_another_number_of_results_than_members_is_a_defect_with_one_message(result):
    with closing(scorer_of(lambda completions: result)) as scorer, pytest.raises(RewardFailed) as failed:
        scorer.score(calls("a", "b"))
    assert failed.value.is_defect
    assert str(failed.value) == f"not a list of one number for each of 2 members: {result!r}"


async def test_a_group_is_scored_in_one_call_when_its_last_member_is_there(tmp_path: Path) -> None:
    one = await LocalSpawner(tmp_path).start("scorer-0", RewardWorker, RewardJob(reward=GROUP, data=ROWS))
    await one.ready()
    asked: list[list[str]] = []
    begin = one.begin
    one.begin = lambda how, given: (asked.append([c.completion for c in given]), begin(how, given))[1]  # type: ignore
    try:
        pool = RewardPool([one], Letters(), GROUP)
        first, middle, last = samples = make_samples(3, row={"answer": "right"})
        for sample, word in zip(samples, ("ccc", "b", "aa"), strict=True):
            sample.extend(Letters().encode(word), [0.0] * len(word), version=0)
        stale = make_samples(1)[0]
        stale.group = first.group
        begun, parked = (asyncio.create_task(pool.score(each)) for each in (last, first))
        await asyncio.sleep(0)
        parked.cancel()
        begun_anew = asyncio.create_task(pool.score(stale))
        others = [asyncio.create_task(pool.score(middle))]
        await asyncio.sleep(0)
        assert asked == []
        others.append(asyncio.create_task(pool.score(first)))
        assert await asyncio.gather(begun, *others) == [1.0, 0.0, 2.0]
        assert await asyncio.gather(parked, begun_anew, return_exceptions=True) == [ANY, ANY]
        assert parked.cancelled() and begun_anew.cancelled()
        middle.reward, last.reward = 0.0, 1.0
        assert await pool.score(first) == 2.0, "a member that is scored again is seen beside the others"
        assert asked == [["ccc", "b", "aa"]] * 2
        row = make_samples(1, row={"answer": "one"})[0].prompt
        with pytest.raises(ConfigError, match=r"not a list of one number for each of 3 members: 1\.0; mend"):
            await pool.check_one_row(row, "TRL's signature", 3)
    finally:
        await one.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"schedule": {"name": "rollpacker", "groups_per_round": 4}},
            "members of a group race in this schedule",
        ),
        (
            {"run.groups.deadline_s": 9},
            r"a group may not become whole: \[run\.groups\] cuts or replaces members",
        ),
        (
            {"reward.function": "rewards.py:digits"},
            r"no reward function takes lists \(digits\); name a param",
        ),
    ],
)
def test_what_cannot_be_scored_as_a_group_is_refused(tmp_path: Path, changes, said) -> None:
    path = write_small_run(tmp_path)
    tree = tomllib.loads(path.read_text())
    tree["reward"] |= {"batch": "group", "function": f"{tmp_path}/rewards.py:digits"}
    tree |= {key: value for key, value in changes.items() if isinstance(value, dict)}
    given = {key: value for key, value in changes.items() if "." in key and key != "reward.function"}
    with pytest.raises(ConfigError, match=said):
        config = load_config(tree, given)
        resolve(config)
        Scorer.load(config.reward, config.data)
