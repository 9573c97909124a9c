"""The parts of a simulated run: engines, trainer and rewards that only take virtual time."""

from collections.abc import Sequence
from functools import partial

from tailrace.config import RunConfig
from tailrace.contracts.data import Epochs, PoolSettings
from tailrace.controller.base import RunComponents
from tailrace.drivers.kinds.hooks import SimulatedJudges
from tailrace.kinds import kind_of
from tailrace.ledger.prices import Prices
from tailrace.rollout.placement import DISAGGREGATED, DeviceSharing
from tailrace.rollout.reward_timeout import Anchors
from tailrace.schedules import Schedule
from tailrace.sim.engine import SimEngine, let_die
from tailrace.sim.host import Host
from tailrace.sim.reward import SharedJudge, rewards_of
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, SimEngineSettings, SimSettings
from tailrace.sim.trainer import SimReference, SimTrainer
from tailrace.sim.world import Lengths, SimPrompts


def simulated_parts(
    settings: SimSettings,
    seed: int,
    *,
    reference: bool = False,
    replicas: int = 1,
    sharing: DeviceSharing = DISAGGREGATED,
    prices: Prices | None = None,
    max_failures: int | None = None,
    pools: PoolSettings | None = None,
) -> RunComponents:
    """Engines, trainer and rewards that only take virtual time. Call it inside the virtual loop.

    Args:
        settings: with all rates, also those that [sim.cluster] fills.
        reference: whether the run has a reference model.
        replicas: replicas of the trainer, which divide its speed.
        sharing: whether engines and trainer have devices in common.
        prices: what the run pays for.
        max_failures: as RunComponents.
        pools: difficulty pools of the rows; None: there are none.
    """
    lengths = Lengths(settings.lengths, seed)
    epochs = Epochs(settings.lengths.rows, seed) if settings.lengths.rows else None
    prompts = SimPrompts(settings.lengths.prompt_tokens, epochs)
    max_tokens = settings.lengths.max_tokens or DEFAULT_MAX_TOKENS
    hosts = _hosts(settings)
    engines = [
        _engine(f"engine-{number}", settings.engines, lengths, max_tokens, host)
        for number, host in enumerate(hosts)
    ]
    anchors, host = Anchors(), None if settings.rewards.judge else hosts[0]
    trainer = SimTrainer(settings.trainer, replicas, host, asleep=sharing.takes_turns)
    if (faults := settings.faults) and faults.mean_life_s:
        for number, engine in enumerate(engines):
            let_die(partial(engine.fail, faults.restart_s), faults.mean_life_s, seed, number)
    if faults and faults.trainer_mean_life_s:
        trainer.checkpoint_steps = faults.trainer_checkpoint_steps
        die = partial(trainer.die, faults.trainer_restart_s, () if faults.trainer_alone else engines)
        let_die(die, faults.trainer_mean_life_s, seed, number=-1)
    judges: Sequence[SharedJudge] = ()
    if settings.rewards.judge:
        simulated: SimulatedJudges = kind_of("sim", "judges", "sim.rewards.judge")
        judges = simulated.simulated(settings, hosts)
    return RunComponents(
        engines=engines,
        trainer=trainer,
        rewards=rewards_of(settings.rewards, seed, anchors, host, judges),
        prompts=prompts,
        held_out=prompts,
        pools=pools or PoolSettings(),
        reference=SimReference(settings.reference) if reference else None,
        sharing=sharing,
        anchors=anchors,
        synchronous_rewards=settings.rewards.synchronous,
        max_failures=max_failures,
        prices=prices,
    )


def _hosts(settings: SimSettings) -> list[Host | None]:
    """Return the host of each engine: one that all share, or the devices that each shares with judges."""
    count = settings.engines.count or 1
    if settings.host and settings.rewards.judge:
        return [Host(settings.host) for _ in range(count)]
    return [Host(settings.host) if settings.host else None] * count


def _engine(
    name: str, cost: SimEngineSettings, lengths: Lengths, max_tokens: int, host: Host | None
) -> SimEngine:
    engine = SimEngine(name, cost, lambda sample: lengths(sample, engine.version), max_tokens, host)
    return engine


def failure_limit(config: RunConfig, schedule: Schedule) -> int:
    """`reward.max_failures`, or the samples of a round."""
    return config.reward.max_failures or config.run.group_size * most_groups(schedule)[1]


def most_groups(schedule: Schedule) -> tuple[str, int]:
    """The largest number of groups among the parameters of a schedule, with its name: those of a round, of a
    step or in flight. 1, if it has none."""
    parameters = getattr(schedule, "keywords", {})
    groups = [(value, name) for name, value in parameters.items() if name.startswith("groups_")]
    value, name = max(groups, default=(1, ""))
    return name, value
