"""The offline profile: its file, the size that it chooses, and its measurement on simulated engines."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from tailrace.errors import ConfigError
from tailrace.rollout.profile import EngineProfile, ProfileRow, measure
from tailrace.sim.engine import SimEngine
from tailrace.sim.settings import SimEngineSettings
from tailrace.sim.world import SimPrompts

TIMES = [(1, 1, 10, 1.0), (1, 5, 10, 3.0), (1, 1, 30, 2.0), (2, 1, 10, 1.5), (2, 1, 30, 1.5)]
ROWS = [ProfileRow(*each, 0) for each in TIMES]


def test_a_rollout_follows_the_batches_that_remain_when_shorter_responses_have_ended() -> None:
    """4 requests on 2 devices. Size 1: two on each engine for 10 steps of 1.5 s, between batches 1 and 5,
    then one of them for 20 steps of 2 s. Size 2: four, as four batches of one, then two."""
    profile = EngineProfile(ROWS, "rows")
    assert profile.rollout_s(1, 4, 2) == 10 * 1.5 + 20 * 2.0
    assert profile.rollout_s(2, 4, 2) == 10 * 6.0 + 20 * 3.0
    assert profile.fastest([1, 2], 4, 2) == 1
    assert profile.fastest([1, 2], 1, 2) == 2  # a batch of less than one is one: 50 s and 45 s


def test_a_profile_that_lacks_a_size_or_a_length_of_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(ROWS))
    profile = EngineProfile.read(path)
    profile.check([1, 2])
    with pytest.raises(
        ConfigError,
        match=r"^placement.profile = '.*profile.json': it has no measurement .* size 4 .*fit --profile",
    ):
        profile.check([1, 2, 4])
    with pytest.raises(ConfigError, match="size 2"):
        EngineProfile(ROWS[:-1], "rows").check([1, 2])
    with pytest.raises(ConfigError, match="size 1"):
        EngineProfile([], "rows").check([1])


@pytest.mark.parametrize("text", ["", "[{}]", '[{"batch": "x"}]'])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^placement.profile = .*it cannot be read"):
        EngineProfile.read(path)
    with pytest.raises(ConfigError, match=r"^placement.profile = .*it cannot be read"):
        EngineProfile.read(tmp_path / "none.json")


@pytest.mark.virtual
async def test_a_batch_is_measured_at_each_size_until_it_is_preempted_as_often_as_it_has_requests() -> None:
    """A step of n requests takes n s on one device, and n/2 + 1 s on two. The cache has 24 positions for each
    device, and prompts have one: of three requests with 10 tokens, one is preempted, and of four two."""
    cost = SimEngineSettings(
        slots=8, base_s=1e-9, slope_s=1.0, kv_tokens=24, communication_s=1.0, prefill_tokens_per_s=1e30,
        regroup_s=5.0, abort_s=0.0,
    )  # fmt: skip
    engines = [SimEngine(f"engine-{n}", cost, lambda sample: int(sample.turn_limit)) for n in range(2)]
    rows = [row async for row in measure(engines, 2, [2, 4], [1, 4, 8], [10], SimPrompts(1))]
    assert [(row.tensor_parallel_size, row.batch, row.length) for row in rows] == [
        (2, 1, 10), (2, 4, 10), (2, 8, 10), (4, 1, 10), (4, 4, 10), (4, 8, 10)
    ]  # fmt: skip
    assert [rows[0].step_s, rows[3].step_s, rows[4].step_s] == pytest.approx([1.0, 1.5, 3.0])
    assert [row.preemptions for row in rows[:2]] == [0, 2] and rows[4].preemptions == 0


class Restarting(SimEngine):
    """An engine that opens only some time after it was regrouped, as a server does."""

    async def resize(self, width: int) -> None:
        await super().resize(width)
        self.die()
        asyncio.get_running_loop().call_later(30.0, self.revive)


@pytest.mark.virtual
async def test_the_start_of_an_engine_counts_in_no_row() -> None:
    cost = SimEngineSettings(base_s=1.0, slope_s=0.0, communication_s=0.0, prefill_tokens_per_s=1e30)
    engines = [Restarting(f"engine-{n}", cost, lambda sample: int(sample.turn_limit)) for n in range(2)]
    times = [row.step_s async for row in measure(engines, 1, [2], [1], [10], SimPrompts(1))]
    assert times == pytest.approx([0.5])
