"""`tailrace train`: one live run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tailrace.config import LiveConfig, load_config
from tailrace.drivers.assembly.running import train
from tailrace.kinds import class_of


def run(
    config: Path,
    /,
    *,
    output_dir: Path,
    resume: bool = False,
    dry_run: bool = False,
    every_setting: Annotated[bool, Parameter("--all")] = False,
    replay: Path | None = None,
    verbose: bool = False,
    overrides: Mapping[str, str],
) -> None:
    """Train a model.

    Args:
        config: a TOML file.
        output_dir: for all files of the run.
        resume: continue the run in the output directory, if one has begun there.
        dry_run: check all, score a few rows as `tailrace check-reward`, print the rows, the first prompt,
            memory, the settings that differ from the defaults and the number of steps, and stop. A config for
            GPUs with [sim.cluster] is judged on a node of that.
        every_setting: of a dry run, the whole resolved config as TOML, with the processes as comments.
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
    class_of("train.dry_run")().show(loaded, every_setting=every_setting)
