"""The environment of a live run: its checks, and how it plays samples."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tailrace.config import RunConfig
from tailrace.contracts.data import Prompts
from tailrace.contracts.trainer import Reference
from tailrace.drivers.data.encoding import LEFT_OUT, PromptEncoder, Tokenizer, text_of
from tailrace.drivers.data.settings import ProceduralSettings, sources_of
from tailrace.drivers.environments.open import (
    check_environment,
    gives_every_reward,
    open_environment,
    tools_of,
)
from tailrace.drivers.environments.settings import (
    AgentSettings,
    EpisodeSettings,
    PythonSettings,
    ToolsSettings,
    VerifiersSettings,
)
from tailrace.errors import BadRow, ConfigError
from tailrace.extras.agents.history import AgentPrompts, Chat, RequestEncoder
from tailrace.model_folder import context_length
from tailrace.rollout.episodes import Episodes
from tailrace.rollout.router import RunEpisode


def check_episodes(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Check the environment before anything starts. Raises a ConfigError if it cannot be imported, the model
    has no chat template that suits it, or the data do not use the template."""
    if not isinstance(config.environment, EpisodeSettings):
        return
    _chat(config, tokenizer)
    settings = config.environment
    check_environment(settings)
    assert config.data
    for source in sources_of(config.data):
        needs_template = isinstance(settings, ToolsSettings) or _begins_with_data(settings)
        if needs_template and source.chat_template == "never":
            problem = "the model reads the tools and the messages of agents through its chat template"
            raise ConfigError("data.chat_template", "never", problem, 'set it to "auto"')
        if isinstance(settings, ToolsSettings):
            _check_tools(settings, PromptEncoder(source, tokenizer, tools=tools_of(settings)))
        parser = "hermes" if isinstance(settings, PythonSettings) else settings.parser
        if source.tools_in_system_prompt and parser != "hermes":
            problem = 'data.tools_in_system_prompt asks the model for calls in the format "hermes"'
            raise ConfigError("environment.parser", parser, problem, 'set it to "hermes"')


def _check_tools(settings: ToolsSettings, encoder: PromptEncoder) -> None:
    """Raises a ConfigError if the model would not see the tools."""
    try:
        encoder.encode("Why?")
    except BadRow as why:
        if why.reason == LEFT_OUT:
            problem = "the model's chat template leaves tools out, so the model would not know of them"
            remedy = "set data.tools_in_system_prompt = true, or choose a model whose template has them"
            raise ConfigError("environment.functions", list(settings.functions), problem, remedy) from why


def request_encoder(config: RunConfig, tokenizer: Tokenizer) -> RequestEncoder:
    """Return what encodes the first requests of agents."""
    assert config.model and config.data
    tools = tools_of(config.environment)
    return RequestEncoder(config.data, tokenizer, context_length(config.model.path), tools)


def prompts_of_episodes(config: RunConfig, tokenizer: Tokenizer, prompts: Prompts) -> Prompts:
    """Return the prompts, or what agents that write their own leave of them."""
    settings = config.environment
    if not isinstance(settings, AgentSettings | VerifiersSettings) or _begins_with_data(settings):
        return prompts
    return AgentPrompts(prompts, request_encoder(config, tokenizer).start())


def calls_reward_functions(config: RunConfig) -> bool:
    """Return whether the run has reward functions. An environment may give the rewards instead."""
    if config.data is None:
        return False
    given = isinstance(config.environment, EpisodeSettings) and config.environment.gives_rewards
    scorers = all(isinstance(source, ProceduralSettings) for source in sources_of(config.data))
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
    if not named or not isinstance(settings, EpisodeSettings) or not gives_every_reward(settings):
        return None
    but = ", but for episodes that end because no room is left" if isinstance(settings, AgentSettings) else ""
    return f"not used{but}: {named}; the environment {settings.kind!r} gives the rewards itself"


@asynccontextmanager
async def open_episodes(
    config: RunConfig, tokenizer: Tokenizer, reference: Reference | None
) -> AsyncIterator[RunEpisode | None]:
    """Open the environment of a checked config for the length of the block; None for single turns."""
    settings = config.environment
    encoder = request_encoder(config, tokenizer)
    async with open_environment(settings, tokenizer, encoder) as environment:
        if environment is None or not isinstance(settings, EpisodeSettings):
            yield None
            return
        assert config.model and config.sampling
        max_branches = settings.max_branches
        # Agents and tasksets send whole conversations, which they compare themselves.
        sends_new = settings.history == "template" and isinstance(settings, ToolsSettings | PythonSettings)
        episodes = Episodes(
            environment,
            _chat(config, tokenizer).observe,
            text_of(tokenizer),
            config.sampling,
            max_context_tokens=context_length(config.model.path),
            parking_timeout_s=settings.parking_timeout_s,
            max_failures=settings.max_failures,
            episode_timeout_s=settings.episode_timeout_s,
            must_reward=not (calls_reward_functions(config) or config.reward.judges or config.reward.code),
            reference=reference,
            max_branches=max_branches,
            history=(lambda prompt: encoder.history(prompt, max_branches)) if sends_new else None,
        )
        yield episodes.run


def _begins_with_data(settings: EpisodeSettings) -> bool:
    return isinstance(settings, AgentSettings) and settings.prompt == "data"


def _chat(config: RunConfig, tokenizer: Tokenizer) -> Chat:
    assert config.data
    first, *others = [source.chat_template_kwargs for source in sources_of(config.data)]
    for other in others:
        if other != first:
            problem = f"another source has {first}, and the turns of all episodes are written in one way"
            raise ConfigError("data.sources.chat_template_kwargs", other, problem, "write the same in each")
    settings = config.environment
    role = settings.answer_role if isinstance(settings, ToolsSettings) else "user"
    return Chat(tokenizer, settings.kind, first, role)
