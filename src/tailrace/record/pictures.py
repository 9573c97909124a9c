"""Draws timeline.png with matplotlib. Only this file imports matplotlib, and only
`draw.py` imports this file.

A run is a panel. Above, a thin bar for each request, in the lane that served it; below, the trainer. Both
have the colour of the optimizer step that trains them, so a group can be followed from the engine to the
trainer. The white gaps in the trainer's lane are its waits.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from tailrace.record.timeline import Timeline

WIDTH_IN, DPI = 12.0, 160
HEAD_IN, ENGINE_IN, TRAINER_IN, FOOT_IN = 0.66, 2.4, 0.52, 0.62
"""Heights of a panel's title, engines and trainer, and of the time axis below the last panel."""
LEFT, RIGHT = 0.09, 0.985
INK, MUTED, FRAME, SAVED = "#1f2933", "#66727f", "#cbd2d9", "#14804a"
UNTRAINED, BETWEEN = "#c3cad1", "#e9ecef"
FIRST_TO_LAST = LinearSegmentedColormap.from_list(
    "first to last step", ["#31358f", "#2878b8", "#2ab0a1", "#f3b33d", "#e2512f"]
)
CAPTION = "colour: the optimizer step that trains the group, from first to last; grey: none"
LABELLED = 0.09
"""Smallest share of the time axis in which the label of a wait has room."""

Bar = tuple[float, float, float, float]
"""left, right, top, bottom"""


def draw_timelines(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Draw a panel for each run, on one time axis that begins with the first round of each."""
    panel_in = HEAD_IN + ENGINE_IN + TRAINER_IN
    height_in = panel_in * len(timelines) + FOOT_IN
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor="white")
    until_s = max(timeline.rounds[-1].end_s for timeline in timelines.values())
    baseline = next(iter(timelines.values()))
    top_in = height_in
    for name, timeline in timelines.items():
        engine_in, trainer_in = top_in - HEAD_IN - ENGINE_IN, top_in - panel_in
        engine = _frame(figure, engine_in / height_in, ENGINE_IN / height_in, until_s)
        trainer = _frame(figure, trainer_in / height_in, TRAINER_IN / height_in, until_s)
        _draw_engines(engine, timeline)
        _draw_trainer(trainer, timeline, until_s)
        _draw_title(engine, name, timeline)
        _draw_ends(engine, trainer, timeline)
        _draw_saving(engine, timeline, baseline, until_s)
        top_in = trainer_in
    trainer.tick_params(axis="x", bottom=True, labelbottom=True, color=FRAME, labelcolor=MUTED)
    figure.text(LEFT, 0.14 / height_in, "seconds", color=MUTED)
    figure.text(RIGHT, 0.14 / height_in, CAPTION, ha="right", color=MUTED)
    figure.savefig(path)


def _trained_s(timeline: Timeline) -> float:
    """The end of the last optimizer step."""
    return timeline.trainer[-1].end_s


def _frame(figure: Figure, bottom: float, height: float, until_s: float) -> Axes:
    axes = figure.add_axes((LEFT, bottom, RIGHT - LEFT, height), xlim=(0, until_s), yticks=[])
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    for spine in axes.spines.values():
        spine.set(color=FRAME, linewidth=0.8)
    return axes


def _draw_engines(axes: Axes, timeline: Timeline) -> None:
    lanes = sorted({(bar.engine, bar.lane) for bar in timeline.requests})
    rows = {lane: row for row, lane in enumerate(lanes)}
    bars = []
    for request in timeline.requests:
        row = rows[request.engine, request.lane]
        bars.append((request.start_s, request.end_s, row, row + 1))
    _draw_bars(axes, bars, [_colour(timeline, timeline.steps.get(bar.prompt)) for bar in timeline.requests])
    axes.set_ylim(max(1, len(rows)), 0)  # there may be no request that both started and ended
    num_engines = len({engine for engine, _ in lanes})
    engines = "engine" if num_engines == 1 else f"{num_engines} engines"
    _label(axes, f"{engines}\n{len(rows)} slots")


def _draw_trainer(axes: Axes, timeline: Timeline, until_s: float) -> None:
    bars = [(work.start_s, work.end_s, 0.1, 0.9) for work in timeline.trainer]
    _draw_bars(axes, bars, [_colour(timeline, work.step) for work in timeline.trainer])
    axes.set_ylim(1, 0)
    _label(axes, "trainer")
    for start_s, end_s in _waits(timeline):
        if end_s - start_s > LABELLED * until_s:
            middle_s, label = (start_s + end_s) / 2, f"waits {end_s - start_s:.3g} s"
            axes.text(middle_s, 0.5, label, ha="center", va="center", color=MUTED)


def _waits(timeline: Timeline) -> Iterator[tuple[float, float]]:
    """The gap before each piece of work, at most back to its round's start. Publishing comes after a
    round's last work."""
    starts = [round.start_s for round in timeline.rounds]
    free_s = 0.0
    for work in timeline.trainer:
        round_start_s = starts[bisect_right(starts, work.start_s) - 1]
        yield max(free_s, round_start_s), work.start_s
        free_s = work.end_s


def _draw_bars(axes: Axes, bars: Sequence[Bar], colours: Sequence[object]) -> None:
    corners = [[(x0, y0), (x1, y0), (x1, y1), (x0, y1)] for x0, x1, y0, y1 in bars]
    axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="none"), autolim=False)


