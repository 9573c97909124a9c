"""Judges on the devices of the engines: their times are computed by hand."""

import asyncio
from typing import Any

import pytest

from helpers.virtual import EXACT
from tailrace import clock
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.errors import ConfigError
from tailrace.extras.judges.memory import LayerBudget
from tailrace.extras.judges.simulated import ForwardPass, SimJudge, forward_pass
from tailrace.sim.engine import SimEngine
from tailrace.sim.host import Host
from tailrace.sim.settings import (
    SimClusterSettings,
    SimCodeSettings,
    SimHostSettings,
    SimJudgeSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
)
from tailrace.sim.world import SimPrompts
from tailrace.types import Group, Sample, SampleId

pytestmark = pytest.mark.virtual


def forward(resident: int) -> ForwardPass:
    """Five layers that compute a token in 1 s and are copied in 3 s.

    Args:
        resident: layers that stay beside two tokens.
    """
    budget = LayerBudget(
        total_bytes=10 * (resident + 2) + 2, num_layers=5, layer_bytes=10, outside_bytes=0, token_bytes=1
    )
    return ForwardPass(budget, max_tokens=2, token_s=1.0, pair_s=0.0, read_s=0.0, copy_s=3.0)


def judged(**changes: Any) -> SimSettings:
    settings: dict[str, Any] = {
        "cluster": SimClusterSettings(device="H800", devices=2, model="Qwen2.5-7B", memory_share=0.6),
        "rewards": SimRewardSettings(judge=SimJudgeSettings(max_tokens=1100)),
        "lengths": SimLengthSettings(max_tokens=1000),
    }
    return SimSettings(**(settings | changes))


def test_copies_overlap_with_the_layers_before_them_and_wait_for_one_of_two_places() -> None:
    """Two tokens: a layer computes 2 s. Layers 2 and 4 are resident. Layer 0 arrives at 3 and ends at 5,
    layer 1 arrives at 6 and ends at 8, layer 2 ends at 10. Layer 3 arrives at 9, ends at 12, and layer
    4 at 14. Without resident layers 2, 3 and 4 arrive at 9, 12 and 15: each place is free before."""
    assert forward(resident=2).seconds(1, 2) == 14.0
    assert forward(resident=0).seconds(1, 2) == 17.0


def test_resident_layers_compute_one_after_another() -> None:
    assert forward(resident=3).seconds(1, 2) == 10.0


def test_the_times_of_a_layer_follow_from_the_devices() -> None:
    """A layer of Qwen2.5-7B: 2 x 3584 x 128 x (28 + 4) in attention and 3 x 3584 x 18944 beside it."""
    peak = {"bandwidth_efficiency": 1.0, "prefill_efficiency": 1.0, "link_efficiency": 1.0}
    found = forward_pass(
        judged(cluster=SimClusterSettings(**(judged().cluster or SimClusterSettings()).model_dump() | peak))
    )
    parameters = 29_360_128 + 203_685_888
    assert found.copy_s == 2 * parameters / 64e9
    assert found.read_s == 2 * parameters / 3350e9
    assert found.layer_s(1, 10) == found.read_s
    assert found.layer_s(2, 1000) == pytest.approx(
        2 * (2 * parameters * 1000 + 2 * 3584 * 1000**2) / 989.4e12
    )


async def test_judge_and_engine_take_turns_on_their_device_and_what_arrives_meanwhile_is_the_next_batch() -> (
    None
):
    """Five resident layers: 5 s a token. In time slices both are twice as slow. The engine has 1 token at
    second 1. The first text takes 10 s to second 11, in which the engine does 5 tokens. Two texts that
    arrived meanwhile are a batch of 2 tokens. It takes 20 s to second 31, when the engine has 16, and 4
    follow."""
    host = Host(SimHostSettings(judge_slowdown=2.0, judged_slowdown=2.0))
    engine = SimEngine("engine-0", EXACT.engines, lambda _: 20, host=host)
    judge, ends = SimJudge(forward(resident=3), host), []

    async def score(at_s: float) -> None:
        await asyncio.sleep(at_s)
        await judge.score(1)
        ends.append(clock.now())

    generation = asyncio.ensure_future(
        engine.generate(Sample(SampleId(0, 0, 0), Group(SimPrompts(1)[0], 1, [])))
    )
    await asyncio.gather(*(score(at_s) for at_s in (1, 2, 3)))
    await generation
    assert ends == [11.0, 31.0, 31.0]
    assert clock.now() == 35.0


async def test_a_text_whose_score_was_cancelled_is_not_judged() -> None:
    judge = SimJudge(forward(resident=3), None)
    first, second, third = (asyncio.ensure_future(judge.score(2)) for _ in range(3))
    await asyncio.sleep(1)
    second.cancel()
    await asyncio.gather(first, third)
    assert clock.now() == 20.0
    assert judge.num_waiting == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"lengths": SimLengthSettings(max_tokens=1001)},
            r"max_tokens = 1100: a prompt and its longest response have 1101 tokens; set it to at least 1101",
        ),
        (
            {"rewards": SimRewardSettings(judge=SimJudgeSettings(max_tokens=1100, memory_mib=2000))},
            r"memory_mib = 2000: 1100 tokens need 3.1 GiB; raise it, or lower sim.rewards.judge.max_tokens",
        ),
        (
            {"rewards": SimRewardSettings(judge=SimJudgeSettings(max_tokens=1100, model="Qwen2.5-32B"))},
            r"the judge takes 61.3 GiB of a device on which the engine leaves 29.8 GiB; set it, or lower"
            r" sim.cluster.memory_share",
        ),
        (
            {"rewards": SimRewardSettings(judge=SimJudgeSettings(model="GPT"))},
            r"sim.rewards.judge.model = 'GPT'",
        ),
    ],
)
def test_a_judge_that_cannot_work_is_refused_with_the_numbers(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        clock.run(_parts(judged(**changes)), virtual=True)


async def _parts(settings: SimSettings) -> None:
    simulated_parts(settings, 0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"cluster": None}, "set it"),
        (
            {"rewards": SimRewardSettings(judge=SimJudgeSettings(), code=SimCodeSettings())},
            "keep one of them",
        ),
        ({"host": SimHostSettings(engine_slowdown=2.0)}, "remove them"),
    ],
)
def test_a_judge_without_devices_of_its_own_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        judged(**changes)
