"""`tailrace train --dry-run`: all checks of a run, and in few lines what it would read, need and do."""

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

from rich.console import Console

from tailrace.config import LiveConfig, RunConfig, leaves
from tailrace.drivers.assembly.check import check_live
from tailrace.drivers.assembly.disk import disk_need
from tailrace.drivers.assembly.environments import run_prompts
from tailrace.drivers.assembly.machine import Fitted, Machine, uses_gpu
from tailrace.drivers.assembly.running import recorded_run
from tailrace.drivers.assembly.schedule import BoundSchedule, resolve, steps_of_a_round
from tailrace.drivers.commands.tables import open_console
from tailrace.drivers.data.encoding import load_tokenizer
from tailrace.drivers.data.open import usable_prompts
from tailrace.drivers.kinds.hooks import RewardAudit
from tailrace.errors import say
from tailrace.kinds import built_in, kind_of

LABEL = 10
"""Columns of a label."""
_toml = partial(json.dumps, ensure_ascii=False)
"""Writes a text, a number or a list, which TOML has as JSON."""
MAX_LETTERS, MAX_LINES = 480, 9
"""Length of the prompt that is shown, at most."""


class DryRun:
    """Hook train.dry_run. A run that trains does not import it."""

    def show(self, loaded: LiveConfig, *, every_setting: bool) -> None:
        """Check a config, and print what its run would do.

        Args:
            every_setting: print the resolved config, with a table of the processes as comments.
        """
        schedule: BoundSchedule | None = None
        audit: RewardAudit | None = kind_of("reward", "audit") if "audit" in built_in("reward") else None
        if recording := recorded_run(loaded):
            fitted, faults = recording.check(loaded), []
        else:
            cluster = loaded.sim.cluster if uses_gpu(loaded) else None
            machine = Machine.of(cluster) if cluster else None
            if machine:
                say(f"devices and memory are judged on {machine.name}, not on this machine")
            schedule = resolve(loaded)
            fitted = check_live(loaded, schedule, machine=machine)
            faults = [*audit.faults(fitted.config)] if audit else []
            for fault in faults:
                say(f"warning: {fault}")
        if every_setting:
            print(fitted.config.toml(), end="")
            print(textwrap.indent(fitted.table, "# "))
            return
        console, warned = open_console(), len(faults) + len(fitted.remarks) + bool(fitted.warning)
        for label, text in _lines(loaded, fitted, audit, schedule):
            print_entry(console, label, text)
        ready = f"ready, with {warned} warning{'s' * (warned > 1)}" if warned else "ready"
        print_entry(console, "verdict", f"{ready}: {_work(fitted.config, schedule)}")


def print_entry(console: Console, label: str, text: str) -> None:
    """Print a text beside its label, folded to the width of the console."""
    width = max(20, console.width - LABEL)
    folded = [piece for line in text.splitlines() for piece in textwrap.wrap(line, width) or [""]]
    for number, line in enumerate(folded or [""]):
        console.out(f"{label if number == 0 else '':{LABEL}}{line}", highlight=False)


def _lines(
    loaded: LiveConfig, fitted: Fitted[LiveConfig], audit: RewardAudit | None, schedule: BoundSchedule | None
) -> Iterator[tuple[str, str]]:
    """Yield a label and a text for each thing that a user looks at before a run."""
    config = fitted.config
    if schedule:  # a replay draws no prompts
        tokenizer = load_tokenizer(config.model.path, config.model.template_date)
        train, held_out = (run_prompts(config, tokenizer, split) for split in ("train", "eval"))
        yield "rows", f"{_number(train)} to train on, {_number(held_out)} held out"
        prompt = usable_prompts(train, 1)[0]
        yield "prompt", f"{_shortened(prompt.text)}\n({len(prompt.ids):,} tokens, the first that is drawn)"
        answers = audit.right_answers(config, prompt.row) if audit else []
        unknown = f"not known; the row has {', '.join(prompt.row)} (tailrace check-reward --column NAME)"
        yield "answer", _shortened(" or ".join(answers)) if answers else unknown
    if fitted.memory:
        yield "memory", fitted.memory
    yield "disk", disk_need(config).words()
    written = dict(leaves(loaded.model_dump(mode="json")))
    chosen = [pair for pair in leaves(config.model_dump(mode="json")) if pair[1] != written.get(pair[0])]
    if chosen:
        yield "chosen", ", ".join(f"{key} = {_toml(value)}" for key, value in chosen)
    sections = defaultdict[str, list[str]](list)
    for key, value in differing(loaded).items():
        section, _, name = key.partition(".")
        sections[section].append(f"{name} = {_toml(value)}")
    listed = (f"[{section}] {', '.join(each)}" for section, each in sections.items())
    yield "settings", "\n".join(["those that differ from the defaults; --all prints every one", *listed])


def differing(config: RunConfig) -> dict[str, Any]:
    """Return the settings that differ from the defaults, by dotted key, and the kind of each section that is
    not of the default kind."""
    found = dict(leaves(config.model_dump(mode="json", exclude_defaults=True)))
    for name in type(config).model_fields:
        for tag in ("kind", "transport"):
            kind = getattr(getattr(config, name), tag, None)
            if kind != getattr(RunConfig.model_fields[name].default, tag, None):
                found = {f"{name}.{tag}": kind, **found}
    order = [*type(config).model_fields]
    return {key: found[key] for key in sorted(found, key=lambda key: order.index(key.partition(".")[0]))}


def _work(config: LiveConfig, schedule: BoundSchedule | None) -> str:
    """Say how many optimizer steps a run makes, and of how many samples."""
    rounds = config.run.rounds
    if schedule is None:
        return "the samples of the recorded run are trained again"
    if not (steps := steps_of_a_round(config, schedule)):
        return f"{rounds:,} rounds, of different numbers of steps"
    groups = schedule.keywords.get("groups_per_step", schedule.keywords.get("groups_per_round"))
    samples = f" of {groups * config.run.num_trained:,} samples" if isinstance(groups, int) else ""
    return f"{rounds:,} rounds = {rounds * steps:,} steps{samples}"


def _number(prompts: object) -> str:
    """The number of different prompts, where they end."""
    number: int | None = getattr(prompts, "num_rows", None)
    return "without end" if number is None else f"{number:,}"


def _shortened(text: str) -> str:
    """The beginning and the end of a long text."""
    if len(text) > MAX_LETTERS:
        text = f"{text[: MAX_LETTERS // 2]} [...] {text[-MAX_LETTERS // 2 :]}"
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES // 2], "[...]", *lines[-(MAX_LINES // 2) :]]
    return "\n".join(lines)
