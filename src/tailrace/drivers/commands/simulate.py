"""`tailrace simulate`: the schedule of a config in virtual time. It needs no model.

It writes config.toml, metrics.jsonl, summary.json and events.jsonl, as a live run does (folder.py), and has
the same sinks and trackers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Column, Table

from tailrace.config import load_config
from tailrace.drivers.assembly.folder import RunFolder, recorder_of
from tailrace.drivers.assembly.schedule import resolve, with_published_defaults
from tailrace.drivers.assembly.simulation import run_virtual, sim_settings, sources
from tailrace.drivers.commands.tables import check_output, open_console, print_table, writing
from tailrace.drivers.kinds.hooks import FittedCosts
from tailrace.drivers.kinds.tracker import TrackedRun, check_trackers, open_trackers
from tailrace.errors import ConfigError
from tailrace.kinds import kind_of
from tailrace.record.events import Row, Sink
from tailrace.record.figures import BIASES, COSTS, QUALITIES, TIMES
from tailrace.record.sinks import open_sinks
from tailrace.record.summary import RunSummary, Summary
from tailrace.sim.world import Lengths

FIRST = ("samples_per_s", "waiting_ratio", "lag_mean", "waste_share")
"""The figures that are printed without --all, with the time of the whole run."""


def simulate(
    config: Path,
    /,
    *,
    output_dir: Path | None = None,
    like: Path | None = None,
    json_path: Annotated[Path | None, Parameter("--json")] = None,
    every_figure: Annotated[bool, Parameter("--all")] = False,
    overrides: Mapping[str, str],
) -> None:
    """Run the schedule on simulated parts and print its figures.

    Args:
        config: a TOML file.
        output_dir: for metrics, summary and events. Without it the config's sinks and trackers are not used.
        like: a run whose costs and lengths are taken instead of [sim].
        json_path: another file for the summary.
        every_figure: print all figures, not only the five that say most.
    """
    if json_path:
        with writing("--json", json_path):
            json_path.parent.mkdir(parents=True, exist_ok=True)
    check_output("--json", json_path, r'\A{\s*"eval": ')
    loaded = load_config(config, overrides)
    if like:
        for key in (key for key in overrides if key.startswith("sim.")):
            remedy = f"remove it, or use the [sim] that tailrace fit {like} prints"
            raise ConfigError(f"--{key}", overrides[key], "--like replaces all of [sim]", remedy)
        fitted: FittedCosts = kind_of("sim", "fitted", "--like")
        loaded = loaded.changed(sim=fitted.sim(like))
    schedule, name = resolve(loaded), str(loaded.schedule["name"])
    loaded = with_published_defaults(loaded)
    sim = sim_settings(loaded)
    check_trackers(loaded.record.trackers)
    console = open_console()
    summary = Summary(output_dir / "summary.json" if output_dir else None)
    sinks: list[Sink] = [Summary(json_path)]
    if folder := RunFolder(output_dir) if output_dir else None:
        folder.begin_anew("simulate", loaded.toml(chosen=False))
        tracked = TrackedRun(loaded.record.project, folder.path, loaded.shared())
        sinks += open_sinks(loaded.record.sinks, folder.path, console.print)
        sinks += open_trackers(loaded.record.trackers, tracked, console.print)
    seconds = run_virtual(loaded, schedule, recorder_of(folder, summary, *sinks))
    totals, prices = summary.summary(), loaded.prices
    if prices and prices.budget and not totals.rounds:
        raise ConfigError("prices.budget", prices.budget, "it is spent within the first round", "raise it")
    median_tokens, max_tokens = Lengths(sim.lengths, 0).median_tokens, sim.lengths.max_tokens
    setup = f"virtual time: {sim.engines.count} engines of {sim.engines.slots} slots; responses of "
    setup += f"{median_tokens:,.0f} tokens in the median, {max_tokens:,} at most. {sources(loaded, like)}"
    console.print(setup, soft_wrap=False)
    print_table(console, _table(name, seconds, totals, summary.figures(), every_figure=every_figure))
    if totals.bound:
        console.print(f"bound     {totals.bound.line}", soft_wrap=False)
    if prices and totals.cost is not None:
        console.print(f"cost      {prices.overrun(totals.cost) or prices.words(totals.cost)}")
    if output_dir:
        console.print(f"files     {output_dir}")


def _table(name: str, seconds: float, summary: RunSummary, figures: Row, *, every_figure: bool) -> Table:
    table = Table("figure", Column(name, justify="right"))
    table.add_row("whole run", f"{seconds:,.1f} s, {summary.rounds} rounds, {summary.steps} steps")
    printed = {**TIMES, **COSTS, **QUALITIES, **BIASES}
    absent = {key for key, value in summary.round.items() if value is None}
    others = [key for key in printed if key not in FIRST and key != "reward"]  # which no simulation earns
    for key in (*FIRST, *others) if every_figure else FIRST:
        if key in figures and key not in absent:
            label, form = printed[key]
            table.add_row(label, form.format(figures[key]))
    if not every_figure:
        table.caption, table.caption_justify = "--all prints every figure", "left"
        return table
    for key, value in summary.round.items():
        if key not in printed and value is not None:
            table.add_row(f"{key}, median of rounds", f"{value:,.3f}")
    table.add_row("tokens trained", f"{summary.tokens.trained:,}")
    table.add_row("tokens masked", f"{summary.tokens.masked:,}")
    for reason, tokens in summary.tokens.wasted.items():
        table.add_row(f"tokens wasted, {reason}", f"{tokens:,}")
    return table
