"""The prompts and the environment of a live run, and whether the environment gives rewards."""

from contextlib import AbstractAsyncContextManager

from tailrace.config import LiveConfig, RunConfig
from tailrace.contracts.data import Prompts, Split
from tailrace.contracts.trainer import Reference
from tailrace.drivers.data.encoding import Tokenizer, load_tokenizer
from tailrace.drivers.data.open import open_prompts
from tailrace.drivers.environments.open import Surroundings, environment_kind
from tailrace.model_folder import context_length
from tailrace.rollout.router import RunEpisode


def check_episodes(config: LiveConfig, tokenizer: Tokenizer) -> None:
    """Check the environment before anything starts. Raises as `EnvironmentKind.check_episodes`."""
    environment = config.environment
    environment_kind(environment).check_episodes(environment, _surroundings(config, tokenizer))


def training_prompts(config: LiveConfig) -> Prompts:
    """Return the training prompts of a run. Raises as `run_prompts`."""
    return run_prompts(config, load_tokenizer(config.model.path, config.model.template_date), "train")


def run_prompts(config: LiveConfig, tokenizer: Tokenizer, split: Split) -> Prompts:
    """Return the prompts of a run, or what agents that write their own leave of them. Raises a ConfigError if
    the settings name no data that can be read."""
    settings, kind = config.environment, environment_kind(config.environment)
    context, tools = context_length(config.model.path), kind.tools(settings)
    prompts = open_prompts(
        config.data, tokenizer, seed=config.run.seed, split=split, max_context_tokens=context, tools=tools
    )
    return kind.prompts(settings, prompts, _surroundings(config, tokenizer))


def calls_reward_functions(config: RunConfig) -> bool:
    """Return whether the run has reward functions. An environment may give the rewards instead."""
    if config.data is None:
        return False
    given = config.environment.gives_rewards
    scorers = all(source.brings_scorer for source in config.data.sources)
    return config.reward.calls_functions and bool(not given or config.reward.named() or scorers)


def unused_rewards(config: RunConfig) -> str | None:
    """Return a warning if the environment makes configured rewards unused, as far as that is known."""
    settings, reward = config.environment, config.reward
    given = {
        f"reward function {reward.named()}": reward.named(),
        "reward.judges": reward.judges,
        "reward.code": reward.code,
    }
    named = " and ".join(name for name, value in given.items() if value)
    kind = environment_kind(settings)
    if not named or not kind.gives_every_reward(settings):
        return None
    but = f", but for {kind.unrewarded}" if kind.unrewarded else ""
    return f"not used{but}: {named}; the environment {settings.kind!r} gives the rewards itself"


def open_episodes(
    config: LiveConfig, tokenizer: Tokenizer, reference: Reference | None
) -> AbstractAsyncContextManager[RunEpisode | None]:
    """Open the environment of a checked config for the length of the block; None for single turns."""
    environment, rewarded = config.environment, config.reward.judges or config.reward.code
    must_reward = not (calls_reward_functions(config) or rewarded)
    run = _surroundings(config, tokenizer)
    return environment_kind(environment).play(environment, run, reference, must_reward=must_reward)


def _surroundings(config: LiveConfig, tokenizer: Tokenizer) -> Surroundings:
    return Surroundings(config.data, config.sampling, tokenizer, context_length(config.model.path))
