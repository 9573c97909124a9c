"""Closed forms of the mean staleness of a trained token, beside the simulator.

Applied Compute (2026) states that mean staleness follows from utilisation, batch, queue capacity, concurrency
and the tail of the lengths. This is a derivation of our own, for groups of one sample, a publication after
every step of B samples, and decode steps of a constant time tau. In steady state, with

    N       samples in flight           mu      samples generated a second = N / (tau * mean length)
    R       capacity of the queue       s_t     seconds in which the trainer works on a step
    c       standard deviation of the lengths over their mean

a step takes s = max(s_t, B / mu), the trainer's utilisation is rho = s_t / s, and phi = B / (s mu) of the
generated samples are trained.

Age when the response ends: of n tokens, the mean one waits n tau / 2 for the last. Long responses have more
tokens, so over tokens this is tau E[n^2] / (2 E[n]) = tau E[n] (1 + c^2) / 2. By Little's law tau E[n] is
N / mu, which is phi N / B steps.

Age in the queue: the trainer takes the B samples that came first. If it waits for them (phi = 1), it takes
them when the last one comes, and the mean one has waited for B / 2 others. If it does not (phi < 1), the
queue is full and drops its oldest sample for each new one, so the mean one has waited for R - B / 2 others. A
sample comes every 1 / mu seconds; so, with Q others, this is phi Q / B steps.

From age to publications: the weights of a step are published rho steps after its samples were taken. A token
that is x steps old when it is taken has seen floor(x + rho) publications, on average over x that is spread
over a step x + rho - 1/2. Together:

    staleness = phi (N (1 + c^2) / 2 + Q) / B + rho - 1/2,    Q = B / 2 if phi = 1, else R - B / 2

A FIFO window (windowed_fifo, window 1) has G samples alive, in flight or complete. They are refilled after
each publication, so G are alive while the trainer waits and G - B while it works, on average G - rho B. By
Little's law a sample is taken G / B - rho steps after its launch, whatever its length. Its mean token came
E[n] tau (1 + c^2) / 2 seconds after the launch:

    staleness = G / B - 1/2 - (1 + c^2) tau E[n] / (2 s)

`one_step_off` trains every token one publication after it was generated.
"""

from collections.abc import Mapping
from functools import partial
from math import exp
from typing import NamedTuple

from reproductions.base import Figure, Paper, Table, parameters
from tailrace.controller.base import RunSettings
from tailrace.drivers.assembly.simulation import simulate
from tailrace.schedules import Schedule
from tailrace.schedules.one_step_off import one_step_off
from tailrace.schedules.pipelinerl import pipelinerl
from tailrace.schedules.windowed_fifo import windowed_fifo
from tailrace.sim.settings import SimSettings

STEPS = 400
TAU_S, MEAN_TOKENS = 0.01, 1000
SIGMA = 1.0
TAILS: Mapping[str, float] = {"uniform": 1 / 3, "lognormal": exp(SIGMA**2) - 1}
"""c^2 of the two laws of lengths: uniform up to twice the mean, and lognormal with SIGMA."""


