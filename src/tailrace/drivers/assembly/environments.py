"""The prompts and the environment of a live run: their checks, and how samples are played."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from tailrace.config import LiveConfig, RunConfig
from tailrace.contracts.data import Prompts, Split
from tailrace.contracts.trainer import Reference
from tailrace.drivers.data.encoding import (
    CALL_MARKS,
    LEFT_OUT,
    PromptEncoder,
    Tokenizer,
    load_tokenizer,
    text_of,
)
from tailrace.drivers.data.open import open_prompts
from tailrace.drivers.environments.history import Chat, RequestEncoder
from tailrace.drivers.environments.open import environment_kind
from tailrace.drivers.environments.settings import EnvironmentSettings, EpisodeSettings
from tailrace.errors import BadRow, ConfigError
from tailrace.model_folder import context_length
from tailrace.rollout.episode import Episode
from tailrace.rollout.episodes import Episodes
from tailrace.rollout.router import RunEpisode


def check_episodes(config: LiveConfig, tokenizer: Tokenizer) -> None:
    """Check the environment before anything starts. Raises a ConfigError if it cannot be imported, the model
    has no chat template that suits it, or the data do not use the template."""
    settings = config.environment
    if not settings.has_turns:
        return
    _chat(config, tokenizer)
    kind = environment_kind(settings)
    kind.check(settings)
    tools, parser = kind.tools(settings), getattr(settings, "parser", "hermes")
    for source in config.data.sources:
        if kind.reads_template(settings) and source.chat_template == "never":
            problem = "the model reads the tools and the messages of agents through its chat template"
            raise ConfigError("data.chat_template", "never", problem, 'set it to "auto"')
        if tools:
            _check_tools(settings, PromptEncoder(source, tokenizer, tools=tools))
        if source.tools_in_system_prompt and parser != "hermes":
            problem = 'data.tools_in_system_prompt asks the model for calls in the format "hermes"'
            raise ConfigError("environment.parser", parser, problem, 'set it to "hermes"')


def _check_tools(settings: EnvironmentSettings, encoder: PromptEncoder) -> None:
    """Raises a ConfigError if the model would not see the tools."""
    try:
        encoder.encode("Why?")
    except BadRow as why:
        if why.reason == LEFT_OUT:
            problem = "the model's chat template leaves tools out, so the model would not know of them"
            remedy = "set data.tools_in_system_prompt = true, or choose a model whose template has them"
            functions = list(getattr(settings, "functions", ()))
            raise ConfigError("environment.functions", functions, problem, remedy) from why


def request_encoder(config: LiveConfig, tokenizer: Tokenizer) -> RequestEncoder:
    """Return what encodes the first requests of agents."""
    tools = environment_kind(config.environment).tools(config.environment)
    return RequestEncoder(config.data, tokenizer, context_length(config.model.path), tools)


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
    return kind.prompts(settings, prompts, partial(request_encoder, config, tokenizer))


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
    if not named or not settings.has_turns or not kind.gives_every_reward(settings):
        return None
    but = f", but for {kind.unrewarded}" if kind.unrewarded else ""
    return f"not used{but}: {named}; the environment {settings.kind!r} gives the rewards itself"


@asynccontextmanager
async def open_episodes(
    config: LiveConfig, tokenizer: Tokenizer, reference: Reference | None
) -> AsyncIterator[RunEpisode | None]:
    """Open the environment of a checked config for the length of the block; None for single turns."""
    settings, kind = config.environment, environment_kind(config.environment)
    encoder = request_encoder(config, tokenizer)
    async with kind.open(settings, tokenizer, encoder) as environment:
        if environment is None or not isinstance(settings, EpisodeSettings):
            yield None
            return
        max_branches = settings.max_branches
        sends_new = settings.history == "template" and kind.sends_new
        episode = partial(
            Episode,
            observe=_chat(config, tokenizer).observe,
            decode=text_of(tokenizer, CALL_MARKS),
            sampling=config.sampling,
            max_context_tokens=context_length(config.model.path),
            parking_timeout_s=settings.parking_timeout_s,
            max_branches=max_branches,
        )
        episodes = Episodes(
            environment,
            text_of(tokenizer),
            episode,
            max_failures=settings.max_failures,
            episode_timeout_s=settings.episode_timeout_s,
            must_reward=not (calls_reward_functions(config) or config.reward.judges or config.reward.code),
            reference=reference,
            history=(lambda prompt: encoder.history(prompt, max_branches)) if sends_new else None,
        )
        yield episodes.run


def _chat(config: LiveConfig, tokenizer: Tokenizer) -> Chat:
    first, *others = [source.chat_template_kwargs for source in config.data.sources]
    for other in others:
        if other != first:
            problem = f"another source has {first}, and the turns of all episodes are written in one way"
            raise ConfigError("data.sources.chat_template_kwargs", other, problem, "write the same in each")
    settings = config.environment
    return Chat(tokenizer, settings.kind, first, getattr(settings, "answer_role", "user"))
