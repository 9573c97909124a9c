"""The candidates of a cluster: every schedule on every division of the devices for which it is made, and what
bounds their times: the lengths of the responses, without running a simulation.

Where times cannot differ one schedule represents others: `seer` is planned if requests wait for slots, and
`streamrl` if rows come again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from itertools import chain
from math import ceil, gcd, inf
from statistics import fmean
from typing import Any

from tailrace.contracts.data import Epochs
from tailrace.rollout.admission import Frontier, FrontierFirst
from tailrace.rollout.placement import DeviceSharing, Kind, OfKind
from tailrace.schedules import SCHEDULES, Schedule
from tailrace.sim.engine import Steps
from tailrace.sim.settings import SimClusterSettings, SimSettings, SimTrainerSettings
from tailrace.sim.world import Lengths, SimPrompts
from tailrace.types import Group, Sample, SampleId

LEFT_OUT = {
    "conventional": "serial",  # which trains the same without shuffling it
    "rolloutpipe": "rolloutpipe_eager",  # which accumulates earlier what this trains
    "april_dapo": "april",
    "tailbatch_dapo": "tailbatch",
    "bubblespec": "serial",
}
"""Schedules that are not planned, and those that represent them. The `_dapo` ones filter groups, which no
lengths of responses foretell, and nothing foretells how many drafted tokens an update leaves."""
MOVING = ("dora", "laminar")
"""Schedules that move requests to other engines. The more engines there are, the more requests share one: a
step of `laminar` takes 25% longer on 104 engines than on 13 with the same load of each."""
LAGS = (1, 3)
"""Bounds of lag that are tried, besides 0 and none."""
RACES = (1.25, 1.5)
"""Multiples of the wanted prompts that race. RollPacker (section 6.4) tries both."""
ROUNDS_SORTED = 8
"""Rounds whose prompts `tailrace_on_policy` sorts by length."""
WIDTHS = (1.5, 2, 3, 4)
"""Groups in flight, as multiples of those of a step."""
LEAST_GAIN = 0.98
"""A frontier's estimated main time over that of FIFO, at most."""
PARTS = 16
"""Divisions of more devices than this differ by one part of so many."""
SLICE = 512
"""Samples of an optimizer step of a slice of a cluster, at least: the longest of fewer is much shorter."""


def response_lengths(sim: SimSettings, group_size: int, prompts: Iterable[int], seed: int) -> list[list[int]]:
    """Return the lengths of the responses to prompts, with the weights that a run begins with."""
    length_of, rows = Lengths(sim.lengths, seed), sim.lengths.rows
    drawn = SimPrompts(sim.lengths.prompt_tokens, Epochs(rows, seed) if rows else None)
    groups = [Group(drawn[index], group_size, []) for index in prompts]
    return [
        [length_of(Sample(SampleId(group.prompt.index, 0, k), group)) for k in range(group_size)]
        for group in groups
    ]


