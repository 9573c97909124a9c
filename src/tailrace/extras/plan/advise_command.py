"""`tailrace advise`: what the tail of anybody's run costs, and which settings of its framework remove it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Column, Table

from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.signals import signals_awaited
from tailrace.drivers.commands.tables import check_output, open_console, print_table, progress, writing
from tailrace.errors import ConfigError
from tailrace.extras.plan.advise import ERROR, PAIRS_ERROR, Advice, BestOrder, in_turn
from tailrace.extras.plan.peers import check_counts, read_peer
from tailrace.sim.cluster import MODELS
from tailrace.sim.device_profiles import PROFILES

FLAGS = {
    "device": "--device",
    "model": "--model",
    "bandwidth_efficiency": "--device",
    "training_efficiency": "--device",
    "rollout_devices": "--rollout-devices",
    "tensor_parallel": "--tensor-parallel",
}
"""Flags by the key of [sim.cluster] of which an error tells."""
SIZES = (1, 2, 4, 8)
"""Devices of an engine that are tried, where no flag says."""


def advise(
    source: str,
    /,
    *,
    device: str | None = None,
    devices: int | None = None,
    rollout_devices: int | None = None,
    model: str | None = None,
    tensor_parallel: int | None = None,
    samples: int | None = None,
    group_size: int | None = None,
    max_tokens: int | None = None,
    prompt_tokens: int | None = None,
    drift: float | None = None,
    json_path: Annotated[Path | None, Parameter("--json")] = None,
    html: Path | None = None,
) -> None:
    """Say where the time of a run of another framework goes, what its longest responses cost, and which of
    the framework's own orders of work would be faster on the same devices, with the settings to paste.
    Nothing leaves the machine; a run by its address is asked for with W&B's own client.

    Args:
        source: a log as of tailrace fit, what the framework printed, CSV that W&B exported, or
            wandb:ENTITY/PROJECT/RUN.
        device: the card, by its name in [sim.cluster].
        devices: of the run, where the log does not say.
        rollout_devices: devices that only generate; 0: all generate and train in turn. Default: none, of a
            synchronous run.
        model: its name in [sim.cluster], or a model folder.
        tensor_parallel: devices of an engine. Default: as many as the model needs.
        samples: of a step, where the log does not say.
        group_size: responses to a prompt.
        max_tokens: the longest response, where the log does not say.
        prompt_tokens: mean length of a prompt, where the log does not say.
        drift: standard deviation of the log importance weight of a token for each version.
        json_path: a file for the answer.
        html: a file for the answer as a page without entity, project, host and path.
    """
    check_output("--json", json_path, r'\A{\s*"framework": ')
    check_output("--html", html, r"\A<!doctype html>\n<title>What the tail costs")
    sizes = {"group_size": group_size, "tensor_parallel": tensor_parallel, "drift": drift or None}
    check_counts(devices=devices, rollout_devices=rollout_devices or None, **sizes)
    path = Path(source)
    if RunFolder(path).config.exists():
        remedy = f"its schedules are ranked by `tailrace plan --from {source}`"
        raise ConfigError("SOURCE", source, "it is a run of tailrace", remedy)
    log = in_turn(
        read_peer(path, samples, max_tokens=max_tokens, prompt_tokens=prompt_tokens), rollout_devices
    )
    advice, orders, itself_s = Advice.of(log, group_size), list[BestOrder](), None
    said, devices = advice.first_words(), devices or round(log.mean("devices")) or None
    wanted = {"--device": device, "--model": model, "--devices": devices}
    if log.overlaps:
        wanted["--rollout-devices"] = rollout_devices
    missing = [flag for flag, value in wanted.items() if value is None]
    if missing:
        named = f"Devices: {', '.join(PROFILES)}. Models: {', '.join(MODELS)}, or a folder."
        said += [f"For orders of work on the same devices add {', '.join(missing)}. {named}"]
    else:
        cluster = {"device": device, "devices": devices, "model": model, "rollout_devices": rollout_devices}
        with _flags_named(), progress() as say, signals_awaited() as check:

            def told(words: str) -> None:
                check()
                say(words)

            orders, itself_s = _orders(advice, cluster, tensor_parallel, drift, told)
        said += advice.order_words(orders, drift)
    said.append(advice.error_words(itself_s))
    console = open_console()
    for words in said:
        console.print(words, soft_wrap=words.startswith("    "))
    if orders:
        print_table(console, _table(orders), keep=2)
    for note in log.notes:
        console.print(f"note: {note}")
    if json_path:
        with writing("--json", json_path):
            json_path.write_text(json.dumps(_numbers(advice, orders), indent=1) + "\n", encoding="utf-8")
    if html:
        with writing("--html", html):
            html.write_text(_page(said, [note for note in log.notes if source not in note]), encoding="utf-8")


def _orders(
    advice: Advice,
    cluster: Mapping[str, object],
    tensor_parallel: int | None,
    drift: float | None,
    told: Callable[[str], None],
) -> tuple[list[BestOrder], float | None]:
    """The orders of work on a cluster, and what the run itself is predicted to take there. Its engines
    have as few devices as the model needs."""
    sizes = [tensor_parallel] if tensor_parallel else SIZES
    for size in sizes:
        try:
            config = advice.config({**cluster, "tensor_parallel": size}, drift)
            break
        except ConfigError as why:
            if size == sizes[-1] or "tensor_parallel" not in why.remedy:
                raise
    return advice.orders(config, told), advice.itself_s(config)


@contextmanager
def _flags_named() -> Iterator[None]:
    """Name the flag in place of the key of a config in errors inside the block."""
    try:
        yield
    except ConfigError as why:
        flag = FLAGS.get(why.key.removeprefix("sim.cluster."), why.key)
        remedy = why.remedy.replace(" in [sim.cluster]", "").replace("sim.cluster.", "--")
        raise ConfigError(flag, why.value, why.problem, remedy) from None


def _table(orders: Sequence[BestOrder]) -> Table:
    table = Table("order of work", Column("devices", no_wrap=True))
    for name in ("s/step", "lag", "largest", "ESS", "bias"):
        table.add_column(name, justify="right")
    for order in orders:
        figures = order.measured.figures
        cells = [f"{order.step_s:.3g}", f"{figures['lag_mean']:.1f}", f"{figures['lag_max']:.0f}"]
        cells += [f"{figures['ess_mean']:.3f}", f"{figures['length_bias']:+.1%}"]
        table.add_row(order.mode.name, order.where, *cells)
    return table


def _numbers(advice: Advice, orders: Sequence[BestOrder]) -> dict[str, object]:
    log = advice.log
    ages = {name: log.mean(name) for name in ("lag_mean", "lag_max", "discarded") if log.column(name).any()}
    return {
        "framework": log.framework,
        "step_s": advice.step_s,
        "parts": log.parts,
        "overlaps": log.overlaps,
        **ages,
        "tail_s": advice.tail_s,
        "full_s": advice.full_s,
        "error": {"training known": ERROR, "synchronous log alone": PAIRS_ERROR},
        "orders": [order.numbers for order in orders],
        "notes": log.notes,
    }


def _page(said: Sequence[str], notes: Sequence[str]) -> str:
    lines = "\n".join(f"<p>{escape(each)}</p>" for each in said if not each.startswith("    "))
    settings = escape("\n".join(each.strip() for each in said if each.startswith("    ")))
    rows = "\n".join(f"<li>{escape(each)}</li>" for each in notes)
    style = (
        "<style>body { font: 16px/1.5 sans-serif; max-width: 46em; margin: 2em auto; padding: 0 1em }</style>"
    )
    return (
        f"<!doctype html>\n<title>What the tail costs</title>\n<meta charset=utf-8>\n{style}\n"
        f"<h1>What the tail costs</h1>\n{lines}\n<pre>{settings}</pre>\n<ul>\n{rows}\n</ul>\n"
    )
