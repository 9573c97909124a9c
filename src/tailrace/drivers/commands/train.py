"""`tailrace train`: one live run."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path

from tailrace.config import LiveConfig, load_config
from tailrace.drivers.assembly.check import check_live
from tailrace.drivers.assembly.machine import Machine, uses_gpu
from tailrace.drivers.assembly.running import recorded_run, train
from tailrace.drivers.assembly.schedule import resolve
from tailrace.drivers.kinds.hooks import RewardAudit
from tailrace.errors import say
from tailrace.kinds import built_in, kind_of


def run(
    config: Path,
    /,
    *,
    output_dir: Path,
    resume: bool = False,
    dry_run: bool = False,
    replay: Path | None = None,
    verbose: bool = False,
    overrides: Mapping[str, str],
) -> None:
    """Train a model.

    Args:
        config: a TOML file.
        output_dir: for all files of the run.
        resume: continue the run in the output directory, if one has begun there.
        dry_run: score a few rows as `tailrace check-reward`, print the resolved config, with a table of the
            processes as comments, and stop. A config for GPUs with [sim.cluster] is judged on a node of that.
        replay: a run whose recorded samples are trained again, without engines: with another loss, learning
            rate or number of groups a step, or with the same to the same gradients.
        verbose: print every figure of a step, in a line of any width.
    """
    if verbose:
        overrides = {**overrides, "record.verbose": "true"}
    if replay:
        overrides = {**overrides, "run.replay": json.dumps(str(replay.resolve()))}
    if not dry_run:
        train(load_config(config, overrides), output_dir, resume=resume)
        return
    loaded = LiveConfig.of(load_config(config, overrides))
    if recording := recorded_run(loaded):
        fitted = recording.check(loaded)
    else:
        cluster = loaded.sim.cluster if uses_gpu(loaded) else None
        machine = Machine.of(cluster) if cluster else None
        if machine:
            say(f"devices and memory are judged on {machine.name}, not on this machine")
        fitted = check_live(loaded, resolve(loaded), machine=machine)
        if "audit" in built_in("reward"):
            audit: RewardAudit = kind_of("reward", "audit")
            for fault in audit.faults(fitted.config):
                say(f"warning: {fault}")
    print(fitted.config.toml(), end="")
    print(textwrap.indent(fitted.table, "# "))
