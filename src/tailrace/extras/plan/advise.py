"""The advice on a run: the cost of its tail, and the orders of work of its framework that would be faster.

The costs are fitted to the log (`peer_fit.py`), the orders are planned on the same devices (`search.py`), of
which advise.toml says how each framework calls them.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from tailrace.config import RunConfig, config_of
from tailrace.errors import ConfigError
from tailrace.extras.plan.calibrate import NUM_STEPS, calibrated
from tailrace.extras.plan.candidates import Candidate, Workload, response_lengths
from tailrace.extras.plan.command import problem_of
from tailrace.extras.plan.peer_fit import fit_peer
from tailrace.extras.plan.peers import PeerLog
from tailrace.extras.plan.plan import Measured, Problem, generation_seconds
from tailrace.extras.plan.search import search
from tailrace.sim.settings import SimSettings

LONGEST = 0.05
"""Share of the responses that are the tail."""
ERROR = 0.18
"""Median error of a printed step, mostly with its training given: `python -m reproductions peers`."""
PAIRS_ERROR = 0.89
"""Median error where only the synchronous run of such a pair is given (docs/reference/pairs.md)."""
GROUP_SIZE = 8
"""Responses to a prompt, where neither a dump nor a flag says."""
LIMITS = {"steps": 16, "min_ess": 0.0, "max_mean_lag": 1e9, "max_length_bias": 1.0}
"""[plan]: all orders are shown, with what is wrong with them."""
STEPS, SAMPLES = 8, 16_384
"""Optimizer steps over which an order of large steps is measured, at least; and the samples of others."""
BIASED = 0.02
"""Bias of the trained lengths from which on it is said."""
SCALING = "A trainer is assumed to take n times as long on n times fewer devices. Printed ones take less."
"""Orders on separate devices are told so: docs/reference/pairs.md shows it."""
SHOWN = 3
"""Orders that are described, at most."""
_TABLE = tomllib.loads(Path(__file__).with_name("advise.toml").read_text(encoding="utf-8"))
DUMPS: Mapping[str, str] = _TABLE.pop("dumps")
SOURCES: Mapping[str, str] = _TABLE.pop("sources")


@dataclass(frozen=True, slots=True)
class PeerMode:
    """An order of work that a framework has, as advise.toml describes it."""

    name: str
    schedules: Sequence[str]
    placements: Sequence[str]
    keys: Mapping[str, str]
    say: str

    def has(self, candidate: Candidate) -> bool:
        return candidate.work.schedule in self.schedules and candidate.kind in self.placements


MODES = {name: [PeerMode(**mode) for mode in modes] for name, modes in _TABLE.items()}


@dataclass(frozen=True)
class _OfMode(Problem):
    """The problem of a plan, with the candidates of one mode."""

    mode: PeerMode | None = None

    def candidates(self, *, whole: bool = False) -> tuple[dict[Candidate, SimSettings], Any]:
        assert self.mode
        sims, excluded = super().candidates(whole=whole)
        kept = {each: sim for each, sim in sims.items() if self.mode.has(each)}
        if not kept:
            raise ConfigError("--devices", None, f"{self.mode.name} does not fit the devices", "add devices")
        return kept, excluded


@dataclass(frozen=True, slots=True)
class BestOrder:
    """A mode at its best: seconds of a step, ages of tokens in steps, and the settings to paste."""

    mode: PeerMode
    measured: Measured
    step_s: float
    where: str
    settings: Sequence[str]
    say: str

    @property
    def numbers(self) -> Mapping[str, object]:
        figures = self.measured.figures
        return {
            "mode": self.mode.name,
            "devices": self.where,
            "step_s": self.step_s,
            **{name: figures[name] for name in ("lag_mean", "lag_max", "ess_mean", "length_bias")},
            "settings": list(self.settings),
        }


@dataclass(frozen=True)
class Advice:
    """The answer to a log.

    Args:
        log: what was read.
        group_size: responses to a prompt.
        known: whether a dump or a flag said so.
    """

    log: PeerLog
    group_size: int
    known: bool

    @classmethod
    def of(cls, log: PeerLog, group_size: int | None) -> "Advice":
        """Raises a ConfigError if the samples of a step are not whole groups."""
        dumped = [len(group) for group in log.groups]
        size = group_size or max({*dumped} - {1}, key=dumped.count, default=0)
        advice = cls(log, size or GROUP_SIZE, bool(size))
        if advice.samples % advice.group_size:
            problem = f"a step has {advice.samples} samples, which are no whole number of such groups"
            raise ConfigError("--group-size", advice.group_size, problem, "give the responses to a prompt")
        return advice

    @property
    def samples(self) -> int:
        return round(self.log.mean("samples"))

    @property
    def groups(self) -> int:
        return self.samples // self.group_size

    @property
    def step_s(self) -> float:
        return self.log.mean("step_s")

    @cached_property
    def fitted(self) -> SimSettings:
        return fit_peer(self.log).sim

    @cached_property
    def load(self) -> Workload:
        prompts = range(NUM_STEPS * self.groups)
        lengths = response_lengths(self.fitted, self.group_size, prompts, seed=0)
        return Workload(lengths, self.fitted.lengths.prompt_tokens)

    @cached_property
    def tail_s(self) -> float:
        """Seconds of a step in which only the longest responses run; 0 where no step waits for them."""
        if self.log.overlaps:
            return 0.0
        few, engines, seconds = max(1, round(LONGEST * self.samples)), self.fitted.engines, list[float]()
        lengths = [*chain.from_iterable(self.load.groups)]
        for first in range(0, len(lengths), self.samples):
            ordered = sorted(lengths[first : first + self.samples])[-few - 1 :]
            shorter, longest = ordered[0], ordered[-1]
            tokens = sum(ordered) - len(ordered) * shorter
            seconds.append(engines.base_s * (longest - shorter) + engines.slope_s * tokens)
        return fmean(seconds)

    @cached_property
    def full_s(self) -> float:
        """Seconds of a step whose engines are full until its last token."""
        if self.log.overlaps:
            return self.step_s - self.log.mean("wait_s")
        engines, longest = self.fitted.engines, self.load.longest(self.groups)
        now, full = (generation_seconds(engines, self.load, self.samples, steps) for steps in (longest, 0.0))
        return self.step_s - max(0.0, now - full)

    def config(self, cluster: Mapping[str, Any], drift: float | None) -> RunConfig:
        """The costs of the run on its devices. Raises a ConfigError if they do not explain it."""
        steps = {"groups_per_round": self.groups, "groups_per_step": self.groups}
        tree = {
            "run": {"rounds": 1, "group_size": self.group_size},
            "schedule": {"name": "serial"} | steps,
            "sim": {"cluster": {key: value for key, value in cluster.items() if value}},
            "plan": LIMITS,
        }
        log = self.log
        training_s = log.mean("update_s") if log.has("update_s") else None
        config = calibrated(config_of(tree), self.fitted, self.groups, training_s, log.overlaps, log.other_s)
        assert config.sim.cluster
        parallel = {"tensor_parallel": cluster["tensor_parallel"]}  # the framework's own, in every order
        changes: dict[str, Any] = {"cluster": config.sim.cluster.model_copy(update=parallel)}
        if drift is not None:
            changes["trainer"] = config.sim.trainer.model_copy(update={"drift": drift})
        return config.model_copy(update={"sim": config.sim.model_copy(update=changes)})

    def orders(self, config: RunConfig, progress: Any) -> list[BestOrder]:
        """The modes of the framework at their best on the devices, the fastest first."""
        assert config.sim.cluster
        asked, found, devices = problem_of(config), list[BestOrder](), config.sim.cluster.devices
        fields = {name: getattr(asked, name) for name in Problem.__dataclass_fields__}
        fields |= {"progress": progress, "steps": min(asked.steps, max(STEPS, SAMPLES // self.samples))}
        for mode in MODES.get(self.log.framework, []):
            try:
                best = search(_OfMode(**fields, mode=mode)).best
            except ConfigError:
                continue
            seconds = best.step_s + self.log.other_s
            words = self._words(best, devices)
            settings = [_setting(key, value.format(**words)) for key, value in mode.keys.items()]
            where = best.candidate.division(devices)
            found.append(BestOrder(mode, best, seconds, where, settings, mode.say.format(**words)))
        return sorted(found, key=lambda order: order.step_s)

    def itself_s(self, config: RunConfig) -> float | None:
        """Predicted seconds of a step of the run as it is, where it is synchronous on devices in turn."""
        asked = problem_of(config)
        for each, sim in () if self.log.overlaps else asked.candidates()[0].items():
            if (each.work.schedule, each.work.lag, each.kind) == ("serial", 0, "colocated"):
                return asked.measure(each, sim, asked.steps).step_s + self.log.other_s
        return None

    def _words(self, best: Measured, devices: int) -> Mapping[str, object]:
        """The words that values of advise.toml name."""
        candidate, lag = best.candidate, round(best.figures["lag_max"])
        rollout = candidate.rollout_devices or devices
        alive = self.groups if candidate.work.alive == float("inf") else ceil(candidate.work.alive)
        return {
            "devices": devices,
            "rollout": rollout,
            "train": devices - (candidate.rollout_devices or 0),
            "parallel": candidate.tensor_parallel,
            "engines": rollout // candidate.tensor_parallel,
            "lag": lag,
            "versions": lag + 1,
            "groups": self.groups,
            "alive": alive,
            "samples": alive * self.group_size,
            "ahead": max(1, ceil(alive / self.groups) - 1),
        }

    def first_words(self) -> list[str]:
        """Say where the time goes, and what the tail costs."""
        log, full_s = self.log, self.full_s
        said = [f"{log.framework}, {len(log.steps)} steps of {self.samples} samples: {log.waits}."]
        if log.overlaps:
            said.append("No step waits for its longest responses: engines generate for later ones.")
        else:
            said.append(
                f"Of a step, {self.tail_s:.3g} s ({self.tail_s / self.step_s:.0%}) are the longest"
                f" {LONGEST:.0%} of the responses alone."
            )
        gain = self.step_s / full_s if full_s > 0 else 1.0
        bound = "If it never waited" if log.overlaps else "If its engines were full until the last token"
        return [*said, f"{bound}, a step would take {full_s:.3g} s: {gain:.2f}x as fast, on these devices."]

    def order_words(self, orders: Sequence[BestOrder], drift: float | None) -> list[str]:
        """Say what the modes of the framework would change."""
        framework, said = self.log.framework, list[str]()
        if not orders:
            return [f"{framework} has no other order of work that fits these devices."]
        of = "your drift" if drift is not None else "assumed: drift of a 0.4M model, or --drift X"
        for order in orders[:SHOWN]:
            figures, change = order.measured.figures, order.step_s / self.step_s - 1
            ages = f"{figures['lag_mean']:.1f} steps old on average, {figures['lag_max']:.0f} at most"
            times = f"{order.mode.name}, {order.where}: {order.step_s:.3g} s a step ({change:+.0%})"
            ess = f"effective sample size {figures['ess_mean']:.2f} ({of})"
            said.append(f"{times}, tokens {ages}; {ess}. {order.say[:1].upper()}{order.say[1:]}.")
            if abs(figures["length_bias"]) > BIASED:
                said.append(
                    f"Its trained responses are {figures['length_bias']:+.0%} longer than those drawn."
                )
            said += [f"    {setting}" for setting in order.settings]
        if any("+" in order.where for order in orders[:SHOWN]):
            said.append(SCALING)
        if orders[0].step_s > (1 - ERROR) * self.step_s:
            said.append(f"Nothing to gain for certain: changes below {ERROR:.0%} are within the error.")
        return said

    def error_words(self, itself_s: float | None) -> str:
        """Say how far off predictions are, and what would narrow it."""
        said = (
            f"Error: half of the steps that others printed were predicted within {ERROR:.0%} where seconds"
            f" of training are known; within {PAIRS_ERROR:.0%}, too slow, from their synchronous run alone"
        )
        if itself_s:
            said += f"; this run's own step with {itself_s:.3g} s ({itself_s / self.step_s - 1:+.0%})"
        dump = DUMPS.get(self.log.framework, "")
        if self.log.groups:
            said += "; lengths are those of the dumped responses"
        else:
            narrower = f": set {dump}, and name its folder, too" if dump else ""
            said += f"; lengths are a lognormal law that fits their mean and longest{narrower}"
        return said + ("." if self.known else f"; groups of {self.group_size} are assumed: --group-size N.")


def _setting(key: str, value: str) -> str:
    return f"{key} {value}".rstrip() if key.startswith("--") else f"{key}={value}"


def in_turn(log: PeerLog, rollout_devices: int | None) -> PeerLog:
    """The log, with 0 devices that only generate as one whose engines and trainer work in turn."""
    return replace(log, in_turn=log.overlaps and rollout_devices == 0)
