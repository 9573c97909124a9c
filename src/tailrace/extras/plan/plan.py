"""The problem of a plan, the candidates that can be built, and their times in virtual time.

The least time of an optimizer step follows from the rates of a set-up and the lengths of its responses.
Decode steps that an engine needs for its share of the tokens of an optimizer step, at least:

    tokens / batch                       the batch is limited by slots and KV cache
    groups * longest of a group / alive  a group is alive until its longest response ends (Little's law)
    longest that the step waits for      in a schedule that waits for it

Each decode step reads the weights, and each token adds its own part, so the time of generation is a closed
formula (sim/engine.py). A schedule whose engines stop also waits for a reward. Left out are prefills,
preemptions, waits for a bound on staleness, and that engines drain at different times: they only add to it.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import inf
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from tailrace.algo.advantages import GRPO, ComputeAdvantages
from tailrace.controller.base import RunSettings
from tailrace.drivers.assembly.simulation import simulate
from tailrace.errors import ConfigError
from tailrace.extras.plan.candidates import (
    MOVING,
    Candidate,
    Work,
    Workload,
    candidates,
    divisions,
    response_lengths,
)
from tailrace.ledger.prices import Prices, PriceSettings
from tailrace.record.events import Event, GroupEnded, Row, Stepped
from tailrace.rollout.placement import DeviceSharing
from tailrace.schedules import Schedule
from tailrace.sim.cluster import memory_shares, rates
from tailrace.sim.settings import SimClusterSettings, SimEngineSettings, SimSettings

ANY = Work("serial", {})
"""A schedule whose work is that of all."""
WARM_UP = 0.25
"""Share of the rounds that does not count: a schedule that never stops begins with short responses. It has
whole cycles of a schedule, because the rounds of one differ."""


class Floor(NamedTuple):
    """The least time of one optimizer step of a candidate."""

    generation_s: float
    """Seconds of the engines alone."""
    training_s: float
    """Seconds of the trainer alone, optimizer step included."""
    step_s: float
    """Seconds of both, as the schedule combines them."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate in virtual time.

    Args:
        steps: optimizer steps of the run.
        figures: those of `measure`, and step_s: seconds of an optimizer step; kv_share: KV cache that the
            requests in flight fill, with responses of mean length; trainer_share: memory of the trainer's
            devices that its state fills; device_share: memory of a device that is filled at most, where
            engine and trainer share one by what both hold.
        variants: other candidates with the same figures.
    """

    candidate: Candidate
    floor: Floor
    steps: int
    figures: Row
    variants: tuple[Candidate, ...] = ()

    @property
    def step_s(self) -> float:
        return self.figures["step_s"]

    @property
    def rank(self) -> tuple[bool, float]:
        """The less, the better: what was measured whole comes before what a slice predicts."""
        return self.candidate.slices > 1, self.step_s

    def looks_like(self, other: "Measured") -> bool:
        """Whether both are the same run: to the last digit they take as long, with as old tokens."""
        return all(self.figures[key] == other.figures[key] for key in ("step_s", "lag_mean", "waste_share"))


def floor(candidate: Candidate, sim: SimSettings, load: Workload, groups_per_step: int) -> Floor:
    """Return the least time of one optimizer step of a candidate with these rates."""
    work, engines, trainer = candidate.work, sim.engines, sim.trainer
    samples = groups_per_step * len(load.groups[0])
    alive_steps = groups_per_step * load.longest_of_group / work.alive
    busy_s = generation_seconds(engines, load, samples, alive_steps)
    waited_steps = max(alive_steps, work.waited_tokens(load))
    generation_s = generation_seconds(engines, load, samples, waited_steps)
    pass_s = load.passes_s(trainer, samples)
    last_s, others_s = trainer.step_s / work.steps, trainer.step_s * (work.steps - 1) / work.steps
    publish_s, load_s = trainer.publish_s / work.steps, engines.load_s / work.steps
    reward_s = sim.rewards.median_s / work.steps if sim.rewards.code is None else 0.0
    again_s = trainer.early_swap_s if candidate.lends else 0.0  # while others generate
    switch_s = (engines.sleep_s + engines.wake_s + 2 * trainer.swap_s - again_s) / work.steps
    if candidate.lends:  # the devices of engines that are idle train
        step_s = max(generation_s + reward_s, busy_s + pass_s) + others_s + last_s + publish_s + switch_s
    elif candidate.takes_turns:
        step_s = generation_s + reward_s + pass_s + others_s + last_s + publish_s + switch_s
    elif work.stops:
        step_s = max(generation_s + reward_s, pass_s + others_s) + last_s + publish_s + load_s
    else:
        step_s = max(generation_s + load_s, pass_s + others_s + last_s + publish_s)
    return Floor(generation_s, pass_s + trainer.step_s, step_s)


def generation_seconds(cost: SimEngineSettings, load: Workload, samples: int, steps: float) -> float:
    """Return the least time in which the engines generate some samples, in at least so many steps. A step
    gives each request one token; drafts make it shorter."""
    count = cost.count or 1
    tokens = samples * load.mean_tokens / count
    room = max(1.0, cost.kv_tokens / load.mean_context)
    steps = max(steps, tokens / min(cost.slots or room, room))
    most = cost.gained(len(cost.acceptance))
    base_s = max(cost.base_s * steps / most, cost.compute_s * tokens)
    of_request_s = (cost.overhead_per_request_s + cost.context_s * load.mean_context) / most
    return cost.overhead_s * steps / most + base_s + (cost.slope_s + of_request_s) * tokens


class TrainedLengths:
    """Sink: the lengths of the responses that each step trained, and the prompts whose groups have ended."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.ended: list[int] = []

    def on(self, event: Event) -> None:
        if isinstance(event, GroupEnded):
            self.ended.append(event.prompt)
        elif isinstance(event, Stepped):
            self.steps.append([sample.num_tokens for sample in event.samples])

    def close(self) -> None:
        pass  # nothing is pending


