"""Writes docs/reference/bias.md: whose responses each schedule gives up, and whose it delays.

    python docs/make_bias.py docs/reference/bias.md

Every schedule trains the same prompts in virtual time. The simulator knows the length of each response, so
what is never generated counts, too. A test compares the committed page with the output.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from tailrace.config import RunConfig, config_of, translated_parameters
from tailrace.drivers.assembly.schedule import resolve, rounds_of_equal_steps
from tailrace.drivers.assembly.simulation import run_virtual
from tailrace.record.events import Event, GroupDrawn, Recorder, RequestStarted, RoundStarted, Stepped
from tailrace.record.steps import StepMeter
from tailrace.record.summary import Summary
from tailrace.schedules import SCHEDULES
from tailrace.sim.world import Lengths
from tailrace.types import Group, Sample, SampleId

GROUPS, GROUP_SIZE, STEPS = 16, 4, 32
CONFIG = {
    "run": {"rounds": STEPS // 2, "group_size": GROUP_SIZE},
    "schedule": {"name": "serial", "groups_per_round": 2 * GROUPS, "groups_per_step": GROUPS},
    "sim": {
        "engines": {"count": 2, "slots": 64, "versions": 2},
        "trainer": {"tokens_per_s": 30_000.0},
        "lengths": {"median_tokens": 400, "sigma": 1.0, "max_tokens": 8_000, "correlation": 0.5},
    },
}
COUNTED = 0.75
"""Share of the prompts drawn, from the first, that count: the others may be trained after the run."""
INTRODUCTION = f"""\
# What a schedule prefers

Simulated: {STEPS} optimizer steps of {GROUPS} prompts, {GROUP_SIZE} responses each, with the parameters that
`tailrace compare` chooses. Lengths are lognormal (median 400 tokens, sigma 1); half of the variance is the
prompt's. The first {COUNTED:.0%} of the prompts drawn count, by the mean length of their responses.

*Not trained*: of the responses that were begun. *Rounds*: mean, from draw to training. *Length*: mean length
of the trained responses over that of all that were begun, minus 1. The simulator knows the length of those
that were cut off. `bias/length` of [metrics](metrics.md) is the estimate of a run, which does not. Losers of
a race are cut off because they are long; the estimate does not know that, and exaggerates.

"""
HEADER = (
    *("schedule", "not trained: shortest quarter", "longest quarter", "rounds: shortest quarter"),
    *("longest quarter", "length", "`bias/length`"),
)


class Preferred:
    """Sink: the prompts drawn, the responses begun, and how many rounds after its draw each was trained."""

    def __init__(self) -> None:
        self.drawn: list[Group] = []
        self.begun: dict[int, int] = {}
        """Numbers of the members of a prompt, from 0, are below this."""
        self.rounds: dict[tuple[int, int], int] = {}
        self._round = 0

    def on(self, event: Event) -> None:
        match event:
            case RoundStarted():
                self._round = event.round
            case GroupDrawn():
                self.drawn.append(event.group)
            case RequestStarted():
                prompt, _, number = event.sample
                self.begun[prompt] = max(self.begun.get(prompt, 0), number + 1)
            case Stepped():
                for sample in event.samples:
                    age = self._round - sample.group.round_drawn
                    self.rounds[sample.prompt.index, sample.id.number] = age

    def close(self) -> None:
        """Nothing is open."""


def config_for(name: str) -> RunConfig:
    """Return the config of a schedule, for as many optimizer steps as the others."""
    config = config_of(CONFIG)
    compared = config.changed(schedule=translated_parameters(config, name)[0])
    return compared.changed(run={"rounds": rounds_of_equal_steps(config, compared, resolve(compared))})


def line_of(name: str) -> str:
    """Run a schedule in virtual time; return its line of the table."""
    config, found, summary = config_for(name), Preferred(), Summary()
    run_virtual(config, resolve(config), Recorder(found, StepMeter(summary, wall_clock=lambda: 0.0)))
    length_of = Lengths(config.sim.lengths, config.run.seed)
    lengths = {
        group.prompt.index: [
            length_of(Sample(SampleId(group.prompt.index, 0, number), group))
            for number in range(found.begun.get(group.prompt.index, GROUP_SIZE))
        ]
        for group in found.drawn[: int(COUNTED * len(found.drawn))]
    }
    ordered = sorted(lengths, key=lambda prompt: (fmean(lengths[prompt]), prompt))
    num = len(ordered) // 4
    left, rounds = [], []
    for quarter in (ordered[:num], ordered[-num:]):
        members = [(prompt, number) for prompt in quarter for number in range(len(lengths[prompt]))]
        ages = [found.rounds[member] for member in members if member in found.rounds]
        left.append(f"{1 - len(ages) / len(members):.0%}")
        rounds.append(f"{fmean(ages):.1f}")
    trained = [lengths[prompt][number] for prompt, number in found.rounds if prompt in lengths]
    length = fmean(trained) / fmean(each for members in lengths.values() for each in members) - 1
    estimate = summary.summary().bias["length"]
    return _line(
        [f"`{name}`", *left, *rounds, *(f"{round(each, 3) + 0.0:+.1%}" for each in (length, estimate))]
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def bias_reference() -> str:
    """Return the page as Markdown."""
    lines = [_line(HEADER), "|---" * len(HEADER) + "|", *map(line_of, SCHEDULES)]
    return INTRODUCTION + "\n".join(lines) + "\n"


def main(arguments: Iterable[str]) -> None:
    """Write the page to each path given."""
    for path in arguments:
        Path(path).write_text(bias_reference(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
