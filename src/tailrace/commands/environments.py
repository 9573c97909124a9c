"""The environment of a live run: its checks, and how it plays samples."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tailrace.config import RunConfig
from tailrace.data.base import ProceduralSettings, Prompts, sources_of
from tailrace.data.tokenizer import Tokenizer, text_of
from tailrace.environments.agent_prompts import AgentPrompts, RequestEncoder
from tailrace.environments.chat import Chat
from tailrace.environments.open import check_environment, open_environment
from tailrace.environments.settings import AgentSettings, EpisodeSettings, ToolsSettings
from tailrace.errors import ConfigError
from tailrace.model_folder import context_length
from tailrace.rollout.episodes import Episodes
from tailrace.rollout.router import Play
from tailrace.trainer.base import Reference


def check_episodes(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Check the environment before anything starts.

    Raises:
        ConfigError: it cannot be imported; the model has no chat template that suits it; or the data do not
            use the template.
    """
    if not isinstance(config.environment, EpisodeSettings):
        return
    _chat(config, tokenizer)
    check_environment(config.environment)
    assert config.data
    for source in sources_of(config.data):
        settings = config.environment
        needs_template = isinstance(settings, ToolsSettings) or _begins_with_data(settings)
        if needs_template and source.chat_template == "never":
            problem = "the model reads the tools and the messages of agents through its chat template"
            raise ConfigError("data.chat_template", "never", problem, 'set it to "auto"')


def request_encoder(config: RunConfig, tokenizer: Tokenizer) -> RequestEncoder:
    """Return what encodes the first requests of agents."""
    assert config.model and config.data
    return RequestEncoder(config.data, tokenizer, context_length(config.model.path))


def prompts_of_episodes(config: RunConfig, tokenizer: Tokenizer, prompts: Prompts) -> Prompts:
    """Return the prompts, or what agents that write their own leave of them."""
    settings = config.environment
    if not isinstance(settings, AgentSettings) or settings.prompt == "data":
        return prompts
    return AgentPrompts(prompts, request_encoder(config, tokenizer).start())


def calls_reward_functions(config: RunConfig) -> bool:
    """Return whether the run has reward functions. An environment may give the rewards instead."""
    assert config.data
    given = isinstance(config.environment, EpisodeSettings) and config.environment.gives_rewards
    scorers = all(isinstance(source, ProceduralSettings) for source in sources_of(config.data))
    return config.reward.calls_functions and bool(not given or config.reward.named() or scorers)


@asynccontextmanager
async def open_play(
    config: RunConfig, tokenizer: Tokenizer, reference: Reference | None
) -> AsyncIterator[Play | None]:
    """Open the environment of a checked config for the length of the block; None for single turns."""
    settings = config.environment
    async with open_environment(settings, tokenizer, request_encoder(config, tokenizer)) as environment:
        if environment is None or not isinstance(settings, EpisodeSettings):
            yield None
            return
        assert config.model and config.sampling
        episodes = Episodes(
            environment,
            _chat(config, tokenizer).observe,
            text_of(tokenizer),
            max_completion_tokens=config.sampling.max_completion_tokens,
            max_context_tokens=context_length(config.model.path),
            grace_s=settings.grace_s,
            max_failures=settings.max_failures,
            reference=reference,
        )
        yield episodes.play


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
