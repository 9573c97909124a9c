"""`tailrace fit`: a live run's own costs as the [sim] section of a config, or the profile of its engines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import tomli_w
from rich.table import Column, Table
from typing_extensions import override

from tailrace import clock
from tailrace.algo.base import AlgorithmSettings
from tailrace.config import LiveConfig
from tailrace.drivers.assembly.check import begin_start, check_live
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.open import open_parts
from tailrace.drivers.assembly.tensor_parallel import tensor_parallel_sizes
from tailrace.drivers.commands.evaluate import evaluated_config
from tailrace.drivers.commands.tables import check_output, open_console, print_table, writing
from tailrace.drivers.data.open import usable_prompts
from tailrace.drivers.kinds.base import engine_kind
from tailrace.drivers.kinds.hooks import FittedCosts
from tailrace.errors import ConfigError
from tailrace.extras.plan.fit import Fit, fit
from tailrace.extras.plan.peer_fit import fit_peer
from tailrace.extras.plan.peers import read_peer
from tailrace.rollout.profile import ProfileRow, measure
from tailrace.sim.settings import SimSettings


def fit_run(
    run: Path,
    /,
    *,
    output: Path | None = None,
    samples: int | None = None,
    max_tokens: int | None = None,
    prompt_tokens: int | None = None,
    profile: Path | None = None,
    batches: tuple[int, ...] = (1, 8, 64, 256),
    lengths: tuple[int, ...] = (),
    overrides: Mapping[str, str],
) -> None:
    """Fit a run, and print what was found; or with --profile measure the engines of its config.

    Args:
        run: its output directory, or a log of another framework of extras/plan/peers.toml: a folder, or a
            file of JSONL, CSV, TensorBoard or W&B's offline mode, what the framework printed, or
            wandb:ENTITY/PROJECT/RUN; with --profile also a config file.
        output: a file for the [sim] section; it is printed without one.
        samples: of a step, where the log of another framework does not say.
        max_tokens: the longest response, where such a log does not say.
        prompt_tokens: mean length of a prompt, where such a log does not say.
        profile: a file for the offline profile of the engines, which `placement.profile` names.
        batches: of the profile, requests that begin together.
        lengths: of the profile, tokens of each request. Default: sampling.max_completion_tokens.
    """
    check_output("--output", output, r"\A\[sim(?![^$]*\n\[(?!sim))")
    check_output("--profile", profile, r'\A\[\s*{\s*"tensor_parallel_size"')
    if profile:
        return _measure(run, profile, batches, lengths, overrides)
    for key, value in overrides.items():
        problem = "fit has no config to override without --profile"
        raise ConfigError(f"--{key}", value, problem, "remove it")
    fitted = fitted_run(run, samples, max_tokens=max_tokens, prompt_tokens=prompt_tokens)
    text = tomli_w.dumps(fitted.tree)
    console = open_console()
    print_table(console, _table(run, fitted), keep=2)
    for part in fitted.parts:
        for note in part.notes:
            console.print(f"note: {part.name}: {note}")
    if output is None:
        print(text, end="")
        return
    with writing("--output", output):
        output.write_text(text, encoding="utf-8")
    console.print(f"[sim] is in {output}")


def _measure(
    run: Path, file: Path, batches: Sequence[int], lengths: Sequence[int], overrides: Mapping[str, str]
) -> None:
    """Start the engines of a config, measure them at each tensor-parallel size, and write the rows."""
    config = LiveConfig.of(evaluated_config(run, None, overrides))
    begin_start(config)
    config = check_live(config.changed(algorithm=AlgorithmSettings())).config
    limit = config.sampling.max_completion_tokens
    lengths = lengths or (limit,)
    for key, given, most in (("--batches", batches, 2**20), ("--lengths", lengths, limit)):
        if not all(1 <= each <= most for each in given):
            remedy = f"lengths end at sampling.max_completion_tokens = {limit}"
            raise ConfigError(key, given, f"each is from 1 to {most}", remedy)
    with writing("--profile", file), TemporaryDirectory() as scratch:
        measured = _measured(config, Path(scratch), sorted(batches), sorted(lengths))
        file.write_bytes(msgspec.json.format(msgspec.json.encode(clock.run(measured, virtual=False))))


async def _measured(
    config: LiveConfig, scratch: Path, batches: Sequence[int], lengths: Sequence[int]
) -> list[ProfileRow]:
    smallest, console = config.engine.num_devices, open_console()
    sizes = tensor_parallel_sizes(config.placement, smallest, config.engine.num_engines)
    settle_s = engine_kind(config).settle_s
    async with open_parts(config, scratch) as parts:
        prompts = usable_prompts(parts.prompts, batches[-1])
        rows = []
        async for row in measure(parts.engines, smallest, sizes, batches, lengths, prompts, settle_s):
            rows.append(row)
            console.print(str(row))
    return rows


class FittedSim(FittedCosts):
    """[sim] that `simulate --like` takes."""

    @override
    def sim(self, run: Path) -> SimSettings:
        return fitted_run(run).sim


def fitted_run(path: Path, samples: int | None = None, **given: float | None) -> Fit:
    """Fit a run, or the log of another framework, with what the log does not say (`read_peer`). Raises a
    ConfigError if there is none, or one of its files is damaged."""
    folder = RunFolder(path)
    if not folder.samples.is_dir():
        folder.check_wrote("samples", "train")
    if not folder.config.exists():
        return fit_peer(read_peer(path, samples, **given))
    config = folder.read_config()
    if config.run.replay:
        remedy = f"name the run that it trained again: {config.run.replay}"
        raise ConfigError("RUN", str(path), "a replay generates nothing", remedy)
    workers = config.reward.workers if config.model else config.sim.rewards.workers
    return fit(folder.events, folder.metrics, folder.samples, workers)


def _table(path: Path, fitted: Fit) -> Table:
    table = Table("fitted", Column("parameter of [sim]", no_wrap=True), title=f"fit of {path}")
    for name in ("value", "observed", "explained"):
        table.add_column(name, justify="right")
    table.title_justify = "left"
    table.caption = "explained: share of the variance"
    for part in fitted.parts:
        once = [part.name, f"{part.observations:,}", _cell(part.explained, "{:.1%}")]
        for key, value in part.values.items():
            table.add_row(once[0], key.removeprefix("sim."), _cell(value, "{:.4g}"), *once[1:])
            once = ["", "", ""]
    return table


def _cell(value: object, form: str) -> str:
    match value:
        case None:
            return ""
        case float():
            return form.format(value)
        case dict():
            return str(value["kind"])
        case _:
            return str(value)
