"""Draw the pictures of the schedules' pages: python docs/make_pictures.py [NAME ...] (a minute on one core)

Each picture shows `serial` above and one schedule below, on one time axis, in virtual time. All pictures have
the same simulated set-up: two engines of 32 slots each, one trainer on a device of its own, group_size 4.
Response lengths are lognormal with a median of 600 tokens and a limit of 16,384. A run trains 480 groups; a
picture shows the last 96, so that schedules that carry responses over are seen in their steady state.

A run is a panel. Above, a thin bar for each request, in the slot that served it; below, the trainer. Both
have the colour of the optimizer step that trains them, so a group can be followed from the engine to the
trainer. The white gaps in the trainer's lane are its waits.
"""

import itertools
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from PIL import Image

from tailrace import clock
from tailrace.controller.base import RunSettings
from tailrace.controller.execution import execute
from tailrace.controller.run import Run
from tailrace.drivers.assembly.simulated import simulated_parts
from tailrace.record.events import Event, Recorder, logged
from tailrace.record.intervals import total, union
from tailrace.record.timeline import Timeline
from tailrace.rollout.admission import FrontierFirst
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import (
    SimEngineSettings,
    SimLengthSettings,
    SimRewardSettings,
    SimSettings,
    SimTrainerSettings,
)

WIDTH_IN, DPI = 12.0, 160
HEAD_IN, ENGINE_IN, TRAINER_IN, FOOT_IN = 0.66, 2.4, 0.52, 0.62
"""Heights of a panel's title, engines and trainer, and of the time axis below the last panel."""
LEFT, RIGHT = 0.09, 0.985
PALETTE = (files("tailrace.extras.view") / "static" / "palette.css").read_text(encoding="utf-8")
LIGHT = dict(reversed(re.findall(r"--([a-z]+): (#[0-9a-f]{6});", PALETTE)))
"""The colours of the page of `tailrace view`; the dark ones come last in the file, and do not count."""
INK, MUTED, FRAME, SAVED = (LIGHT[name] for name in ("ink", "muted", "frame", "green"))
UNTRAINED, BETWEEN = LIGHT["untrained"], LIGHT["between"]
FIRST_TO_LAST = LinearSegmentedColormap.from_list(
    "first to last step", [LIGHT[name] for name in ("indigo", "blue", "teal", "amber", "red")]
)
CAPTION = "colour: the optimizer step that trains the group, from first to last; grey: none"
LABELLED = 0.09
"""Smallest share of the time axis in which the label of a wait has room."""


FOLDER = Path(__file__).parent / "images"
WIDTH_PX, COLOURS = 1000, 48
SIM = SimSettings(
    engines=SimEngineSettings(count=2, slots=32, base_s=6e-3, slope_s=0.1e-3, abort_s=0.01, load_s=0.3),
    trainer=SimTrainerSettings(tokens_per_s=3_500.0, step_s=0.3),
    lengths=SimLengthSettings(median_tokens=600, sigma=1.1, max_tokens=16_384, prompt_tokens=100, rows=48),
    rewards=SimRewardSettings(median_s=0.1),
)
GROUP_SIZE, NUM_GROUPS, NUM_PICTURED = 4, 480, 96
N = 16
"""Groups of a round."""

PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "serial": {"groups_per_round": N, "groups_per_step": N},
    "rolloutpipe": {
        "groups_per_round": N,
        "groups_per_step": 4,
        "admission": FrontierFirst(groups=12),
    },
    "april": {"groups_per_round": N, "groups_launched": 2 * N},
    "tailbatch": {"groups_per_round": N, "response_speculation": 1.0},
    "rollpacker": {"groups_per_round": N, "response_speculation": 1.0},
    "conventional": {"groups_per_step": N // 2, "steps_per_round": 4},
    "pipelinerl": {
        "groups_per_step": N,
        "in_flight_per_engine": 32,
        "ring_groups": 2 * N,
        "ring_full": "block",
    },
    "one_step_off": {"groups_per_round": N, "groups_per_step": N},
    "periodic_asynchrony": {"groups_per_round": N},
    "streamrl_async": {"groups_per_round": N},
    "seer": {"groups_per_round": 2 * N, "groups_per_step": N},
    "sortedrl": {"groups_per_round": 4 * N, "groups_per_step": N},
    "bubblespec": {"groups_per_round": N, "groups_per_step": N},
    "windowed_fifo": {"groups_per_step": N, "groups_in_flight": 3 * N, "window": N},
    "tailrace": {"groups_per_step": N, "groups_in_flight": 2 * N, "staleness": 3},
    "tailrace_on_policy": {"groups_per_round": N},
}
GROUPS_A_ROUND = {"conventional": 2 * N, "seer": 2 * N}

Schedule = Callable[[Run], Coroutine[Any, Any, None]]


