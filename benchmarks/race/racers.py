"""Who races: every schedule, and what its laps count.

The first rounds of a lap do not count: a schedule that keeps long responses in flight has few of them in its
first batches. With tail batching's factor of 5/4 every fifth round is long, so warm-ups and laps are whole
fives. A round of conventional has as many optimizer steps as eight rounds of pipelinerl.
"""

from dataclasses import dataclass, field
from pathlib import Path

from tailrace.commands.compare import Racer
from tailrace.config import load_config
from tailrace.schedules.resolve import resolve, with_published_defaults

CONFIG = Path(__file__).with_name("race.toml")


@dataclass(frozen=True, slots=True)
class Entry:
    """A schedule in the race."""

    schedule: str
    warm_up_rounds: int = 5
    """First rounds of a lap that do not count."""
    probe_every: int = 5
    """Rounds between checkpoints, which are evaluated after the lap."""
    overrides: dict[str, str] = field(default_factory=dict)
    """Settings that differ from race.toml."""

    def racer(self, seed: int) -> Racer:
        overrides = {"schedule.name": self.schedule, "run.seed": str(seed)}
        overrides |= {"run.checkpoint_every": str(self.probe_every)} | self.overrides
        config = load_config(CONFIG, overrides)
        return Racer(with_published_defaults(config), resolve(config))


ENTRIES: dict[str, Entry] = {
    "serial": Entry("serial"),
    "rolloutpipe": Entry("rolloutpipe"),
    "rolloutpipe_eager": Entry("rolloutpipe_eager"),
    "april": Entry("april"),
    "tailbatch": Entry("tailbatch"),
    "tailbatch_responses": Entry("tailbatch", overrides={"schedules.tailbatch.response_speculation": "1.25"}),
    "tailbatch_dapo": Entry("tailbatch_dapo"),
    "tailbatch_async": Entry("tailbatch_async"),
    "rollpacker": Entry("rollpacker"),
    "conventional": Entry("conventional", 4, 2, {"run.rounds": "14"}),
    "pipelinerl": Entry("pipelinerl", 32, 16, {"run.rounds": "112"}),
    "one_step_off": Entry("one_step_off"),
    "streamrl": Entry("streamrl"),
    "streamrl_async": Entry("streamrl_async"),
    "periodic_asynchrony": Entry("periodic_asynchrony"),
    "seer": Entry("seer"),
    "sortedrl": Entry("sortedrl"),
    "sortedrl_on_policy": Entry("sortedrl_on_policy"),
    "windowed_fifo": Entry("windowed_fifo"),
    "tailrace": Entry("tailrace"),
    "tailrace_on_policy": Entry("tailrace_on_policy"),
}
"""tailbatch_responses races for responses, too: faster, with biased lengths."""