def _colour(timeline: Timeline, step: int | None) -> object:
    if step is None:
        return UNTRAINED
    first, last = timeline.trainer[0].step, timeline.trainer[-1].step
    return FIRST_TO_LAST((step - first) / max(1, last - first))


def _label(axes: Axes, label: str) -> None:
    axes.set_ylabel(label, rotation=0, ha="right", va="center", color=MUTED, labelpad=8)


def _draw_title(axes: Axes, name: str, timeline: Timeline) -> None:
    wait_s = sum(report["round/wait_s"] for report in timeline.reports)
    main_s = sum(report["round/main_time_s"] for report in timeline.reports)
    waiting = wait_s / main_s if main_s else 0.0
    figures = f"{_trained_s(timeline):.3g} s to the last step,  trainer waits {waiting:.0%}"
    axes.set_title(name, loc="left", fontsize=15, fontweight="bold", color=INK)
    axes.set_title(figures, loc="right", fontsize=12, color=INK)


def _draw_ends(engine: Axes, trainer: Axes, timeline: Timeline) -> None:
    """Mark the time between rounds (evaluations, checkpoints) and the end of the training."""
    for axes in (engine, trainer):
        for round, following in itertools.pairwise(timeline.rounds):
            axes.axvspan(round.end_s, following.start_s, color=BETWEEN, linewidth=0.8, zorder=0)
        axes.axvline(_trained_s(timeline), color=INK, linewidth=1.2)


def _draw_saving(axes: Axes, timeline: Timeline, baseline: Timeline, until_s: float) -> None:
    """Mark how much sooner the training ends than in the first panel, if both trained as many groups."""
    end_s, baseline_s = _trained_s(timeline), _trained_s(baseline)
    if _num_groups(timeline) != _num_groups(baseline) or baseline_s - end_s < 2 * LABELLED * until_s:
        return
    middle = 0.5 * sum(axes.get_ylim())
    style = {"arrowstyle": "<|-|>", "color": SAVED, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (end_s, middle), (baseline_s, middle), arrowprops=style)
    text = axes.text((end_s + baseline_s) / 2, middle, f"{1 - end_s / baseline_s:.0%} sooner", color=SAVED)
    text.set(
        ha="center", va="center", fontsize=13, bbox={"facecolor": "white", "edgecolor": "none", "pad": 4}
    )


def _num_groups(timeline: Timeline) -> int:
    return int(sum(report["round/num_groups"] for report in timeline.reports))