METERED = ("bias/length", "bias/delay")
"""Figures of a run's last step: the bias until then (record/bias.py)."""


def measure(schedule: Schedule, sim: SimSettings, settings: RunSettings, **options: Any) -> Row:
    """Run a schedule in virtual time.

    Args:
        settings: its rounds are those of the whole run.
        options: of `assembly.simulation.simulate`.

    Returns:
        The figures after the warm-up, and of the whole run: length_bias, without the prompts that
        are in flight at its end, because they would be trained later; bias/length and bias/delay, which a run
        estimates without the lengths of what is cut off; step_spread, the standard deviation of
        the mean lengths of the optimizer steps as a share of their mean; and over_bound.
    """
    lengths = TrainedLengths()
    simulated = simulate(schedule, sim, settings, sinks=(lengths,), **options)
    lengths_of_all = response_lengths(sim, settings.group_size, lengths.ended, settings.seed)
    bias = fmean(chain.from_iterable(lengths.steps)) / fmean(chain.from_iterable(lengths_of_all)) - 1.0
    means = [fmean(step) for step in lengths.steps]
    last = simulated.steps[-1]
    return simulated.figures | {
        "length_bias": bias,
        **{name: last[name] for name in METERED},
        "step_spread": pstdev(means) / fmean(means),
        "over_bound": simulated.over_bound,
    }


