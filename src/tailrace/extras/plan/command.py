"""`tailrace plan`: the fastest schedule for a cluster, as a table, in words, and as a config."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from signal import Signals
from typing import Annotated, Any

import tomli_w
from cyclopts import Parameter
from rich.console import Console

from tailrace.algo.advantages import ComputeAdvantages
from tailrace.config import RunConfig, config_of, load_config
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.schedule import resolve, steps_of_a_round, with_published_defaults
from tailrace.drivers.assembly.signals import signals_awaited
from tailrace.drivers.assembly.simulation import costs_given, sim_sampling, without_rates
from tailrace.drivers.commands.tables import check_output, open_console, progress
from tailrace.errors import ConfigError, Interrupted
from tailrace.extras.plan.calibrate import calibrated
from tailrace.extras.plan.candidates import Candidate, Work, divisions, num_slices
from tailrace.extras.plan.fit import correlation_within_groups
from tailrace.extras.plan.fit_command import fitted_run
from tailrace.extras.plan.peer_fit import fit_peer
from tailrace.extras.plan.peers import PeerLog, read_peer
from tailrace.extras.plan.plan import Measured, Problem
from tailrace.extras.plan.planned import changes_of, chooses_server, least_tensor_parallel, on_cluster
from tailrace.extras.plan.search import Plan, search
from tailrace.ledger.ledger import Totals
from tailrace.ledger.prices import Prices
from tailrace.sim.settings import EmpiricalSettings, SimClusterSettings, SimSettings, TableSettings
from tailrace.sim.world import read_lengths, read_recorded

MEASURED_SAMPLES = 8192
"""Samples over which a candidate is measured, unless plan.steps says otherwise."""
CELLS = {
    "step_s": ("s/step", "{:,.3g}"),
    "times": ("times", "{:.2f}x"),
    "gain": ("gain", "{:.2f}x"),
    "cost_per_1000_samples": ("cost", "{:,.4f}"),
    "lag_mean": ("lag", "{:.1f}"),
    "ess_mean": ("ESS", "{:.3f}"),
    "length_bias": ("bias", "{:+.1%}"),
}
"""Figures of a candidate in the table, their heads and formats; gains with --from, costs with prices, times
with a present setting."""
WRITTEN = ("samples_per_s", "over_bound", "lag_max", "kv_share", "trainer_share", "device_share")
"""Further figures in the file of --json."""
NAMES = 26
"""Columns of a terminal that a name has beside its figures, at least; else it has a line of its own."""


def plan(
    cluster: Path | None = None,
    /,
    *,
    run: Annotated[Path | None, Parameter("--from")] = None,
    max_tokens: int | None = None,
    prompt_tokens: int | None = None,
    lengths: str = "model",
    output: Path | None = None,
    json_path: Annotated[Path | None, Parameter("--json")] = None,
    whole: bool = False,
    overrides: Mapping[str, str],
) -> None:
    """Search for the fastest candidate and print the ranking, with the reasons.

    Args:
        cluster: a config with [sim.cluster]; with --from it may be left out for overrides.
        run: a run, or a log of another framework as of tailrace fit, made on the devices of [sim.cluster] and
            with its division. Costs and lengths are fitted to it, and it is compared with the candidates.
        max_tokens: the longest response, where the log of another framework does not say.
        prompt_tokens: mean length of a prompt, where such a log does not say.
        lengths: the output directory of a run whose responses are as long; "model": as in [sim.lengths].
        output: a file for the config with the fastest candidate.
        json_path: a file for all candidates that were measured.
        whole: measure every candidate over all steps, which takes many times as long.
    """
    check_output("--output", output, r"\A# Fastest within the limits: ")
    check_output("--json", json_path, r'\A{\s*"ranking": ')
    given, log = with_lengths(_config(cluster, run, overrides), lengths), None
    config = given
    if run:
        config, log = from_run(given, run, max_tokens=max_tokens, prompt_tokens=prompt_tokens)
    with progress() as say, signals_awaited() as check:

        def said(words: str) -> None:
            check()
            say(words)

        asked = replace(problem_of(config), progress=said)
        present, why_not = present_setting(config, asked)
        found = search(asked, whole=whole, present=present)
    devices, console = config.sim.cluster.devices if config.sim.cluster else 0, open_console()
    if log and given.sim.cluster:
        found = _against(log, found, asked, given.sim.cluster)
    _print_rows(console, config, found, devices)
    excluded = [f"{n} of {found.candidates} candidates {what}" for what, n in found.excluded.items()]
    pruned = f"{found.pruned} were not measured over all steps: they are predicted to be slower"
    for reason in (*found.reasons, *excluded, pruned, _assumed(config), *why_not):
        console.print(f"- {reason}", soft_wrap=False)
    console.print(_answer(found, devices), soft_wrap=False)
    if found.signal:
        written = "; no file was written" if output or json_path else ""
        raise Interrupted(f"{Signals(found.signal).name}: the plan is not finished{written}", found.signal)
    if json_path:
        json_path.write_text(json.dumps(_json(found, devices), indent=1) + "\n", encoding="utf-8")
    if output:
        planned = with_candidate(config, found.best.candidate)
        resolve(config_of(planned))
        text = f"# {_answer(found, devices)}\n\n{tomli_w.dumps(planned)}"
        output.write_text(text, encoding="utf-8")
        console.print(f"config    {output}")


def _config(cluster: Path | None, run: Path | None, overrides: Mapping[str, str]) -> RunConfig:
    if run and not RunFolder(run).samples.is_dir():
        RunFolder(run).check_wrote("samples", "train", key="--from")
    if cluster:
        return load_config(cluster, overrides)
    if run is None:
        remedy = "name one with [sim.cluster], or a run: --from RUN"
        raise ConfigError("CLUSTER", None, "there is no config", remedy)
    if (folder := RunFolder(run)).config.exists():
        return folder.read_config(overrides)
    return config_of({"run": {"rounds": 1}, "schedule": {"name": "serial"}}, overrides)


def from_run(config: RunConfig, path: Path, **given: float | None) -> tuple[RunConfig, PeerLog]:
    """The config with the costs and lengths of a run, and what the run logged. Raises a ConfigError if there
    is no such run, or its steps have other samples than those of the config. `given`: of `read_peer`."""
    groups, folder = _groups_per_step(config), RunFolder(path)
    samples, is_own = groups * config.run.group_size, folder.config.exists()
    log = read_peer(folder.metrics if is_own else path, samples, **given)
    if round(log.mean("samples")) != samples:
        problem = f"a step of {path} trains {log.mean('samples'):g} samples, and one of the config {samples}"
        raise ConfigError("schedule.groups_per_step", groups, problem, "change it, or run.group_size")
    fitted = fitted_run(path) if is_own else fit_peer(log)
    training_s, others_s = log.mean("update_s") if log.has("update_s") else None, log.other_s * (not is_own)
    return calibrated(config, fitted.sim, groups, training_s, log.overlaps, others_s), log


def _against(log: PeerLog, found: Plan, asked: Problem, cluster: SimClusterSettings) -> Plan:
    """The plan with the gain of each candidate over the run, which had the devices of a cluster, and with
    what may be said of the run."""
    best, prices, run_s = found.best, asked.prices, log.mean("step_s") - log.other_s
    reasons, division = [f"the run: {log.waits}"], (cluster.rollout_devices, cluster.tensor_parallel)
    for each, sim in asked.candidates()[0].items():
        is_own = (each.rollout_devices, each.tensor_parallel) == division and not each.lends
        if is_own and each.work.schedule == "serial" and not each.work.lag and not log.overlaps:
            same_s = asked.measure(each, sim, asked.steps).step_s
            off = f"{same_s / run_s - 1:+.0%}"
            reasons.append(f"serial on its devices is predicted with {same_s:.3g} s a step, {off}")
    times = f"{run_s / found.least_s:.2f}x the least bound of all candidates"
    reasons.append(f"it takes {times}, {found.least_s:.3g} s a step")
    words = f"{best.candidate.name(cluster.devices)} takes {best.step_s:.3g} s a step: "
    words += f"{run_s / best.step_s:.2f}x as fast, at a lag of at most {best.figures['lag_max']:.0f}"
    if prices:
        per_1000, tokens = 1000 / log.mean("samples"), round(1000 * log.mean("mean_tokens"))
        totals = Totals(trained_tokens=tokens, seconds=run_s * per_1000)
        totals.prefilled_tokens = round(1000 * log.mean("prompt_tokens"))
        cost = Prices(prices, *cluster.devices_by_use).cost(totals, tokens)
        words += f"; 1,000 samples cost {best.figures['cost_per_1000_samples']:,.4f} in place of {cost:,.4f}"
        words += f" {prices.currency}"
    gains = [replace(each, figures=each.figures | {"gain": run_s / each.step_s}) for each in found.ranking]
    return replace(found, ranking=gains, reasons=[*reasons, words, *found.reasons])


def problem_of(config: RunConfig) -> Problem:
    """Return the planner's problem from a config. Raises a ConfigError if there is no cluster, or no number
    of groups of an optimizer step, or a rate is given that depends on the division of the devices."""
    sim, limits = config.sim, config.plan
    if sim.cluster is None:
        remedy = "add [sim.cluster] with devices and a model"
        raise ConfigError("sim.cluster", None, "the planner needs the section", remedy)
    for section, key in costs_given(sim):
        problem = "it would be the same for every division of the devices"
        raise ConfigError(f"sim.{section}.{key}", getattr(getattr(sim, section), key), problem, "remove it")
    if config.run.groups.has_rule:
        problem = "the planner predicts groups that wait for all of their members"
        raise ConfigError("run.groups", config.run.groups.model_dump(), problem, "remove it")
    config = with_published_defaults(config)
    if "tensor_parallel_size" not in type(config.engine).model_fields and not chooses_server(config):
        sim = sim.changed(cluster={"tensor_parallel": 1})
    groups = _groups_per_step(config)
    measured = round(MEASURED_SAMPLES / (groups * config.run.group_size))
    return Problem(
        sim=_with_table(without_rates(config.changed(sim=sim))),
        run=config.run,
        groups_per_step=groups,
        steps=limits.steps or min(64, max(16, measured)),
        max_mean_lag=limits.max_mean_lag,
        min_ess=limits.min_ess,
        max_lag=inf if limits.max_lag is None else limits.max_lag,
        max_length_bias=limits.max_length_bias,
        reference=config.algorithm.needs_reference,
        compute_advantages=ComputeAdvantages(config.algorithm, sim_sampling(config)),
        prices=config.prices and config.prices.unlimited,
        divided=partial(least_tensor_parallel, config),
    )


def with_lengths(config: RunConfig, lengths: str) -> RunConfig:
    """The config with the lengths of a run, and their correlation within groups. Raises a ConfigError if
    there is no such run, or its samples are damaged."""
    if lengths == "model":
        return config
    samples = RunFolder(Path(lengths)).samples.resolve()
    if not samples.is_dir():
        problem = "it is neither 'model' nor the output directory of a run with samples"
        raise ConfigError("--lengths", lengths, problem, "name one, or leave it out")
    changes: dict[str, Any] = {"distribution": EmpiricalSettings(kind="empirical", path=samples)}
    correlation = correlation_within_groups(read_recorded(samples))
    if correlation is not None:
        changes["correlation"] = correlation
    return config.changed(sim={"lengths": changes})


def with_candidate(config: RunConfig, candidate: Candidate) -> dict[str, Any]:
    """The changes of the config with the schedule of a candidate, and with its devices."""
    assert config.sim.cluster
    cluster, tree = candidate.on(config.sim.cluster), changes_of(config)
    tree.pop("schedules", None)
    tree["schedule"] = {"name": candidate.work.schedule, **candidate.work.parameters}
    tree["sim"]["cluster"] = changes_of(config.changed(sim={"cluster": cluster}))["sim"]["cluster"]
    for name, section in on_cluster(config, cluster, candidate.kind).items():
        tree[name] = tree.get(name, {}) | section
    return tree


def _with_table(sim: SimSettings) -> SimSettings:
    """Lengths of a run as a table, so that its files are read once."""
    path = getattr(sim.lengths.distribution, "path", None)
    if path is None:
        return sim
    counts = sorted(Counter(read_lengths(path)).items())
    table = TableSettings(
        tokens=tuple(tokens for tokens, _ in counts), shares=tuple(count for _, count in counts)
    )
    return sim.changed(lengths={"distribution": table})


def _groups_per_step(config: RunConfig) -> int:
    section = {**config.schedule, **config.schedules.get(str(config.schedule.get("name")), {})}
    number = section.get("groups_per_step", section.get("groups_per_round"))
    if not isinstance(number, int) or number < 1:
        problem = "all candidates train so many groups in an optimizer step"
        raise ConfigError("schedule.groups_per_step", number, problem, "set it to at least 1")
    return number


def present_setting(
    config: RunConfig, asked: Problem
) -> tuple[tuple[Candidate, SimSettings] | None, Sequence[str]]:
    """Return the schedule that the config has, on the devices as the config divides them, in turn if it does
    not, with the smallest engines that fit; or None, and why it does not run on the cluster."""
    cluster, kind = asked.sim.cluster, config.placement.kind
    name, why = str(config.schedule["name"]), ""
    assert cluster
    if cluster.rollout_devices or not config.placement.takes_turns:
        kind = "disaggregated" if cluster.rollout_devices else "colocated"
    config = config.changed(placement={"kind": kind})
    try:
        schedule = resolve(config)
        steps = steps_of_a_round(config, schedule) or 1
    except ConfigError as error:
        return None, [f"the present setting, {name}, cannot run {kind}, as [sim.cluster] has it: {error}"]
    work = Work(name, schedule.keywords, lag=inf, steps=steps, bound=schedule)
    for of, rollout, size in divisions(cluster):
        if (of, rollout) == (kind, cluster.rollout_devices):
            parts = num_slices(
                asked.sim,
                asked.groups_per_step,
                asked.run.group_size,
                size,
                (rollout or cluster.devices) // size,
            )
            candidate = Candidate(work, of, rollout, size, parts)
            try:
                return (candidate, asked.sim_of(candidate)), ()
            except ConfigError as error:
                why = why or str(error.problem)
    return None, [f"the present setting, {name}, does not fit the devices: {why}"]


def _print_rows(console: Console, config: RunConfig, found: Plan, devices: int) -> None:
    """Print the candidates, fastest first, and the present setting where it belongs. A row is one line, or
    two where the terminal is narrow."""
    cluster = config.sim.cluster
    assert cluster
    steps, rows = found.best.steps, list(found.ranking[: config.plan.top])
    rows = sorted([*rows, *([found.present] if found.present else [])], key=lambda each: each.step_s)
    console.print(
        f"fastest first: {devices} x {cluster.device}, {cluster.model or 'the model'}, "
        f"{steps} optimizer steps of each in virtual time",
        soft_wrap=False,
    )
    shown = {key: cell for key, cell in CELLS.items() if key in found.best.figures}
    heads = "".join(f"{head:>8}" for head, _ in shown.values())
    room = console.width - len(heads) - 1
    marks = [" ~" * (each.candidate.slices > 1) + " *" * (each is found.present) for each in rows]
    names = [each.candidate.name(devices) + mark for each, mark in zip(rows, marks, strict=True)]
    wide = min(max(map(len, names)), room) if room >= NAMES else 0
    console.print(f"{'schedule (devices)':{wide}}{heads}" if wide else heads)
    for name, each in zip(names, rows, strict=True):
        cells = (
            form.format(each.figures[key]) if key in each.figures else "-" for key, (_, form) in shown.items()
        )
        figures = "".join(f"{cell:>8}" for cell in cells)
        fits = len(name) <= wide
        console.print(f"{name:{wide}}{figures}" if fits else f"{name}\n{'':{wide}}{figures}")
        for variant in each.variants:
            console.print(f"  the same figures: {variant.name(devices)}", soft_wrap=False)
    legend = "lag: mean age of a trained token, in optimizer steps; ESS: effective sample size; bias: of the "
    legend += "lengths that are trained; *: the present setting, and times: how much faster than it"
    if slices := {each.candidate.slices for each in rows} - {1}:
        parts = " or ".join(f"1/{num}" for num in sorted(slices))
        legend += f"; ~: of {parts} of the devices with as small a share of the groups, without ~: of all"
    legend += f"; cost: of 1,000 samples, in {config.prices.currency}" if config.prices else ""
    console.print(legend, soft_wrap=False)


def _assumed(config: RunConfig) -> str:
    cluster = config.sim.cluster
    assert cluster
    shares = {
        "memory bandwidth in decoding": cluster.bandwidth_efficiency,
        "FLOP/s in decoding": cluster.decode_efficiency,
        "in a prefill": cluster.prefill_efficiency,
        "in training": cluster.training_efficiency,
        "links": cluster.link_efficiency,
    }
    words = ", ".join(f"{what} {share:.0%}" for what, share in shares.items())
    return f"assumed shares of the peaks: {words}; set them in [sim.cluster], or measure them: --from RUN"


def _answer(found: Plan, devices: int) -> str:
    """One sentence."""
    best, figures = found.best, found.best.figures
    known = "Not finished; fastest so far" if found.signal else "Fastest within the limits"
    words = f"{known}: {best.candidate.name(devices)}, {best.step_s:.3g} s a step"
    if found.present and found.present.looks_like(best):
        words += ", as the present setting is"
    elif found.present:
        own = f"{found.present.candidate.name(devices)}, the present setting"
        words += f", {figures['times']:.2f} times as fast as {own}"
    words += f", at a mean lag of {figures['lag_mean']:.1f} steps and an effective sample size of "
    return f"{words}{figures['ess_mean']:.3f}."


def _json(found: Plan, devices: int) -> Mapping[str, object]:
    return {
        "ranking": [_numbers(each, devices) for each in found.ranking],
        "present": found.present and _numbers(found.present, devices),
        "reasons": found.reasons,
        "candidates": found.candidates,
        "excluded": found.excluded,
        "pruned": found.pruned,
    }


def _numbers(each: Measured, devices: int) -> Mapping[str, object]:
    candidate = each.candidate
    return {
        "schedule": candidate.work.schedule,
        "parameters": candidate.work.parameters,
        "placement": candidate.kind,
        "rollout_devices": candidate.rollout_devices or devices,
        "tensor_parallel": candidate.tensor_parallel,
        "bound": each.floor._asdict(),
        "steps": each.steps,
        "slices": candidate.slices,
        "variants": [variant.name(devices) for variant in each.variants],
        **{key: each.figures[key] for key in (*CELLS, *WRITTEN) if key in each.figures},
        "wasted": each.figures["waste_share"],
    }
