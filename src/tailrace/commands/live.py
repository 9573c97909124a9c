"""The parts of a live run: data read, worker processes started."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from tailrace.algo.compute_advantages import ComputeAdvantages
from tailrace.config import RunConfig, require_sections
from tailrace.controller.base import Parts
from tailrace.data.base import Prompts, Split
from tailrace.data.lengths import check_lengths
from tailrace.data.open import open_prompts
from tailrace.data.tokenizer import Tokenizer, load_tokenizer
from tailrace.engine.native.support import check_model
from tailrace.errors import ConfigError
from tailrace.reward.functions import Scorer
from tailrace.workers.base import left_to_the_trainer, plan_pins
from tailrace.workers.local import open_local


def check_live(config: RunConfig) -> None:
    """Whatever can be known to be wrong without starting a process.

    Raises:
        ConfigError: a section is missing; the model, the data or the reward cannot work.
    """
    require_sections(config, "model", "data", "sampling")
    assert config.model and config.data and config.sampling
    check_model(config.model.path)
    max_context_tokens = context_length(config.model.path)
    if max_context_tokens is not None:
        check_lengths(
            max_context_tokens=max_context_tokens,
            max_completion_tokens=config.sampling.max_completion_tokens,
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
    tokenizer = load_tokenizer(config.model.path)
    _open_prompts(config, tokenizer, config.run.seed, "train")
    _open_prompts(config, tokenizer, config.run.seed, "eval")
    Scorer.load(config.reward, config.data).close()
    plan_pins(config.host, config.engine.replicas)
    _check_lending(config)


def _check_lending(config: RunConfig) -> None:
    if not config.host.lend:
        return
    if config.host.pin or config.trainer.threads > 1 or config.trainer.device != "cpu":
        problem = "only a trainer of one thread on a CPU, and on no fixed one, can use the engines' as well"
        raise ConfigError("host.lend", True, problem, "switch it off, or change host.pin or [trainer]")
    if config.algorithm.advantage == "gae" or config.algorithm.old_policy == "recomputed":
        problem = "helpers have no critic and no old policy"
        raise ConfigError("host.lend", True, problem, "switch it off, or change [algorithm]")


def training_prompts(config: RunConfig, seed: int) -> Prompts:
    """The prompts of a live config in the order that a seed fixes.

    Raises:
        ConfigError: the settings name no data that can be read.
    """
    assert config.model
    return _open_prompts(config, load_tokenizer(config.model.path), seed, "train")


def _open_prompts(config: RunConfig, tokenizer: Tokenizer, seed: int, split: Split) -> Prompts:
    assert config.model and config.data
    return open_prompts(
        config.data,
        tokenizer,
        seed=seed,
        split=split,
        max_context_tokens=context_length(config.model.path),
    )


def context_length(path: Path) -> int | None:
    """Return the positions of the model in a folder, or None where its config.json does not tell."""
    length = json.loads((path / "config.json").read_text()).get("max_position_embeddings")
    return length if isinstance(length, int) else None


async def rewind(parts: Parts, folder: Path, version: int) -> None:
    """The trainer and the engines as they were when the trainer was saved in `folder`."""
    await parts.trainer.restore(folder)
    weights = await parts.trainer.publish(version)
    await asyncio.gather(*(engine.load(weights, kv="recompute") for engine in parts.engines))


def advantages_of(config: RunConfig) -> ComputeAdvantages:
    """What the algorithm makes of a judged group, completions being as long as they may be sampled."""
    assert config.sampling
    return ComputeAdvantages(config.algorithm, config.sampling.max_completion_tokens)


@asynccontextmanager
async def open_parts(config: RunConfig, folder: Path, *, life: int | None = None) -> AsyncIterator[Parts]:
    """Start the workers of a checked config and end them with the block; logs go into the folder. life: of a
    run whose engines are to leave their counts there."""
    assert config.model and config.data and config.sampling
    tokenizer = load_tokenizer(config.model.path)
    pins = plan_pins(config.host, config.engine.replicas)
    workers = open_local(
        config.model.path,
        engine=config.engine,
        sampling=config.sampling,
        algorithm=config.algorithm,
        trainer=config.trainer,
        reward=config.reward,
        data=config.data,
        tokenizer=tokenizer,
        folder=folder,
        life=life,
        pins=pins,
        lend=config.host.lend,
    )
    with left_to_the_trainer(pins):
        async with workers as opened:
            parts = Parts(
                engines=opened.engines,
                trainer=opened.trainer,
                rewards=opened.rewards,
                prompts=_open_prompts(config, tokenizer, config.run.seed, "train"),
                held_out=_open_prompts(config, tokenizer, config.run.seed, "eval"),
                reference=opened.reference,
            )
            with _seldom_collected():
                yield parts


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Python's collector of cycles looks at what is loaded never again, and at what a run makes less often:
    an eighth of the controller's time went into it. Without it nothing would be freed that refers to itself,
    as groups do by their samples."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(10_000, 5, 2)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
