"""Makes a schedule that can run from the config's [schedule] section: found, checked and rehearsed.

A rehearsal runs the schedule for two rounds in virtual time. So a parameter that the schedule refuses, a
broken bound and a wait without an end are found before any process starts, also in a schedule of the user's
own.
"""

import inspect
import math
from collections.abc import Collection, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from typing import Any, get_type_hints

from tailrace import clock
from tailrace.algo.base import check_algorithm
from tailrace.config import Config, RunConfig, validated
from tailrace.contracts.data import Prompts
from tailrace.controller.base import RunSettings
from tailrace.controller.execution import execute
from tailrace.controller.run import Run, check_verified
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.drivers.kinds.base import engine_kind
from tailrace.errors import ConfigError, ScheduleError, Stuck
from tailrace.record.events import (
    Accumulated,
    Event,
    Recorder,
    RequestEnded,
    RequestStarted,
    RoundStarted,
    Stepped,
)
from tailrace.rollout.members import GroupSettings
from tailrace.rollout.order import ORDERS, Order
from tailrace.rollout.placement import DeviceSharing
from tailrace.schedules import RECOMPUTES_OLD_LOGPROBS, Schedule
from tailrace.schedules.by_name import find_schedule, parameters_of
from tailrace.sim.settings import SimEngineSettings, SimLengthSettings, SimRewardSettings, SimSettings
from tailrace.types import Prompt

MAX_REHEARSED = 50_000
"""Prompts of a rehearsal, which takes half a millisecond for each."""
BoundSchedule = partial[Coroutine[Any, Any, None]]
"""A schedule with its parameters; it is called with the run."""


def with_published_defaults(config: Config) -> Config:
    """The config with `algorithm.old_policy` as the schedule's paper has it, unless the config sets it.
    Raises a ConfigError if the algorithm cannot be combined with it."""
    algorithm = config.algorithm
    if algorithm.old_policy is None:
        recomputed = config.schedule.get("name") in RECOMPUTES_OLD_LOGPROBS and algorithm.loss != "reinforce"
        algorithm = algorithm.changed(old_policy="recomputed" if recomputed else "recorded")
    check_algorithm(algorithm, group_size=config.run.num_trained, sampling=config.sampling)
    return config.changed(algorithm=algorithm)


def resolve(config: RunConfig) -> BoundSchedule:
    """The schedule of a config, ready to run: [schedule], and [schedules.NAME] over it. Raises a ConfigError
    if it is not found, or its parameters do not fit it or one another."""
    config = with_published_defaults(config)
    check_parameter_names(config)
    name = config.schedule.get("name")
    section = {**config.schedule, **config.schedules.get(str(name), {})}
    parameters = {key: value for key, value in section.items() if key != "name"}
    return bind(find_schedule(name), parameters, config)


def bind(schedule: Schedule, parameters: Mapping[str, Any], config: RunConfig) -> BoundSchedule:
    """A schedule with its parameters, rehearsed as the config has it. Raises a ConfigError if the parameters
    do not fit the schedule or one another."""
    checked = _checked(schedule, parameters)
    if "order" in checked and "order" not in inspect.signature(schedule).parameters:
        schedule = _ordered(schedule, checked.pop("order"))
    bound = partial(schedule, **checked)
    _rehearse(bound, config)
    return bound


def _ordered(schedule: Schedule, order: Order) -> Schedule:
    """The schedule with another order of the pool's queue than that of launch."""

    @wraps(schedule)
    async def ordered(run: Run, **parameters: Any) -> None:
        run.pool.order = ORDERS[order]
        await schedule(run, **parameters)
        if run.pool.order is not ORDERS[order]:
            raise ConfigError("schedule.order", order, "the schedule sets an order of its own", "remove it")

    return ordered