class Collected:
    """Sink: a timeline."""

    def __init__(self) -> None:
        self.timeline = Timeline()

    def on(self, event: Event) -> None:
        if line := logged(event):
            self.timeline.on(line)

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Work:
    """Work of the trainer for an optimizer step: forward and backward, or the step itself."""

    step: int
    start_s: float
    end_s: float


class Panel:
    """The last rounds of a run. Times are seconds since the start of the first of them.

    Requests that have not ended, and those of evaluations, are left out, as is the trainer's work in a round
    that has not ended.
    """

    def __init__(self, timeline: Timeline, max_rounds: int) -> None:
        rounds = timeline.rounds[-max_rounds:]
        origin_s, end_s = rounds[0].start_s, rounds[-1].end_s
        self.rounds = [(each.start_s - origin_s, each.end_s - origin_s) for each in rounds]
        self.requests = [
            (each.engine, each.slot, each.sample.prompt, each.start_s - origin_s, each.end_s - origin_s)
            for each in timeline.requests
            if each.start_s >= origin_s and not each.is_evaluation
        ]
        ends, numbers = [step.end_s for step in timeline.steps], [step.number for step in timeline.steps]
        self.work = [
            Work(numbers[bisect_left(ends, each.end_s)], each.start_s - origin_s, each.end_s - origin_s)
            for each in sorted(timeline.trainer, key=lambda each: (each.end_s, each.start_s))
            if each.start_s >= origin_s and each.end_s <= end_s
        ]
        first: dict[int, int] = {}
        for step in timeline.steps:
            for sample in step.samples:
                first.setdefault(sample.prompt, step.number)
        kept = {each.step for each in self.work}
        self.steps = {prompt: step for prompt, step in first.items() if step in kept}
        """The optimizer step that first trained a prompt's group, by prompt."""

    @property
    def trained_s(self) -> float:
        """The end of the last optimizer step."""
        return self.work[-1].end_s

    @property
    def waiting_ratio(self) -> float:
        """Waits of the trainer as a share of main time: from a round's start to its last optimizer step."""
        main_s = waited_s = 0.0
        for start_s, end_s in self.rounds:
            mine = [(each.start_s, each.end_s) for each in self.work if start_s < each.end_s <= end_s]
            main_s += mine[-1][1] - start_s
            waited_s += mine[-1][1] - start_s - total(union(mine))
        return waited_s / main_s