class Case(NamedTuple):
    """A set-up.

    Args:
        alive: samples in flight (N), or in flight and complete (G).
        batch: B.
        load: the time that the trainer needs for a batch over that in which the engine generates one.
        room: R; 0: not used.
    """

    schedule: str
    alive: int
    batch: int
    load: float
    tail: str
    room: int = 0

    def __str__(self) -> str:
        room = f", queue {self.room}" if self.room else ""
        return (
            f"{self.schedule}, {self.alive} alive, batch {self.batch}{room}, load {self.load:g}, {self.tail}"
        )

    @property
    def train_s(self) -> float:
        """s_t. Of the engine's rate N / (tau E[n])."""
        return self.load * self.batch * TAU_S * MEAN_TOKENS / self.alive

    def closed_form(self) -> float:
        """Mean staleness, in publications."""
        token = (1 + TAILS[self.tail]) / 2
        if self.schedule == "one_step_off":
            return 1.0
        if self.schedule == "windowed_fifo":
            return self.alive / self.batch - 0.5 - token * TAU_S * MEAN_TOKENS / self.train_s
        rho, phi = min(1.0, self.load), min(1.0, 1 / self.load)
        waiting = self.batch / 2 if phi == 1 else self.room - self.batch / 2
        return phi * (token * self.alive + waiting) / self.batch + rho - 0.5

    def simulated(self, seed: int, steps: int = STEPS) -> float:
        """The same of a run in virtual time, after its first quarter."""
        N, B = self.alive, self.batch
        schedules: dict[str, Schedule] = {
            "pipelinerl": partial(
                pipelinerl, groups_per_step=B, in_flight_per_engine=N, ring_groups=self.room
            ),
            "windowed_fifo": partial(windowed_fifo, groups_per_step=B, groups_in_flight=N, window=1),
            "one_step_off": partial(one_step_off, groups_per_round=B, groups_per_step=B),
        }
        run = RunSettings(rounds=steps, group_size=1, seed=seed)
        schedule = schedules[self.schedule]
        return simulate(schedule, self.costs(), run, warm_up_rounds=steps // 4).figures["staleness_mean"]

    def costs(self) -> SimSettings:
        """A constant decode step and a constant optimizer step; everything else takes no time."""
        uniform = {"kind": "uniform", "max_tokens": 2 * MEAN_TOKENS}
        lengths = {"median_tokens": MEAN_TOKENS / exp(SIGMA**2 / 2), "sigma": SIGMA, "correlation": 0.0}
        lengths |= {"max_tokens": 10**6, "prompt_tokens": 1}
        engines = {"slots": self.alive, "base_s": TAU_S, "slope_s": 0.0, "load_s": 0.0, "kv_tokens": 10**9}
        sections = {
            "engines": engines | {"prefill_tokens_per_s": 1e12},
            "lengths": lengths | ({"distribution": uniform} if self.tail == "uniform" else {}),
            "rewards": {"median_s": 0.0, "workers": self.alive},
            "trainer": {"tokens_per_s": 1e15, "step_s": self.train_s},
        }
        return SimSettings.model_validate(sections)


CASES = (
    Case("pipelinerl", 64, 16, 0.5, "uniform", 64),
    Case("pipelinerl", 256, 16, 0.5, "uniform", 64),
    Case("pipelinerl", 64, 64, 0.5, "uniform", 256),
    Case("pipelinerl", 64, 16, 0.8, "uniform", 64),
    Case("pipelinerl", 64, 16, 0.5, "lognormal", 64),
    Case("pipelinerl", 256, 64, 0.8, "lognormal", 256),
    Case("pipelinerl", 64, 16, 1.5, "uniform", 32),
    Case("pipelinerl", 64, 16, 1.5, "uniform", 128),
    Case("pipelinerl", 64, 16, 3.0, "lognormal", 64),
    Case("pipelinerl", 256, 64, 1.5, "lognormal", 256),
    Case("windowed_fifo", 256, 16, 4.0, "uniform"),
    Case("windowed_fifo", 256, 64, 4.0, "uniform"),
    Case("windowed_fifo", 256, 16, 8.0, "lognormal"),
    Case("one_step_off", 64, 64, 0.5, "lognormal"),
)


def closed_forms(seed: int) -> Table:
    """Mean staleness by the closed form, in the column of the paper, and by the simulator."""
    figures = []
    for case in CASES:
        form, ours = case.closed_form(), case.simulated(seed)
        figures.append(Figure(str(case), "mean staleness", "", form, ours, "predicted", 0.05 * form))
        figures.append(Figure(str(case), "over the closed form", "%", None, 100 * (ours / form - 1)))
    note = "The column of the paper has our closed forms; load: time of the trainer over that of the engine."
    return Table("Closed forms", "mean staleness in publications", tuple(figures), (note,))


PARAMETERS = """
assumed 3 | groups of one sample, a constant decode step of 10 ms, responses of 1,000 tokens in the mean |
assumed 2 | rewards and weight updates take no time |
"""
PAPER = Paper(
    name="staleness",
    citation="Applied Compute, 2026: Predicting and Controlling Staleness in Fully Asynchronous RL Training",
    set_up=(f"{STEPS} steps, of which the first quarter does not count.",),
    parameters=parameters(PARAMETERS),
    tables={"Closed forms": closed_forms},
    contradictions=(),
    not_attempted="Groups of several samples, and the article's own figures.",
)
