"""All schedules in one setting, in virtual time: how fast, how stale, what is wasted, what is biased.

    python benchmarks/schedules.py [--rounds 60] [--engines 4] [--tokens-per-s 60000] [--only NAME]

64 groups of 8 a step; lognormal lengths with a strong tail (at most 16,384 tokens, correlated within a
group), 512 rows that come again every epoch; continuous batching of 6 ms + 0.06 ms a sequence on each engine.
The first two epochs (16 rounds) are not counted: histories fill and standing populations settle. Length bias
is the trained mean length over that of the rows, each counted equally.
"""

import argparse
from collections.abc import Callable, Coroutine
from functools import partial
from statistics import fmean
from typing import Any

from tailrace import clock
from tailrace.commands.laps import LapMeter
from tailrace.controller.execution import execute
from tailrace.controller.base import RunSettings
from tailrace.record.events import Event, Recorder, Stepped
from tailrace.controller.run import Run
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import SimEngineSettings, SimLengthSettings, SimSettings, SimTrainerSettings
from tailrace.sim.world import Lengths, simulated_parts
from tailrace.types import Group, Prompt, Sample, SampleId

U, K, ROWS, WARM_UP_ROUNDS = 64, 8, 512, 16

Bound = Callable[[Run], Coroutine[Any, Any, None]]


def racer(name: str, **parameters: Any) -> Bound:
    return partial(SCHEDULES[name], **parameters)


RACERS: dict[str, Bound] = {
    "serial": racer("serial", R=U, U=U),
    "serial, eager (rolloutpipe_eager, U = R)": racer("rolloutpipe_eager", R=U, U=U),
    "tailbatch, prompts 1.25": racer("tailbatch", P0=U, eta_responses=1.0),
    "tailbatch, both 1.25": racer("tailbatch", P0=U),
    "rollpacker, prompts 1.25": racer("rollpacker", P0=U, eta_responses=1.0),
    "rollpacker, both 1.25": racer("rollpacker", P0=U),
    "tailrace_on_policy, race only": racer("tailrace_on_policy", N=U, long_share=0.0),
    "tailrace_on_policy, share 0.05": racer("tailrace_on_policy", N=U, long_share=0.05),
    "tailrace_on_policy, share 0.1": racer("tailrace_on_policy", N=U, long_share=0.1),
    "tailrace_on_policy, share 0.2": racer("tailrace_on_policy", N=U, long_share=0.2),
    "tailrace_on_policy, eta 1.5, share 0.1": racer("tailrace_on_policy", N=U, eta=1.5, long_share=0.1),
    "april, 1.5x": racer("april", N=U, N_launched=96),
    "april, 2x": racer("april", N=U, N_launched=128),
    "pipelinerl, 1.25x in flight": racer("pipelinerl", U=U, H=U * K * 5 // 4, room=2 * U, full="hold"),
    "pipelinerl, 2x in flight": racer("pipelinerl", U=U, H=2 * U * K, room=2 * U, full="hold"),
    "conventional, G = 8": racer("conventional", U=U, G=8),
    "tailrace, 1.25x, bound 2": racer("tailrace", U=U, in_flight=80, staleness=2),
    "tailrace, 1.5x, bound 2": racer("tailrace", U=U, in_flight=96, staleness=2),
    "tailrace, 1.5x, bound 4": racer("tailrace", U=U, in_flight=96, staleness=4),
    "tailrace, 2x, bound 4": racer("tailrace", U=U, in_flight=128, staleness=4),
    "tailrace, 2.5x, bound 6": racer("tailrace", U=U, in_flight=160, staleness=6),
    "tailrace, 3x, bound 8": racer("tailrace", U=U, in_flight=192, staleness=8),
}


class TrainedLengths:
    """Sink: mean trained length of each round."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._rounds = 0

    def on(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._rounds += 1
            self.lengths += [sample.num_tokens for sample in event.samples if self._rounds > WARM_UP_ROUNDS]

    def close(self) -> None:
        pass


def mean_length(settings: SimLengthSettings, seed: int) -> float:
    """Of every row, 16 responses each."""
    length_of = Lengths(settings, seed)
    groups = [Group(Prompt(row, [1], row_number=row), 16, []) for row in range(ROWS)]
    return fmean(
        length_of(Sample(SampleId(1_000_000 + group.prompt.index, 0, number), group))
        for group in groups
        for number in range(16)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--tokens-per-s", type=float, default=60_000.0)
    arguments = parser.parse_args()
    sim = SimSettings(
        engines=SimEngineSettings(count=arguments.engines),
        trainer=SimTrainerSettings(tokens_per_s=arguments.tokens_per_s),
        lengths=SimLengthSettings(rows=ROWS),
    )
    expected = mean_length(sim.lengths, 0)
    head = ("samples/s", "of serial", "staleness", "max", "wasted", "bias", "deferred")
    print(f"{'':42}" + "".join(f"{word:>11}" for word in head))
    serial = 0.0
    for name, schedule in ((name, each) for name, each in RACERS.items() if arguments.only in name):
        meter, lengths = LapMeter(WARM_UP_ROUNDS), TrainedLengths()

        async def one_run(schedule: Bound = schedule, sinks: Any = (meter, lengths)) -> None:
            settings = RunSettings(rounds=arguments.rounds, group_size=K)
            await execute(schedule, simulated_parts(sim, 0), settings, Recorder(*sinks))

        clock.run(one_run(), virtual=True)
        lap = meter.lap([], 1.0)
        serial = serial or lap.samples_per_s
        bias = fmean(lengths.lengths) / expected - 1
        print(
            f"{name:42}{lap.samples_per_s:11.2f}{lap.samples_per_s / serial:11.2f}{lap.staleness_mean:11.2f}"
            f"{lap.staleness_max:11.0f}{lap.waste_share:11.1%}{bias:+11.1%}{lap.deferrals_max:11.0f}"
        )


if __name__ == "__main__":
    main()