def check_parameter_names(config: RunConfig, compared: Iterable[str] = ()) -> None:
    """Check that a schedule, or one of those compared with it, has each key of [schedule], and that each
    [schedules.NAME] fits its schedule. Raises a ConfigError if not."""
    schedules = map(find_schedule, (config.schedule.get("name"), *compared))
    parameters = chain.from_iterable(map(parameters_of, schedules))
    _check_keys("schedule", config.schedule, ["name", *dict.fromkeys(parameters)])
    for name, section in config.schedules.items():
        if ":" not in name:  # a file need not be importable while another schedule runs
            _check_keys(
                f"schedules.{name}", section, [*parameters_of(find_schedule(name, f"schedules.{name}"))]
            )


def _check_keys(section: str, given: Mapping[str, Any], accepted: Collection[str]) -> None:
    for name in (name for name in given if name not in accepted):
        remedy = f"it has: {', '.join(each for each in accepted if each != 'name')}"
        raise ConfigError(f"{section}.{name}", given[name], "the schedule has no such parameter", remedy)


def _checked(schedule: Schedule, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given parameters, as the types of the signature."""
    parameters = parameters_of(schedule)
    _check_keys("schedule", given, [*parameters])
    for name, parameter in parameters.items():
        if name not in given and parameter.default is inspect.Parameter.empty:
            problem = f"the schedule {schedule.__name__} needs it, and it is missing"
            remedy = f"set it, or {name} of [schedules.{schedule.__name__}]"
            raise ConfigError(f"schedule.{name}", None, problem, remedy)
    hints = {"order": Order, **get_type_hints(schedule, include_extras=True)}
    return {name: validated(hints.get(name, Any), value, f"schedule.{name}") for name, value in given.items()}


class FewPrompts:
    """Prompts of a rehearsal, of which there is an end."""

    def __init__(self, prompts: Prompts, parameters: Mapping[str, object]) -> None:
        self._prompts, self._parameters = prompts, parameters

    def __getitem__(self, index: int) -> Prompt:
        if index >= MAX_REHEARSED:
            problem = f"a rehearsal of two rounds draws more than {MAX_REHEARSED} prompts"
            raise ConfigError("schedule", dict(self._parameters), problem, "lower the numbers of groups")
        return self._prompts[index]


class _Rehearsal:
    """A sink that notes whether the trainer computed while an engine generated, each round's steps, and
    whether a group had more members than are trained."""

    def __init__(self, group_size: int) -> None:
        self.overlaps, self.races, self.steps = False, False, list[int]()
        self._group_size = group_size
        self._num_served, self._served_until_s = 0, -math.inf

    def on(self, event: Event) -> None:
        match event:
            case RoundStarted():
                self.steps.append(0)
            case RequestStarted(sample=sample):
                self._num_served += 1
                self.races |= sample.number >= self._group_size
            case RequestEnded(time_s=time_s):
                self._num_served, self._served_until_s = self._num_served - 1, time_s
            case Accumulated(start_s=start_s) | Stepped(start_s=start_s):
                self.overlaps |= self._num_served > 0 or self._served_until_s > start_s
                self.steps[-1] += isinstance(event, Stepped)

    def close(self) -> None:
        pass


def trains_while_generating(config: RunConfig, schedule: BoundSchedule) -> bool:
    """Whether the trainer computes while engines generate, in a rehearsal of a schedule that was resolved."""
    return _rehearse(schedule, config, reward_s=0.0).overlaps  # else rewards hide a short overlap


def steps_of_a_round(config: RunConfig, schedule: BoundSchedule) -> int | None:
    """Optimizer steps of a round of a schedule that was resolved; None: they differ from round to round."""
    first, second, *_ = _rehearse(schedule, config).steps
    return first if first == second else None


def with_decay_steps(config: Config, schedule: BoundSchedule | None = None) -> Config:
    """The config with the steps of the run as `trainer.decay_steps`, if the learning rate decays and none are
    set. Raises a ConfigError if the steps of its rounds differ. `schedule`: the one that is resolved."""
    trainer = config.trainer
    if trainer.learning_rate_decay == "constant" or trainer.decay_steps is not None:
        return config
    steps = steps_of_a_round(config, schedule or resolve(config))
    if steps is None:
        problem = "the optimizer steps of a round differ in this schedule, so those of the run are not known"
        raise ConfigError("trainer.decay_steps", None, problem, "set it")
    return config.changed(trainer={"decay_steps": steps * config.run.rounds})


def rounds_of_equal_steps(config: RunConfig, compared: RunConfig, schedule: BoundSchedule) -> int:
    """The rounds in which a compared schedule makes as many optimizer steps as run.rounds rounds of the
    config's groups_per_round in steps of groups_per_step."""
    given = config.schedule
    step, groups = given.get("groups_per_step"), given.get("groups_per_round")
    steps = groups // step if step and groups else given.get("steps_per_round", 1)
    own = steps_of_a_round(compared, schedule) or steps
    return max(1, int(config.run.rounds * steps / own + 0.5))


def _rehearse(schedule: BoundSchedule, config: RunConfig, reward_s: float = 0.3) -> _Rehearsal:
    """Raises a ConfigError if the schedule cannot run with these parameters."""
    settings, sim, sharing = config.run, config.sim, DeviceSharing(config.placement.kind)
    lengths = SimLengthSettings(median_tokens=200, max_tokens=2000)
    replicas = 2 if sharing.lends else 1
    count = max(replicas, min(2, sim.engines.count or config.engine.num_engines))
    engines = SimEngineSettings(count=count, versions=sim.engines.versions or config.num_versions)
    synchronous = config.reward.synchronous or sim.rewards.synchronous
    rewards = SimRewardSettings(synchronous=synchronous, median_s=reward_s)
    short = SimSettings(engines=engines, lengths=lengths, rewards=rewards)
    group_size = min(settings.group_size, 2)  # what a schedule declares or waits for does not hang on K
    rules = GroupSettings(replacements=int(settings.groups.has_rule))  # real lengths decide on a deadline
    rounds = RunSettings(rounds=2, group_size=group_size, groups=rules, step_timeout_s=3600.0)

    async def watched(run: Run) -> None:
        await schedule(run)
        if run.declared is None:
            remedy = "it must say run.declare(staleness=...): 0 is on-policy, math.inf is no bound"
            raise ScheduleError(f"the schedule declares nothing; {remedy}")
        if run.masks and config.algorithm.loss == "gspo":
            problem = "it has one ratio for a sequence, of which the schedule would mask the stale tokens"
            remedy = "choose 'grpo', or a schedule without masks (schedule.stale, schedule.staleness)"
            raise ConfigError("algorithm.loss", "gspo", problem, remedy)
        if run.verifies:
            asked: tuple[str, object] = ("schedule.stale", "verify")
            if "stale" not in schedule.keywords:
                asked = ("schedule.name", config.schedule.get("name"))
            where = f'with {asked[0]} = "{asked[1]}"'
            if config.environment.calls_have_effects:
                problem = f"{where} an episode loses turns whose calls were made"
                remedy = f"if they change nothing, set it to false; if they do, change {asked[0]}"
                raise ConfigError("environment.calls_have_effects", True, problem, remedy)
            if config.reward.batch == "group":
                problem = f"{where} a member may change when others have rewards"
                raise ConfigError("reward.batch", "group", problem, 'write "sample"')
            unable = f"an engine of the kind {config.engine.kind!r}"
            check_verified(unable * (not engine_kind(config).verifies), *asked)

    async def two_rounds() -> None:
        parts = simulated_parts(short, settings.seed, replicas=replicas, sharing=sharing)
        few = FewPrompts(parts.prompts, schedule.keywords)
        await execute(watched, replace(parts, prompts=few), rounds, Recorder(rehearsal))

    rehearsal = _Rehearsal(group_size)
    try:
        clock.run(two_rounds(), virtual=True)
    except (ScheduleError, Stuck) as why:
        problem = f"a rehearsal failed: {why}"
        raise ConfigError("schedule", "these parameters", problem, "change them") from why
    if rehearsal.races and not settings.groups.has_rule and config.reward.batch == "group":
        problem = "members of a group race in this schedule: those that are cut have no reward"
        remedy = 'write "sample", or set schedule.response_speculation = 1'
        raise ConfigError("reward.batch", config.reward.batch, problem, remedy)
    return rehearsal
