"""`tailrace eval`: completes held-out prompts with a model and scores them."""

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter

from tailrace import clock
from tailrace.algo.base import AlgorithmSettings
from tailrace.config import ModelSettings, RunConfig, changed_keys, load_config, with_model_folder
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.live import begin_start, check_live, open_parts
from tailrace.drivers.assembly.resumption import changed_files, inputs_of
from tailrace.drivers.assembly.schedule import check_parameter_names
from tailrace.drivers.commands.tables import check_output, open_console
from tailrace.errors import ConfigError, say
from tailrace.ledger.base import LifeRow
from tailrace.ledger.store import LEDGER_FILE, open_store
from tailrace.record.events import Recorder
from tailrace.rollout.evaluation import Evaluation, evaluate, held_out_samples, metrics_of_sets
from tailrace.rollout.router import Router


def run(
    run: Path,
    /,
    *,
    model: Path | None = None,
    json_path: Annotated[Path | None, Parameter("--json")] = None,
    overrides: Mapping[str, str],
) -> None:
    """Print which weights are evaluated, and the mean reward of run.eval_prompts held-out prompts.

    Args:
        run: the output directory of a run, or a config file.
        model: a Hugging Face folder with the weights, instead of the newest checkpoint or model.path.
        json_path: a file for the accuracy.
    """
    check_output("--json", json_path)
    without_learning = {"algorithm": AlgorithmSettings()}  # no reference, no critic
    config = with_model_folder(evaluated_config(run, model, overrides))
    begin_start(config)
    config = check_live(config.model_copy(update=without_learning)).config
    assert config.model
    console = open_console()
    console.print(f"weights   {config.model.path}")
    with TemporaryDirectory() as scratch:
        result = clock.run(_evaluate(config, Path(scratch)), virtual=False)
    prompts, how = config.run.eval_prompts, "greedy" if config.run.eval_greedy else "sampled"
    n = prompts * config.run.eval_samples
    mean = result.num_tokens / n
    console.print(
        f"accuracy  {result.accuracy:.4f} over {prompts} held-out prompts, {how}, {mean:.1f} tokens each"
    )
    sets = metrics_of_sets(result.samples, config.run.eval_solved_at)
    for name, value in sets.items():
        console.print(f"{name}  {value:.4f}")
    if json_path:
        numbers = {
            "accuracy": result.accuracy,
            "num_samples": n,
            "num_tokens": result.num_tokens,
            "model": str(config.model.path),
            "greedy": config.run.eval_greedy,
            "sets": sets,
        }
        json_path.write_text(json.dumps(numbers) + "\n", encoding="utf-8")


def evaluated_config(path: Path, model: Path | None, overrides: Mapping[str, str]) -> RunConfig:
    """Read the config of an evaluation. Raises a ConfigError if it is bad or the run has no checkpoint.

    Args:
        path: a config file, or the output directory of a run: then the model is its newest checkpoint.
        model: a Hugging Face folder to evaluate in place of that model.
    """
    if path.is_dir():
        folder = RunFolder(path)
        _check_config(folder)
        config = folder.read_config(overrides)
        if not model and "model.path" not in overrides:
            model = folder.newest_checkpoint()
            if model is None:
                problem = "the run has no checkpoint yet"
                raise ConfigError("RUN", str(path), problem, "name weights with --model")
    else:
        config = load_config(path, overrides)
        check_parameter_names(config)
    return config.model_copy(update={"model": ModelSettings(path=model.resolve())}) if model else config


def _check_config(folder: RunFolder) -> None:
    """Raises a ConfigError if the config of a run is not the one that its ledger has."""
    config = folder.read_config()
    if config.ledger.kind == "memory" or not (folder.path / LEDGER_FILE).exists():
        return
    with closing(open_store(config.ledger, folder.path, only_read=True)) as store:
        *_, last = store.rows(LifeRow)
    for key, (before, after) in changed_keys(last.config, config).items():
        problem = f"{folder.config} was changed: the run has {before!r} in its ledger"
        raise ConfigError(key, after, problem, f"change it back; --{key} on the command line overrides it")
    if changed := changed_files(last.inputs, last.inputs | inputs_of(config)):
        say(f"warning: the run was trained with another content of {changed}")


async def _evaluate(config: RunConfig, scratch: Path) -> Evaluation:
    async with open_parts(config, scratch) as parts:
        asked = (parts.held_out, config.run.eval_prompts, config.run.seed, 0)
        samples = held_out_samples(*asked, **config.run.eval_sampling)
        return await evaluate(samples, Router(parts.engines, Recorder(), parts.run_episode), parts.rewards)
