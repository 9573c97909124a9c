"""`tailrace eval`: completes held-out prompts with a model and scores them.

Prompts are the units of what is said (`intervals.py`). The base model has the same prompts and noise, so the
gain is taken prompt by prompt.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter

from tailrace import clock
from tailrace.algo.base import AlgorithmSettings
from tailrace.config import LiveConfig, ModelSettings, RunConfig, changed_keys, load_config
from tailrace.controller.checkpoints import checkpoint_name
from tailrace.drivers.assembly.check import begin_start, check_live
from tailrace.drivers.assembly.display import sample_line
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.open import open_parts
from tailrace.drivers.assembly.results import EvaluationSummary
from tailrace.drivers.assembly.resumption import best_evaluation, changed_files, inputs_of
from tailrace.drivers.assembly.schedule import check_parameter_names
from tailrace.drivers.commands.intervals import by_prompt, estimate_of, half_width
from tailrace.drivers.commands.tables import check_output, open_console
from tailrace.errors import ConfigError, say
from tailrace.ledger.base import LifeRow
from tailrace.ledger.store import LEDGER_FILE, open_store
from tailrace.record.events import EvaluatedSample, Recorder
from tailrace.record.metrics import read_rows
from tailrace.rollout.evaluation import evaluate, held_out_samples, metrics_of_sets, solved_share
from tailrace.rollout.router import Router


def run(
    run: Path,
    /,
    *,
    model: Path | None = None,
    checkpoint: str = "newest",
    base: bool = False,
    prompts: int | None = None,
    samples: int | None = None,
    json_path: Annotated[Path | None, Parameter("--json")] = None,
    overrides: Mapping[str, str],
) -> EvaluationSummary:
    """Print the mean reward of held-out prompts with its 95% interval, and the first samples.

    Args:
        run: the output directory of a run, or a config file.
        model: a Hugging Face folder or a run with the weights, instead of a checkpoint or model.path.
        checkpoint: of a run: newest, best (of its evaluations), base (that it began with), or a name.
        base: evaluate the base, too, and say what was gained.
        prompts: instead of run.eval_prompts.
        samples: of each prompt, sampled: pass@k and avg@n. Instead of run.eval_samples.
        json_path: a file for these numbers.
    """
    check_output("--json", json_path, r'\A{"(reward|accuracy)": ')
    named = {"eval_prompts": prompts, "eval_samples": samples, "eval_greedy": samples and samples == 1}
    given = {f"run.{key}": json.dumps(value) for key, value in named.items() if value is not None}
    overrides = {**overrides, **given}
    config = LiveConfig.of(evaluated_config(run, model, overrides, checkpoint))
    bases = [LiveConfig.of(evaluated_config(run, None, overrides, "base"))] if base else []
    result, *others = map(_result, (config, *bases))
    console = open_console()
    n, how = len(result), "greedy" if config.run.eval_greedy else "sampled"
    estimate, num_tokens = estimate_of(rewards_of(result)), sum(each.num_tokens for each in result)
    console.print(f"weights   {config.model.path}")
    reward = f"{estimate.mean:.4f} over {estimate.num_prompts} held-out prompts, {how}, {estimate}"
    console.print(f"reward    {reward}; {num_tokens / n:.1f} tokens each", soft_wrap=False)
    solved, solved_at = solved_share(result, config.run.eval_solved_at), config.run.eval_solved_at
    console.print(f"solved    {solved:.1%} of {n} samples have a reward of at least {solved_at:g}")
    for other in others:
        console.print(f"gain      {gain_over(rewards_of(other), rewards_of(result))}", soft_wrap=False)
    sets = metrics_of_sets(result, config.run.eval_solved_at)
    for name, value in sets.items():
        console.print(f"{name}  {value:.4f}")
    for number in range(0, n, config.run.eval_samples)[:3]:
        mine = result[number]
        theirs = "".join(f" | Base {other[number].text!r}" for other in others)
        console.print(sample_line(mine.prompt, mine.text, mine.reward) + theirs, soft_wrap=False)
    summary = EvaluationSummary(
        reward=estimate.mean,
        solved=solved,
        interval=estimate.interval,
        base=estimate_of(rewards_of(others[0])).mean if others else None,
        num_samples=n,
        num_tokens=num_tokens,
        model=str(config.model.path),
        greedy=config.run.eval_greedy,
        sets=sets,
    )
    if json_path:
        json_path.write_text(json.dumps(asdict(summary)) + "\n", encoding="utf-8")
    return summary


def _result(config: LiveConfig) -> list[EvaluatedSample]:
    begin_start(config)
    changed = config.changed(algorithm=AlgorithmSettings(), run={"eval_every": 1})  # no reference, no critic
    config = check_live(changed).config
    with TemporaryDirectory() as scratch:
        return clock.run(_evaluate(config, Path(scratch)), virtual=False)


def rewards_of(samples: Iterable[EvaluatedSample]) -> list[list[float]]:
    """The rewards of each prompt."""
    return by_prompt((sample.id.prompt, sample.reward) for sample in samples)


def gain_over(base: Sequence[Sequence[float]], result: Sequence[Sequence[float]]) -> str:
    """Say what the same prompts gain over the base model."""
    gains = [fmean(mine) - fmean(theirs) for mine, theirs in zip(result, base, strict=True)]
    over = f"over the base model ({estimate_of(base).mean:.4f})"
    if len(gains) == 1:
        return f"{gains[0]:+.3f} {over}: one prompt: no interval"
    half, over = half_width(gains), f"{fmean(gains):+.3f} ±{half_width(gains):.3f} {over}"
    return over if abs(fmean(gains)) > half else f"{over}: so many prompts show no difference"


def evaluated_config(
    path: Path, model: Path | None, overrides: Mapping[str, str], checkpoint: str = "newest"
) -> RunConfig:
    """Read the config of an evaluation. Raises a ConfigError if it is bad or the run has no checkpoint.

    Args:
        path: a config file, or the output directory of a run: then the model is a checkpoint of it.
        checkpoint: as in `run`.
        model: a Hugging Face folder to evaluate in place of that model.
    """
    if path.is_dir():
        folder = RunFolder(path)
        _check_config(folder)
        config = folder.read_config(overrides)
        if not model and "model.path" not in overrides and checkpoint != "base":
            model = _checkpoint(folder, checkpoint)
            if model is None:
                folder.check_wrote("a checkpoint", "train", "sft")
                problem = "the run has no checkpoint yet"
                raise ConfigError("RUN", str(path), problem, "name weights with --model")
    else:
        config = load_config(path, overrides)
        check_parameter_names(config)
    if model is None:
        return config
    return config.changed(model=(config.model or ModelSettings(path=model)).changed(path=model.resolve()))


def _checkpoint(folder: RunFolder, name: str) -> Path | None:
    """A checkpoint by its name; None: the run has none. Raises a ConfigError if it is not there."""
    if name == "newest":
        return folder.newest_checkpoint()
    best = best_evaluation(read_rows(folder.metrics), folder) if name == "best" else None
    path = folder.checkpoints / (checkpoint_name(best[1]) if best else name)
    if path.is_dir():
        return path
    there = ", ".join(sorted(each.name for each in folder.checkpoints.glob("round_*")))
    problem = "no evaluation of the run has a checkpoint" if name == "best" else "there is no such checkpoint"
    raise ConfigError("--checkpoint", name, problem, f"choose from newest, {there}")


def _check_config(folder: RunFolder) -> None:
    """Raises a ConfigError if the config of a run is not the one that its ledger has."""
    config = folder.read_config()
    if not config.ledger.is_stored or not (folder.path / LEDGER_FILE).exists():
        return
    with closing(open_store(config.ledger, folder.path, only_read=True)) as store:
        *_, last = store.rows(LifeRow)
    for key, (before, after) in changed_keys(last.config, config).items():
        problem = f"{folder.config} was changed: the run has {before!r} in its ledger"
        raise ConfigError(key, after, problem, f"change it back; --{key} on the command line overrides it")
    if changed := changed_files(last.inputs, last.inputs | inputs_of(config, folder)):
        say(f"warning: the run was trained with another content of {changed}")


async def _evaluate(config: LiveConfig, scratch: Path) -> list[EvaluatedSample]:
    async with open_parts(config, scratch) as parts:
        asked = (parts.held_out, config.run.eval_prompts, config.run.seed, 0)
        samples = held_out_samples(*asked, **config.run.eval_sampling)
        return await evaluate(samples, Router(parts.engines, Recorder(), parts.run_episode), parts.rewards)
