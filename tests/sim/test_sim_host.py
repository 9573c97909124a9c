"""A shared host, and engines that die at random: their times are computed by hand."""

import asyncio
from functools import partial

import pytest

from helpers.virtual import EXACT, SCHEDULES_BY_NAME, SETTINGS, SIM, change, simulate
from tailrace import clock
from tailrace.record.events import EngineStateChanged, Stepped
from tailrace.sim.engine import SimEngine, let_die
from tailrace.sim.host import Host
from tailrace.sim.reward import SimRewards
from tailrace.sim.settings import SimFaultSettings, SimHostSettings, SimRewardSettings, SimTrainerSettings
from tailrace.sim.trainer import SimTrainer
from tailrace.sim.world import SimPrompts
from tailrace.types import Group, Sample, SampleId

pytestmark = pytest.mark.virtual


def sample(number: int = 0) -> Sample:
    return Sample(SampleId(number, 0, 0), Group(SimPrompts(1)[number], 1, []))


async def test_engine_and_trainer_slow_each_other_down_while_both_work() -> None:
    """10 tokens of 1 s, and 4 s of training from second 2. Together they are 2 and 4 times slower. From 2 to
    18 both work: the trainer ends, and the engine has done 2 + 8 tokens and ends, too. Alone again, 4 s of
    training take 4 s."""
    host = Host(SimHostSettings(engine_slowdown=2.0, trainer_slowdown=4.0))
    engine = SimEngine("engine-0", EXACT.engines, lambda _: 10, host=host)
    trainer = SimTrainer(change(EXACT.trainer, step_s=4.0), host=host)
    generation = asyncio.ensure_future(engine.generate(sample()))
    await asyncio.sleep(2)
    assert (await trainer.step()).compute_s == 16.0
    await generation
    assert clock.now() == 18.0
    assert (await trainer.step()).compute_s == 4.0


async def test_what_begins_in_the_middle_changes_the_rest_of_the_work() -> None:
    """4 s of training, slower by 2 from second 1 to 5, while the engine takes 2 tokens of 2 s: 1 + 2 are done
    at second 5, and 1 is left."""
    host = Host(SimHostSettings(engine_slowdown=2.0, trainer_slowdown=2.0))
    engine = SimEngine("engine-0", EXACT.engines, lambda _: 2, host=host)
    trainer = SimTrainer(change(EXACT.trainer, step_s=4.0), host=host)
    training = asyncio.ensure_future(trainer.step())
    await asyncio.sleep(1)
    await engine.generate(sample())
    assert clock.now() == 5.0
    assert (await training).compute_s == 6.0


async def test_a_judge_on_the_engines_devices_slows_them_down_while_it_judges() -> None:
    """A token of 1 s, then 6 s in which two samples are judged and tokens take 3 s, then 7 tokens of 1 s."""
    host = Host(SimHostSettings(judge_slowdown=3.0))
    engine = SimEngine("engine-0", EXACT.engines, lambda _: 10, host=host)
    rewards = SimRewards(SimRewardSettings(workers=1, median_s=3.0, sigma=0.0), seed=0, host=host)
    generation = asyncio.ensure_future(engine.generate(sample()))
    await asyncio.sleep(1)
    await asyncio.gather(*(rewards.score(sample(number)) for number in (1, 2)))
    assert clock.now() == 7.0
    await generation
    assert clock.now() == 14.0


def test_a_host_without_slowdowns_changes_no_time() -> None:
    schedule = SCHEDULES_BY_NAME["tailrace"]
    hosted = simulate(schedule, sim=SIM.model_copy(update={"host": SimHostSettings()}))
    assert hosted.ended_s == pytest.approx(simulate(schedule).ended_s, rel=1e-9)


async def test_engines_die_with_the_rate_of_the_settings() -> None:
    """1000 lives of 100 s and as many restarts of 10 s are 110,000 s."""
    states = []
    engine = SimEngine("engine-0", EXACT.engines, lambda _: 10)
    engine.on_state = lambda why: states.append((clock.now(), engine.state))
    let_die(partial(engine.fail, 10.0), 100.0, seed=0, number=0)
    await asyncio.sleep(110_000)
    deaths = [at_s for at_s, state in states if state == "dead"]
    assert 900 < len(deaths) < 1100
    restarts = [at_s for at_s, state in states if state == "open"]
    assert all(up - down == pytest.approx(10) for down, up in zip(deaths, restarts, strict=False))


def test_faults_are_the_same_for_the_same_seed_and_cost_no_token() -> None:
    faulty = SIM.model_copy(update={"faults": SimFaultSettings(mean_life_s=20.0, restart_s=5.0)})
    run = partial(simulate, SCHEDULES_BY_NAME["serial"], SETTINGS, faulty)
    first, again = run(), run()
    assert [repr(event) for event in first.of(EngineStateChanged)] == [
        repr(event) for event in again.of(EngineStateChanged)
    ]
    assert first.ended_s == again.ended_s > simulate(SCHEDULES_BY_NAME["serial"]).ended_s
    assert len(first.of(EngineStateChanged)) > 4
    assert not any("engine" in reason for reason in first.totals.wasted_tokens)


def test_a_trainer_that_dies_computes_again_what_it_had_since_its_checkpoint_and_the_call_under_way() -> None:
    """Calls of 10 s; it dies in the second one and is back after 20 s. With a checkpoint after each step 4 s
    are lost; without one 10 s of the first step, too."""
    found = []

    async def main(checkpoint_steps: int) -> None:
        trainer = SimTrainer(SimTrainerSettings(step_s=10.0))
        trainer.checkpoint_steps = checkpoint_steps
        await trainer.step()
        asyncio.get_running_loop().call_later(4.0, trainer.die, 20.0)
        stats = await trainer.step()
        found.append((clock.now(), stats.num_steps, stats.compute_s))
        asyncio.get_running_loop().call_later(1.0, trainer.die, 20.0)
        await asyncio.sleep(15.0)  # it is restarted meanwhile, before anybody asks
        await trainer.step()
        found.append((clock.now(), 3))

    for checkpoint_steps in (1, 10):
        clock.run(main(checkpoint_steps), virtual=True)
    assert found == [(44.0, 2, 10.0), (75.0, 3), (54.0, 2, 10.0), (105.0, 3)]


def test_engines_that_generate_while_the_trainer_restarts_leave_it_more_of_the_time() -> None:
    faults = SimFaultSettings(trainer_mean_life_s=20.0, trainer_restart_s=5.0)
    ratios = []
    for changed in (None, faults, faults.model_copy(update={"trainer_alone": False})):
        sim = SIM.model_copy(update={"faults": changed})
        outcome = simulate(SCHEDULES_BY_NAME["tailrace"], SETTINGS, sim)
        assert outcome.totals.wasted_tokens.total() == 0
        ratios.append(sum(step.stats.compute_s for step in outcome.of(Stepped)) / outcome.ended_s)
    assert ratios[0] > ratios[1] > ratios[2] > 0
