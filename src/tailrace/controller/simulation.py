"""The parts of a simulated run."""

from collections.abc import Sequence

from tailrace.controller.base import Parts
from tailrace.data.epochs import Epochs
from tailrace.reward.timeout import Anchors
from tailrace.rollout.placement import DISAGGREGATED, Shared
from tailrace.sim.cluster import rates
from tailrace.sim.engine import SimEngine
from tailrace.sim.faults import let_die
from tailrace.sim.host import Host
from tailrace.sim.judge import SimJudges, forward_pass
from tailrace.sim.reference import SimReference
from tailrace.sim.reward import rewards_of
from tailrace.sim.settings import DEFAULT_MAX_TOKENS, SimEngineSettings, SimSettings
from tailrace.sim.trainer import SimTrainer
from tailrace.sim.world import Lengths, SimPrompts


def simulated_parts(
    settings: SimSettings,
    seed: int,
    *,
    reference: bool = False,
    replicas: int = 1,
    shared: Shared = DISAGGREGATED,
) -> Parts:
    """Engines, trainer and rewards that only take virtual time. Call it inside the virtual loop.

    Args:
        reference: whether the run has a reference model.
        replicas: replicas of the trainer, which divide its speed.
        shared: whether engines and trainer have devices in common.

    Raises:
        ConfigError: [sim.cluster] cannot work.
    """
    settings = rates(settings)
    lengths = Lengths(settings.lengths, seed)
    epochs = Epochs(settings.lengths.rows, seed) if settings.lengths.rows else None
    prompts = SimPrompts(settings.lengths.prompt_tokens, epochs)
    max_tokens = settings.lengths.max_tokens or DEFAULT_MAX_TOKENS
    hosts = _hosts(settings)
    engines = [
        _engine(f"engine{number}", settings.engines, lengths, max_tokens, host)
        for number, host in enumerate(hosts)
    ]
    if settings.faults:
        for number, engine in enumerate(engines):
            let_die(engine, number, settings.faults, seed)
    anchors, judges, host = Anchors(), _judges(settings, hosts), None if settings.rewards.judge else hosts[0]
    return Parts(
        engines=engines,
        trainer=SimTrainer(settings.trainer, replicas, host),
        rewards=rewards_of(settings.rewards, seed, anchors, host, judges),
        prompts=prompts,
        held_out=prompts,
        reference=SimReference(settings.reference) if reference else None,
        shared=shared,
        anchors=anchors,
        synchronous_rewards=settings.rewards.synchronous,
    )


def _hosts(settings: SimSettings) -> list[Host | None]:
    """Return the host of each engine: one that all share, or the devices that each shares with judges."""
    count = settings.engines.count or 1
    if settings.host is None:
        return [None] * count
    return (
        [Host(settings.host) for _ in range(count)]
        if settings.rewards.judge
        else [Host(settings.host)] * count
    )


def _judges(settings: SimSettings, hosts: Sequence[Host | None]) -> SimJudges | None:
    if settings.rewards.judge is None or settings.cluster is None:
        return None
    size = settings.cluster.tensor_parallel
    return SimJudges(forward_pass(settings), [host for host in hosts for _ in range(size)])


def _engine(
    name: str, cost: SimEngineSettings, lengths: Lengths, max_tokens: int, host: Host | None
) -> SimEngine:
    engine = SimEngine(name, cost, lambda sample: lengths(sample, engine.version), max_tokens, host)
    return engine