@dataclass(frozen=True)
class Problem:
    """The problem of a plan.

    Args:
        sim: devices and lengths, with slots and a length limit.
        run: group size and seed.
        groups_per_step: groups of an optimizer step. What is learnt depends on it, so it is given.
        steps: optimizer steps over which the best candidates are measured.
        max_lag: largest age of a trained token, in optimizer steps.
        max_mean_lag: largest mean age.
        min_ess: least effective sample size, as a share.
        max_length_bias: largest length bias, as a share.
        reference: whether the algorithm needs a reference model.
        prices: those of the devices and tokens; None: costs are not measured.
        divided: devices of a cluster that divide each layer of the trainer.
        progress: is told in words how far the search is.
        slices: equal slices of the cluster, of which this one has its share of the groups.
    """

    sim: SimSettings
    run: RunSettings
    groups_per_step: int
    steps: int = 64
    max_lag: float = inf
    max_mean_lag: float = 4.0
    min_ess: float = 0.9
    max_length_bias: float = 0.02
    reference: bool = False
    compute_advantages: ComputeAdvantages = GRPO
    prices: PriceSettings | None = None
    divided: Callable[[SimClusterSettings], int] = lambda cluster: cluster.trainer_tensor_parallel or 1
    progress: Callable[[str], None] = lambda words: None
    slices: int = 1

    @property
    def samples_per_step(self) -> int:
        return self.groups_per_step * self.run.group_size

    @property
    def limits(self) -> Mapping[str, tuple[str, float]]:
        """Words for a candidate that is above a limit, with the key of the limit and its value."""
        keys = {
            "prefer short or long responses: their bias is above": "max_length_bias",
            "train tokens whose mean lag is above": "max_mean_lag",
            "have an effective sample size below": "min_ess",
        }
        values = {words: (key, getattr(self, key)) for words, key in keys.items()}
        return {f"{words} plan.{key} = {value:g}": (key, value) for words, (key, value) in values.items()}

    def is_biased(self, measured: Measured) -> bool:
        return abs(measured.figures["length_bias"]) > self.max_length_bias

    def exceeded(self, measured: Measured) -> str:
        """The limit that a candidate is above, as in `limits`; empty: none."""
        figures = measured.figures
        stale, few = figures["lag_mean"] > self.max_mean_lag, figures["ess_mean"] < self.min_ess
        above = self.is_biased(measured), stale, few
        return next((limit for limit, is_above in zip(self.limits, above, strict=True) if is_above), "")

    def load(self, steps: int) -> Workload:
        if steps not in self._loads:
            prompts = range(steps * self.groups_per_step)
            groups = response_lengths(self.sim, self.run.group_size, prompts, self.run.seed)
            self._loads[steps] = Workload(groups, self.sim.lengths.prompt_tokens, self.slices)
        return self._loads[steps]

    @cached_property
    def _loads(self) -> dict[int, Workload]:
        return {}

    def floor(self, candidate: Candidate, sim: SimSettings, steps: int) -> Floor:
        """The least time of one of the first optimizer steps."""
        return floor(candidate, sim, self.load(steps), self.groups_per_step)

    @cached_property
    def device_seconds(self) -> tuple[float, float]:
        """Return the least device seconds of generation and of training that a step needs, with full batches
        and without waits: over all divisions of the devices, so whatever the limits and the schedule are."""
        assert self.sim.cluster
        load, found, num = self.load(self.steps), list[tuple[float, float]](), self.sim.cluster.devices
        for kind, rollout, size in divisions(self.sim.cluster):
            candidate = Candidate(ANY, kind, rollout, size)
            with suppress(ConfigError):
                sim = self.sim_of(candidate)
                generation_s = generation_seconds(sim.engines, load, self.samples_per_step, 0.0)
                training_s = floor(candidate, sim, load, self.groups_per_step).training_s
                found.append((generation_s * (rollout or num), training_s * (num - (rollout or 0))))
        generation, training = zip(*found, strict=True)
        return min(generation), min(training)

    def candidates(self, *, whole: bool = False) -> tuple[dict[Candidate, SimSettings], Counter[str]]:
        """Return the candidates within max_lag that fit the devices, with their rates, and how many others
        each limit excludes. `whole`: none is a slice. Raises a ConfigError if there are none."""
        sims: dict[Candidate, SimSettings] = {}
        excluded, refusals = Counter[str](), list[ConfigError]()
        for candidate in candidates(self.sim, self.groups_per_step, self.run.group_size, self.max_lag):
            if candidate.work.lag > self.max_lag:
                excluded[f"train tokens that are older than plan.max_lag = {self.max_lag:g} steps"] += 1
                continue
            candidate = replace(candidate, slices=1) if whole else candidate
            if candidate.slices > 1 and candidate.work.schedule in MOVING:
                excluded["move requests, which no slice of the cluster foretells; --whole measures them"] += 1
                continue
            try:
                sims[candidate] = self.sim_of(candidate)
            except ConfigError as why:
                refusals.append(why)
                excluded[f"do not fit the devices: {why.problem}"] += 1
        if not sims:
            raise refusals[-1]
        return sims, excluded

    def measure(self, candidate: Candidate, sim: SimSettings, steps: int) -> Measured:
        """Run a candidate, or its slice, for some optimizer steps in virtual time."""
        if candidate.slices > 1:
            return self._predicted(candidate, sim, steps)
        work = candidate.work
        assert sim.cluster
        rounds = max(1, steps // work.steps)
        endless = {"rounds": rounds, "step_timeout_s": 1e9, "step_warning_timeout_s": 1e9}
        figures = measure(
            work.ready(),
            sim,
            self.run.changed(**endless),
            sharing=DeviceSharing(candidate.kind),
            replicas=candidate.replicas,
            reference=self.reference,
            prices=self.prices
            and Prices(self.prices, *(n // self.slices for n in sim.cluster.devices_by_use)),
            warm_up_rounds=work.cycle * round(WARM_UP * rounds / work.cycle),
            compute_advantages=self.compute_advantages,
        )
        figures |= {
            "step_s": self.samples_per_step / figures["samples_per_s"],
            "kv_share": self._kv_share(candidate, sim.engines),
        }
        figures["trainer_share"], figures["device_share"] = memory_shares(sim.cluster)
        return Measured(candidate, self.floor(candidate, sim, steps), steps, figures)

    def estimate(self, candidate: Candidate, sim: SimSettings, steps: int) -> float:
        """The bound of a step, and what a schedule mostly waits for besides: with a bound on lag, that the
        longest response of the steps in flight ends; on devices that both have, that half of the shorter side
        is not hidden."""
        work, floor, load = candidate.work, self.floor(candidate, sim, steps), self.load(steps)
        if candidate.lends:
            return floor.step_s + min(floor.generation_s, floor.training_s) / 2
        if candidate.takes_turns or work.stops or work.lag == inf:
            return floor.step_s
        num = work.lag + 1
        longest = load.longest(int(num) * self.groups_per_step * self.slices) / num
        return max(floor.step_s, generation_seconds(sim.engines, load, self.samples_per_step, longest))

    def _predicted(self, candidate: Candidate, sim: SimSettings, steps: int) -> Measured:
        """Run a candidate on one slice of the cluster, whose trainer takes as long for a step as the whole.
        The whole takes longer by what the estimates differ: the longest of more responses is longer."""
        num = candidate.slices
        part, its = replace(candidate, work=candidate.work.divided(num), slices=1), _slice(sim, num)
        problem = replace(self, sim=its, groups_per_step=self.groups_per_step // num, slices=num)
        figures = problem.measure(part, its, steps).figures
        more_s = self.estimate(candidate, sim, steps) - problem.estimate(part, its, steps)
        step_s = figures["step_s"] + more_s
        figures = figures | {"step_s": step_s, "samples_per_s": self.samples_per_step / step_s}
        return Measured(candidate, self.floor(candidate, sim, steps), steps, figures)

    def sim_of(self, candidate: Candidate) -> SimSettings:
        assert self.sim.cluster
        cluster = candidate.on(self.sim.cluster)
        divided = self.divided(cluster)
        return rates(self.sim.changed(cluster=cluster.changed(trainer_tensor_parallel=divided)))

    def _kv_share(self, candidate: Candidate, engines: SimEngineSettings) -> float:
        alive = candidate.work.alive * self.run.group_size / (engines.count or 1)
        return min(alive, engines.slots or alive) * self.load(self.steps).mean_context / engines.kv_tokens


def _slice(sim: SimSettings, num: int) -> SimSettings:
    """One of so many equal slices of a cluster. What does not depend on the number of samples stays."""
    shares = dict(engines="count", rewards="workers", lengths="rows")
    rates = dict(trainer="tokens_per_s", reference="tokens_per_s")
    changes = {"trainer": {"attention_s": sim.trainer.attention_s * num}}
    for section, key in (shares | rates).items():
        value = getattr(getattr(sim, section), key)
        divided = value and (value / num if section in rates else value // num)
        changes.setdefault(section, {})[key] = divided
    return sim.changed(**changes)
