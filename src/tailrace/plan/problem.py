"""What a plan is asked for, and the candidates that can be built."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf

from tailrace.algo.compute_advantages import GRPO
from tailrace.controller.base import RunSettings
from tailrace.errors import ConfigError
from tailrace.plan.base import Candidate, Floor, Measured
from tailrace.plan.bounds import floor
from tailrace.plan.candidates import candidates
from tailrace.plan.measure import measure
from tailrace.plan.workload import Workload, response_lengths
from tailrace.rollout.placement import Shared
from tailrace.rollout.pool import ComputeAdvantages
from tailrace.sim.cluster import rates, trainer_memory_share
from tailrace.sim.settings import SimSettings

WARM_UP = 0.25
"""Share of the rounds that does not count: a schedule that never stops begins with short responses. It has
whole cycles of a schedule, because the rounds of one differ."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A candidate that can be built.

    Args:
        sim: with the rates of its devices.
    """

    candidate: Candidate
    sim: SimSettings


@dataclass(frozen=True)
class Problem:
    """What a plan is asked for.

    Args:
        sim: devices and lengths, with slots and a length limit.
        run: group size and seed.
        groups_per_step: groups of an optimizer step. What is learnt depends on it, so it is given.
        steps: optimizer steps over which the best candidates are measured.
        max_lag: largest age of a trained token, in optimizer steps.
        max_length_bias: largest length bias (measure.py), as a share.
        reference: whether the algorithm needs a reference model.
        progress: is told in words what is measured next.
    """

    sim: SimSettings
    run: RunSettings
    groups_per_step: int
    steps: int = 64
    max_lag: float = inf
    max_length_bias: float = 0.02
    reference: bool = False
    compute_advantages: ComputeAdvantages = GRPO
    progress: Callable[[str], None] = lambda words: None

    def load(self, steps: int) -> Workload:
        """The responses to the prompts of the first optimizer steps."""
        if steps not in self._loads:
            prompts = range(steps * self.groups_per_step)
            groups = response_lengths(self.sim, self.run.group_size, prompts, self.run.seed)
            self._loads[steps] = Workload(groups, self.sim.lengths.prompt_tokens)
        return self._loads[steps]

    @cached_property
    def _loads(self) -> dict[int, Workload]:
        return {}

    def floor(self, entry: Entry, steps: int) -> Floor:
        """The least time of one of the first optimizer steps."""
        return floor(entry.candidate, entry.sim, self.load(steps), self.groups_per_step)

    def entries(self) -> tuple[list[Entry], Counter[str]]:
        """Return the candidates within max_lag that fit the devices, and how many others each limit
        excludes.

        Raises:
            ConfigError: there are none.
        """
        entries: list[Entry] = []
        excluded: Counter[str] = Counter()
        refusals: list[ConfigError] = []
        for candidate in candidates(self.sim, self.groups_per_step, self.run.group_size, self.max_lag):
            if candidate.work.lag > self.max_lag:
                excluded[f"plan.max_lag = {self.max_lag:g}"] += 1
                continue
            try:
                sim = self._sim_of(candidate)
            except ConfigError as why:
                refusals.append(why)
                excluded[f"{why.key}: {why.problem}"] += 1
                continue
            entries.append(Entry(candidate, sim))
        if not entries:
            raise refusals[-1]
        return entries, excluded

    def measure(self, entry: Entry, steps: int) -> Measured:
        """Run a candidate for some optimizer steps in virtual time."""
        work, group_size = entry.candidate.work, self.run.group_size
        assert entry.sim.cluster
        self.progress(f"{entry.candidate.name(entry.sim.cluster.devices)} over {steps} optimizer steps")
        rounds = max(1, steps // work.steps)
        endless = {"rounds": rounds, "give_up_s": 1e9, "patience_s": 1e9}
        run = measure(
            work.ready(),
            entry.sim,
            self.run.model_copy(update=endless),
            shared=Shared(entry.candidate.kind),
            replicas=entry.candidate.replicas,
            reference=self.reference,
            warm_up_rounds=work.cycle * round(WARM_UP * rounds / work.cycle),
            compute_advantages=self.compute_advantages,
        )
        return Measured(
            candidate=entry.candidate,
            floor=self.floor(entry, steps),
            steps=steps,
            step_s=self.groups_per_step * group_size / run.lap["samples_per_s"],
            samples_per_s=run.lap["samples_per_s"],
            lag_max=run.lap["lag_max"],
            lag_mean=run.lap["lag_mean"],
            length_bias=run.length_bias,
            over_bound=run.over_bound,
            wasted=run.lap["waste_share"],
            kv_share=self._kv_share(entry),
            trainer_share=trainer_memory_share(entry.sim.cluster),
        )

    def _sim_of(self, candidate: Candidate) -> SimSettings:
        assert self.sim.cluster
        division = {
            "rollout_devices": candidate.rollout_devices,
            "tensor_parallel": candidate.tensor_parallel,
        }
        cluster = self.sim.cluster.model_copy(update=division)
        return rates(self.sim.model_copy(update={"cluster": cluster}))

    def _kv_share(self, entry: Entry) -> float:
        engines = entry.sim.engines
        alive = entry.candidate.work.alive * self.run.group_size / (engines.count or 1)
        return min(alive, engines.slots or alive) * self.load(self.steps).mean_context / engines.kv_tokens