def simulated(name: str) -> Panel:
    """The last rounds of a simulated run of the schedule."""
    groups_a_round = GROUPS_A_ROUND.get(name, N)
    sink = Collected()
    schedule: Schedule = partial(SCHEDULES[name], **PARAMETERS[name])

    async def run() -> None:
        settings = RunSettings(rounds=NUM_GROUPS // groups_a_round, group_size=GROUP_SIZE)
        await execute(schedule, simulated_parts(SIM, 0), settings, Recorder(sink))

    clock.run(run(), virtual=True)
    return Panel(sink.timeline, NUM_PICTURED // groups_a_round)


def draw(name: str) -> Path:
    """Draw one schedule under `serial` and shrink the picture."""
    path = FOLDER / f"{name}.png"
    names = ("serial",) if name == "serial" else ("serial", name)
    draw_panels({each: simulated(each) for each in names}, path)
    with Image.open(path) as image:
        size = (WIDTH_PX, round(image.height * WIDTH_PX / image.width))
        small = image.convert("RGB").resize(size, Image.Resampling.LANCZOS).quantize(COLOURS)
    small.save(path, optimize=True)
    return path


def draw_panels(panels: Mapping[str, Panel], path: Path) -> None:
    """Draw a panel for each run, on one time axis that begins with the first round of each."""
    panel_in = HEAD_IN + ENGINE_IN + TRAINER_IN
    height_in = panel_in * len(panels) + FOOT_IN
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white")
    until_s = max(panel.rounds[-1][1] for panel in panels.values())
    baseline = next(iter(panels.values()))
    top_in = height_in
    for name, panel in panels.items():
        engine_in, trainer_in = top_in - HEAD_IN - ENGINE_IN, top_in - panel_in
        engine = _frame(figure, engine_in / height_in, ENGINE_IN / height_in, until_s)
        trainer = _frame(figure, trainer_in / height_in, TRAINER_IN / height_in, until_s)
        _draw_engines(engine, panel)
        _draw_trainer(trainer, panel, until_s)
        _draw_title(engine, name, panel)
        _draw_ends(engine, trainer, panel)
        _draw_saving(engine, panel, baseline, until_s)
        top_in = trainer_in
    trainer.tick_params(axis="x", bottom=True, labelbottom=True, color=FRAME, labelcolor=MUTED)
    figure.text(LEFT, 0.14 / height_in, "seconds", color=MUTED)
    figure.text(RIGHT, 0.14 / height_in, CAPTION, ha="right", color=MUTED)
    figure.savefig(path)


def _frame(figure: Figure, bottom: float, height: float, until_s: float) -> Axes:
    axes = figure.add_axes((LEFT, bottom, RIGHT - LEFT, height), xlim=(0, until_s), yticks=[])
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    for spine in axes.spines.values():
        spine.set(color=FRAME, linewidth=0.8)
    return axes


def _draw_engines(axes: Axes, panel: Panel) -> None:
    lanes = sorted({(engine, slot) for engine, slot, *_ in panel.requests})
    rows = {lane: row for row, lane in enumerate(lanes)}
    bars, colours = [], []
    for engine, slot, prompt, start_s, end_s in panel.requests:
        row = rows[engine, slot]
        bars.append((start_s, end_s, row, row + 1))
        colours.append(_colour(panel, panel.steps.get(prompt)))
    _draw_bars(axes, bars, colours)
    axes.set_ylim(max(1, len(rows)), 0)  # there may be no request that both started and ended
    num_engines = len({engine for engine, _ in lanes})
    engines = "engine" if num_engines == 1 else f"{num_engines} engines"
    _label(axes, f"{engines}\n{len(rows)} slots")


def _draw_trainer(axes: Axes, panel: Panel, until_s: float) -> None:
    bars = [(work.start_s, work.end_s, 0.1, 0.9) for work in panel.work]
    _draw_bars(axes, bars, [_colour(panel, work.step) for work in panel.work])
    axes.set_ylim(1, 0)
    _label(axes, "trainer")
    for start_s, end_s in _waits(panel):
        if end_s - start_s > LABELLED * until_s:
            middle_s, label = (start_s + end_s) / 2, f"waits {end_s - start_s:.3g} s"
            axes.text(middle_s, 0.5, label, ha="center", va="center", color=MUTED)


def _waits(panel: Panel) -> Iterator[tuple[float, float]]:
    """The gap before each piece of work, at most back to its round's start. Publishing comes after a
    round's last work."""
    starts = [start_s for start_s, _ in panel.rounds]
    free_s = 0.0
    for work in panel.work:
        round_start_s = starts[bisect_right(starts, work.start_s) - 1]
        yield max(free_s, round_start_s), work.start_s
        free_s = work.end_s


def _draw_bars(
    axes: Axes, bars: Sequence[tuple[float, float, float, float]], colours: Sequence[object]
) -> None:
    """Draw bars, each by its left, right, top and bottom."""
    corners = [[(x0, y0), (x1, y0), (x1, y1), (x0, y1)] for x0, x1, y0, y1 in bars]
    axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="none"), autolim=False)


def _colour(panel: Panel, step: int | None) -> object:
    if step is None:
        return UNTRAINED
    first, last = panel.work[0].step, panel.work[-1].step
    return FIRST_TO_LAST((step - first) / max(1, last - first))


def _label(axes: Axes, label: str) -> None:
    axes.set_ylabel(label, rotation=0, ha="right", va="center", color=MUTED, labelpad=8)


def _draw_title(axes: Axes, name: str, panel: Panel) -> None:
    figures = f"{panel.trained_s:.3g} s to the last step,  trainer waits {panel.waiting_ratio:.0%}"
    axes.set_title(name, loc="left", fontsize=15, fontweight="bold", color=INK)
    axes.set_title(figures, loc="right", fontsize=12, color=INK)


def _draw_ends(engine: Axes, trainer: Axes, panel: Panel) -> None:
    """Mark the time between rounds (evaluations, checkpoints) and the end of the training."""
    for axes in (engine, trainer):
        for (_, end_s), (start_s, _) in itertools.pairwise(panel.rounds):
            axes.axvspan(end_s, start_s, color=BETWEEN, linewidth=0.8, zorder=0)
        axes.axvline(panel.trained_s, color=INK, linewidth=1.2)


def _draw_saving(axes: Axes, panel: Panel, baseline: Panel, until_s: float) -> None:
    """Mark how much sooner the training ends than in the first panel, if both trained as many groups."""
    end_s, baseline_s = panel.trained_s, baseline.trained_s
    if len(panel.steps) != len(baseline.steps) or baseline_s - end_s < 2 * LABELLED * until_s:
        return
    middle = 0.5 * sum(axes.get_ylim())
    style = {"arrowstyle": "<|-|>", "color": SAVED, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (end_s, middle), (baseline_s, middle), arrowprops=style)
    text = axes.text((end_s + baseline_s) / 2, middle, f"{1 - end_s / baseline_s:.0%} sooner", color=SAVED)
    text.set(
        ha="center", va="center", fontsize=13, bbox={"facecolor": "white", "edgecolor": "none", "pad": 4}
    )


def main() -> None:
    for name in sys.argv[1:] or PARAMETERS:
        path = draw(name)
        print(f"{path.relative_to(FOLDER.parent.parent)}  {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