@dataclass(frozen=True)
class Workload:
    """The responses of the first prompts."""

    groups: Sequence[Sequence[int]]
    """The lengths of each group's responses, in tokens."""
    prompt_tokens: int
    slices: int = 1
    """Slices of the cluster, of which one has these prompts; numbers of groups are those of them all."""

    @cached_property
    def mean_tokens(self) -> float:
        return fmean(fmean(group) for group in self.groups)

    @cached_property
    def mean_context(self) -> float:
        """Positions of a running request, mean over its decode steps."""
        return self.prompt_tokens + self._mean_square / self.mean_tokens / 2

    @cached_property
    def _mean_square(self) -> float:
        return fmean(fmean(tokens**2 for tokens in group) for group in self.groups)

    def passes_s(self, trainer: SimTrainerSettings, samples: int) -> float:
        """Seconds of forward and backward of some samples."""
        prompt, mean = self.prompt_tokens, self.mean_tokens
        squares = self._mean_square + 2 * prompt * mean + prompt**2
        return samples * ((prompt + mean) / trainer.tokens_per_s + trainer.attention_s * squares)

    @cached_property
    def longest_of_group(self) -> float:
        return self.longest(1)

    def longest(self, num_groups: int) -> float:
        """Longest response of a rollout of so many groups, mean over rollouts."""
        return fmean(max(rollout) for rollout in self._rollouts(ceil(num_groups / self.slices)))

    def longest_of_race(self, wanted: int, launched: int) -> float:
        """Longest trained response of a round of tail batching (RollPacker 3), mean over rounds: the first of
        the launched groups win, and the others have a round of their own when there are enough."""
        longest, deferred, rounds = self._longest, list[int](), list[int]()
        wanted, launched = wanted // self.slices, launched // self.slices
        for first in range(0, len(longest) - launched + 1, launched):
            ordered = sorted(longest[first : first + launched])
            rounds.append(ordered[wanted - 1])
            deferred += ordered[wanted:]
            if len(deferred) >= wanted:
                rounds.append(max(deferred[:wanted]))
                del deferred[:wanted]
        return fmean(rounds)

    def longest_of_step(self, num_groups: int, groups_per_step: int) -> float:
        """Longest response of a step, where the groups of a rollout are trained from short to long and each
        step starts the rest again; mean over steps."""
        num_groups, groups_per_step = num_groups // self.slices, groups_per_step // self.slices
        ordered = [sorted(rollout) for rollout in self._rollouts(num_groups)]
        return fmean(fmean(rollout[groups_per_step - 1 :: groups_per_step]) for rollout in ordered)

    def frontier_width(self, sim: SimSettings, groups_per_round: int, groups_per_step: int) -> int:
        """Return the width F of a strict frontier (RolloutPipe 3.3) with the least estimated main time, or R:
        FIFO. `sim`: with all rates.

        F groups serve F K mean / longest requests: the slots of samples that have ended stay free. A narrow
        frontier has short decode steps, and the first U groups sooner; too narrow a one starves the trainer.
        """
        R, U, K, trainer = groups_per_round, groups_per_step, len(self.groups[0]), sim.trainer
        num_engines, longest = sim.engines.count or 1, self.longest_of_group
        slots = num_engines * (sim.engines.slots or R * K)
        train_s = self.passes_s(trainer, K) + trainer.step_s / U

        def step_s(num_requests: float) -> float:
            running = ceil(min(num_requests, slots) / num_engines)
            return Steps.of(sim.engines, running, int(running * self.mean_context)).first_s

        def main_time_s(width: int) -> float:
            served = width * K * self.mean_tokens / longest
            groups = min(1.0, slots / served) * width
            first_s = sorted(self._longest[:width])[U - 1] * step_s(width * K)
            last_s = (R - groups) * longest / groups * step_s(served)
            last_s += self.longest(ceil(groups)) * step_s(served / 2)
            return max(first_s + R * train_s, last_s + U * train_s)

        return min(range(U, R + 1), key=lambda F: main_time_s(F) * (LEAST_GAIN if F == R else 1.0))

    @cached_property
    def _longest(self) -> list[int]:
        return [max(group) for group in self.groups]

    def _rollouts(self, num_groups: int) -> list[list[int]]:
        """The longest response of each group, by rollout. What is too short for one is left out."""
        last = max(1, len(self._longest) - num_groups + 1)
        return [self._longest[first : first + num_groups] for first in range(0, last, num_groups)]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A schedule with its parameters, and what bounds its time.

    Args:
        label: tells it from the schedule's other candidates; the same on every division of the devices.
        lag: largest age of a trained token, in optimizer steps.
        steps: optimizer steps of a round, which ends with a publication.
        alive: groups that are generated at the same time, at most.
        waited_tokens: the longest response that an optimizer step waits for, on average.
        stops: the engines wait while the trainer steps and publishes.
        cycle: rounds after which the schedule is where it began.
        bound: the schedule with its parameters, of a setting that is no candidate; None: as they say.
    """

    schedule: str
    parameters: Mapping[str, Any]
    label: str = ""
    lag: float = 0
    steps: int = 1
    alive: float = inf
    waited_tokens: Callable[[Workload], float] = lambda load: 0.0
    stops: bool = True
    cycle: int = 1
    bound: Schedule | None = None

    @property
    def name(self) -> str:
        return f"{self.schedule}, {self.label}" if self.label else self.schedule

    def ready(self) -> Schedule:
        return self.bound or partial(SCHEDULES[self.schedule], **self.parameters)

    def divided(self, num: int) -> "Work":
        """The work of one of so many slices: its share of groups, and of the tokens of a batch to train."""
        shares, schedule = dict[str, Any](), self.ready()
        for name, parameter in signature(schedule).parameters.items():
            value = parameter.default
            if isinstance(value, Frontier | FrontierFirst):
                shares[name] = value.changed(groups=max(1, round(value.groups / num)))
            elif isinstance(value, int) and ("groups" in name or name in ("window", "max_tokens_per_batch")):
                shares[name] = max(1, round(value / num))
        return replace(self, alive=self.alive / num, bound=partial(schedule, **shares))


@dataclass(frozen=True, slots=True)
class Candidate(OfKind):
    """A schedule on a division of the devices."""

    work: Work
    kind: Kind
    rollout_devices: int | None
    """Devices that generate; None: all generate and train in turn."""
    tensor_parallel: int
    slices: int = 1
    """Equal slices of the cluster, of which one is simulated; 1: the whole cluster is."""

    @property
    def replicas(self) -> int:
        return 2 if self.lends else 1

    @property
    def where(self) -> str:
        """The placement in words."""
        return "elastic" if self.lends else "in turn" if self.takes_turns else "on separate devices"

    def on(self, cluster: SimClusterSettings) -> SimClusterSettings:
        """The cluster with this division of its devices."""
        return cluster.changed(
            rollout_devices=self.rollout_devices,
            tensor_parallel=self.tensor_parallel,
            trainer_replicas=self.replicas,
        )

    def name(self, devices: int) -> str:
        return f"{self.work.name} ({self.division(devices)})"

    def division(self, devices: int) -> str:
        """The devices in words."""
        num = self.rollout_devices
        words = self.where if num is None else f"{num} + {devices - num}"
        return f"{words}, TP {self.tensor_parallel}" if self.tensor_parallel > 1 else words


def candidates(
    sim: SimSettings, groups_per_step: int, group_size: int, max_lag: float = inf
) -> Iterator[Candidate]:
    """Yield the candidates of a cluster. What [sim.cluster] sets itself stays. `max_lag`: an age of trained
    tokens, in optimizer steps, that is tried besides LAGS."""
    assert sim.cluster
    U, K, lags = groups_per_step, group_size, sorted({lag for lag in (*LAGS, max_lag) if 0 < lag < inf})
    for kind, rollout_devices, size in divisions(sim.cluster, partial(num_slices, sim, U, K)):
        num_engines, slots = (rollout_devices or sim.cluster.devices) // size, sim.engines.slots or 1
        sharing = DeviceSharing(kind)
        if sharing.takes_turns and not sharing.lends:
            works = _in_turn(U, K, lags, num_engines * slots)
        else:
            works = chain(
                _streamed(U, lags, bool(sim.lengths.rows)),
                () if sharing.takes_turns else _never_stopped(U, K, lags, num_engines, slots),
            )
        for work in {work.name: work for work in works}.values():
            if work.schedule != "trl_async" or work.lag < (sim.engines.versions or 1):
                slices = num_slices(sim, U, K, size, num_engines)
                yield Candidate(work, kind, rollout_devices, size, slices)


def num_slices(sim: SimSettings, groups_per_step: int, group_size: int, size: int, engines: int = 0) -> int:
    """Return into how many equal slices a cluster is divided to predict a candidate. Each has its share of
    devices, groups of an optimizer step, workers of rewards, rows of the data, and of these engines of `size`
    devices; and the devices of at least PARTS engines."""
    assert sim.cluster
    common = gcd(sim.cluster.devices, groups_per_step, sim.rewards.workers, sim.lengths.rows or 0, engines)
    most = min(groups_per_step * group_size // SLICE, sim.cluster.devices // size // PARTS)
    most = 1 if sim.trainer.pass_s else most  # a slice has as many passes of a step, or fewer
    return max(num for num in range(1, max(1, most) + 1) if common % num == 0)


def divisions(
    cluster: SimClusterSettings, slices: Callable[[int], int] = lambda size: 1
) -> Iterator[tuple[Kind, int | None, int]]:
    """Yield placement, devices that generate, and tensor-parallel size. `slices`: how many there are of the
    cluster with that size; each has its share of the engines."""
    devices = cluster.devices
    given = cluster.model_fields_set
    largest = min(devices, cluster.devices_per_node)
    sizes = [2**n for n in range(largest.bit_length()) if 2**n <= largest]
    for size in [cluster.tensor_parallel] if "tensor_parallel" in given else sizes:
        if given_devices := cluster.rollout_devices:
            if size <= given_devices:
                yield "disaggregated", given_devices, size
            continue
        unit = size * slices(size)
        steps = {round(devices * part / PARTS / unit) * unit for part in range(1, PARTS)}
        for rollout_devices in sorted(each for each in steps if 0 < each < devices):
            yield "disaggregated", rollout_devices, size
        if devices % size == 0:
            yield "colocated", None, size
            if devices // size > 1:
                yield "elastic", None, size


def _in_turn(U: int, K: int, lags: Sequence[float], num_slots: int) -> Iterator[Work]:
    """Schedules that generate, then train."""
    for lag in (0, *lags):
        R = (int(lag) + 1) * U
        for name in ("serial", "seer") if num_slots < R * K else ("serial",):
            yield _rollout(name, R, U)
        if lag:
            yield replace(_rollout("sortedrl", R, U), steps=1, cycle=R // U)
        for alive in _widths(U, lag):
            parameters = dict(groups_per_round=U, groups_launched=alive, staleness=int(lag))
            label = f"{alive} launched, staleness {lag:.0f}"
            yield Work("april", parameters, label, lag, alive=alive)
    work = replace(_rollout("sortedrl_on_policy", 4 * U, U), lag=0, steps=1, cycle=4)
    yield replace(work, waited_tokens=lambda load: load.longest_of_step(4 * U, U))
    for race in _races(U):
        yield _race("tailbatch", U, race)
        yield replace(_race("tailbatch_async", U, race), lag=inf, waited_tokens=lambda load: 0.0)
    yield _sorted_races(U)
    for alive in (2 * U, 3 * U):
        parameters = dict(groups_per_round=U, groups_launched=alive)
        yield Work("april", parameters, f"{alive} launched", inf, alive=alive)


def _streamed(U: int, lags: Sequence[float], rows: bool) -> Iterator[Work]:
    """Schedules that train complete groups while the others are generated with the same weights."""
    for name in ("periodic_asynchrony", "streamrl") if rows else ("periodic_asynchrony",):
        yield _rollout(name, U)
    for race in _races(U):
        yield _race("rollpacker", U, race)
    yield _sorted_races(U)
    parameters = dict(groups_per_round=U, prompt_speculation=1.25, response_speculation=1.25)
    yield Work("rollpacker", parameters, "1.25 x prompts, 1.25 x responses")
    for lag in lags:
        yield _rollout("rolloutpipe_eager", (int(lag) + 1) * U, U)


def _never_stopped(U: int, K: int, lags: Sequence[float], num_engines: int, slots: int) -> Iterator[Work]:
    """Schedules that generate for later steps while they train."""
    if 1 in lags:
        yield replace(_rollout("one_step_off", U, U), lag=1, stops=False)
        yield replace(_rollout("streamrl_async", U), lag=1, stops=False)
    for lag in lags:
        for alive in _widths(U, lag):
            parameters = dict(groups_per_step=U, groups_in_flight=alive, staleness=int(lag))
            label = f"{alive} in flight, staleness {lag:.0f}"
            for name in ("tailrace", "dora", "laminar", "trl_async"):
                most = inf if name == "dora" else alive  # it fills idle slots, too
                yield Work(name, parameters, label, lag, alive=most, stops=False)
        most = (int(lag) + 1) * U
        alive = int((most + 1) / 1.3)  # with a window of 0.3 times as many
        if alive >= U:
            window = most + 1 - alive
            parameters = dict(groups_per_step=U, groups_in_flight=alive, window=window)
            label = f"{alive} in flight, window {window}"
            yield Work("windowed_fifo", parameters, label, lag, alive=alive, stops=False)
    for width in WIDTHS[:3]:
        yield _always_full(width, U, K, num_engines, slots)
        alive = ceil(width * U)
        parameters = dict(groups_per_step=U, groups_in_flight=alive)
        yield Work("laminar", parameters, f"{alive} in flight", inf, alive=alive, stops=False)
    for steps in LAGS:
        parameters = dict(groups_per_step=U, steps_off_policy=steps)
        yield Work("tinker_async", parameters, f"{steps} off", inf, alive=(steps + 1) * U, stops=False)


def _always_full(width: float, U: int, K: int, num_engines: int, slots: int) -> Work:
    """The requests of so many optimizer steps in flight at any time, as far as there are slots."""
    requests = min(slots, ceil(width * U * K / num_engines))  # more would wait, and change nothing
    width = requests * num_engines / U / K
    share = 1 / width  # of the samples of a step, for each request in flight
    return Work(
        "pipelinerl",
        dict(groups_per_step=U, in_flight_per_engine=requests, ring_groups=2 * U)
        | dict(ring_full="block", scoring_groups=ceil(2 * width * U)),
        f"{width:.3g} steps in flight",
        lag=inf,
        waited_tokens=lambda load: share * load.mean_tokens,
        stops=False,
    )


def _rollout(name: str, R: int, U: int | None = None) -> Work:
    """Whole rollouts of R groups. `U`: groups of an optimizer step; None: each rollout has one step."""
    steps, parameters = R // (U or R), dict(groups_per_round=R) | (dict(groups_per_step=U) if U else {})
    work = Work(name, parameters, f"{R} a rollout" if U else "", steps - 1, steps, alive=R)
    return replace(work, waited_tokens=lambda load: load.longest(R) / steps)


def _race(name: str, U: int, factor: float) -> Work:
    """A race for prompts, of which the losers start again."""
    alive = ceil(factor * U)
    return Work(
        name,
        dict(groups_per_round=U, prompt_speculation=factor, response_speculation=1.0),
        f"{factor:g} x prompts",
        alive=alive,
        waited_tokens=lambda load: load.longest_of_race(U, alive),
        cycle=U // (alive - U) + 1,  # short rounds until there is a long one
    )


def _sorted_races(U: int) -> Work:
    """Races of the shortest prompts of a batch of rounds. At best the batch is trained in that order."""
    return Work(
        "tailrace_on_policy",
        dict(groups_per_round=U, prompt_speculation=2.0, rounds_sorted=ROUNDS_SORTED),
        alive=2 * U,
        waited_tokens=lambda load: load.longest_of_step(ROUNDS_SORTED * U, U),
        cycle=ROUNDS_SORTED,
    )


def _races(U: int) -> list[float]:
    """Factors that launch different numbers of groups."""
    return list({ceil(race * U): race for race in RACES}.values())


def _widths(U: int, lag: float) -> list[int]:
    """Groups in flight that a bound on staleness allows: more than one step's."""
    most = (int(lag) + 1) * U
    return sorted({min(most, ceil(width * U)) for width in WIDTHS}) if lag else []
