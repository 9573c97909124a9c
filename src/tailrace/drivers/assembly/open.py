"""Opens the parts of a live run: worker processes, prompts, rewards and the environment."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tailrace.config import LiveConfig, RunConfig
from tailrace.contracts.engine import Engine
from tailrace.contracts.reward import Rewards
from tailrace.controller.base import RunComponents
from tailrace.drivers.assembly.environments import open_episodes, run_prompts
from tailrace.drivers.assembly.placement import device_sharing, prices_of
from tailrace.drivers.assembly.workers import open_reward_workers, open_workers
from tailrace.drivers.data.encoding import Tokenizer, load_tokenizer, text_of
from tailrace.drivers.data.open import first_of_each_source
from tailrace.drivers.reward.calls import column_of
from tailrace.drivers.reward.functions import Scorer
from tailrace.drivers.reward.kinds import Judge, NoFunctions, WithJudges
from tailrace.drivers.workers.reward import RewardPool
from tailrace.errors import ConfigError, say
from tailrace.kinds import kind_of
from tailrace.rollout.reward_timeout import Anchors
from tailrace.types import Prompt


@asynccontextmanager
async def open_parts(
    config: LiveConfig, folder: Path, *, life: int | None = None
) -> AsyncIterator[RunComponents]:
    """Start the workers of a checked config, score one row, and end the workers with the block.

    Args:
        folder: receives the workers' logs.
        life: number of the run's life; the engines then keep their token counts in the folder.

    Raises:
        ConfigError: a worker cannot do its job, or the reward function is defective.
        WorkerDied: a worker ended.
    """
    tokenizer, anchors = load_tokenizer(config.model.path, config.model.template_date), Anchors()
    async with open_workers(config, folder, tokenizer, life=life) as opened:
        _check_capabilities(config, opened.engines)
        prompts = run_prompts(config, tokenizer, "train")
        checked = first_of_each_source(prompts)
        rewards = await _scorers(config, opened.rewards, opened.judges, checked, anchors, tokenizer)
        async with open_episodes(config, tokenizer, opened.reference) as run_episode:
            yield RunComponents(
                engines=opened.engines,
                trainer=opened.trainer,
                rewards=rewards,
                prompts=prompts,
                held_out=run_prompts(config, tokenizer, "eval"),
                reference=opened.reference,
                sharing=device_sharing(config),
                anchors=anchors,
                synchronous_rewards=config.reward.synchronous,
                run_episode=run_episode,
                prices=prices_of(config),
            )


@asynccontextmanager
async def open_scorers(config: LiveConfig, folder: Path) -> AsyncIterator[Rewards]:
    """Start what scores the samples of a checked config, and end it with the block. Raises as
    `open_parts`. `folder`: receives the workers' logs."""
    tokenizer = load_tokenizer(config.model.path)
    async with open_reward_workers(config, folder, tokenizer) as (functions, judges):
        yield await _scorers(config, functions, judges, (), Anchors(), tokenizer)


def _check_capabilities(config: RunConfig, engines: Sequence[Engine]) -> None:
    """Raises a ConfigError if the placement or the evaluations need what an engine cannot do."""
    if inexact := [engine.name for engine in engines if not engine.capabilities.exact_versions]:
        problem = f"{', '.join(inexact)} cannot say which weights generated a token"
        effect = "after an update in flight, some tokens may count as one version newer than they are"
        say(f"warning: {problem}: {effect}; update the server")
    probed = "probe_every" in config.weights.model_fields_set and config.weights.probe_every
    mute = next((engine.name for engine in engines if not engine.capabilities.scores), None)
    if probed and mute:
        problem = f"{mute} cannot prove that weights have arrived: it does not score a given sequence"
        remedy = "set it to 0; the embedded engine can, and vLLM with sampling.temperature = 1"
        raise ConfigError("weights.probe_every", config.weights.probe_every, problem, remedy)
    whole = next((engine.name for engine in engines if not engine.capabilities.top_p), None)
    if config.run.eval_top_p is not None and whole:
        problem = f"{whole} takes no top-p of a request's own"
        remedy = "remove it; the embedded engine can, vLLM, SGLang and Tinker"
        raise ConfigError("run.eval_top_p", config.run.eval_top_p, problem, remedy)
    awake = next((engine.name for engine in engines if not engine.capabilities.sleep), None)
    if awake and config.placement.takes_turns:
        problem = f"{awake} cannot give the memory of its devices back"
        remedy = 'add "--enable-sleep-mode" to engine.args of vLLM, or write "disaggregated"'
        raise ConfigError("placement.kind", config.placement.kind, problem, remedy)


async def _scorers(
    config: LiveConfig,
    functions: RewardPool | None,
    judges: Sequence[Judge],
    checked: Sequence[Prompt],
    anchors: Anchors,
    tokenizer: Tokenizer,
) -> Rewards:
    """Open the scorers of samples: reward functions, programs in place of them, judges beside them. The
    functions score the `checked` rows, if one is called, and an empty program runs in the sandbox."""
    code, text = config.reward.code, text_of(tokenizer)
    if functions:
        understood = Scorer.load(config.reward, config.data).describe()
        for prompt in checked:
            if code and column_of(prompt.row, code.column) is not None:
                continue
            if warning := await functions.check_one_row(prompt, understood):
                say(f"warning: {warning}")
    scorers: Rewards = functions or NoFunctions()
    if code:
        others = scorers if functions or config.reward.judges else None
        scorers = await kind_of("reward", "code").open(config.reward, anchors, text, others)
    if judges:
        scorers = WithJudges(scorers, judges, text, drop_timeouts=config.reward.on_timeout == "drop")
    return scorers
