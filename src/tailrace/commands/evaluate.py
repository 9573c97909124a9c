"""`tailrace eval`: held-out prompts sampled from a model and scored."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from tailrace import clock
from tailrace.algo.base import AlgorithmSettings
from tailrace.commands.live import check_live, open_parts
from tailrace.config import RunConfig
from tailrace.record.events import Recorder
from tailrace.rollout.evaluation import Evaluation, evaluate, held_out_samples
from tailrace.rollout.router import Router
from tailrace.schedules.resolve import check_parameter_names


def evaluate_model(config: RunConfig, *, json_path: Path | None = None) -> None:
    """Print the mean reward of run.eval_prompts held-out prompts, one sample each.

    Raises:
        ConfigError: the model, the data or the reward cannot work.
    """
    check_parameter_names(config)
    check_live(config)
    with TemporaryDirectory() as scratch:
        result = clock.run(_evaluate(config, Path(scratch)), virtual=False)
    n = config.run.eval_prompts
    Console().print(
        f"accuracy {result.accuracy:.4f} over {n} held-out prompts, {result.num_tokens / n:.1f} tokens each"
    )
    if json_path:
        numbers = {"accuracy": result.accuracy, "num_samples": n, "num_tokens": result.num_tokens}
        json_path.write_text(json.dumps(numbers) + "\n")


async def _evaluate(config: RunConfig, scratch: Path) -> Evaluation:
    learns_nothing = config.model_copy(update={"algorithm": AlgorithmSettings()})  # no reference, no critic
    async with open_parts(learns_nothing, scratch) as parts:
        samples = held_out_samples(parts.held_out, config.run.eval_prompts, config.run.seed, 0)
        return await evaluate(samples, Router(parts.engines, Recorder()), parts.rewards)
