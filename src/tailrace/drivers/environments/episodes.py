"""Environments of several turns: what their kinds have in common, and a user's own environment."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from tailrace.contracts.data import Prompts
from tailrace.contracts.environments import Environment, Outcome, Policy
from tailrace.contracts.trainer import Reference
from tailrace.drivers.data.encoding import CALL_MARKS, LEFT_OUT, PromptEncoder, Tokenizer, text_of
from tailrace.drivers.environments.history import AgentPrompts, Chat, RequestEncoder
from tailrace.drivers.environments.open import EnvironmentKind, Surroundings
from tailrace.drivers.environments.settings import EpisodeSettings, PythonSettings
from tailrace.errors import BadRow, ConfigError
from tailrace.importing import import_function
from tailrace.rollout.episode import Episode
from tailrace.rollout.episodes import Episodes
from tailrace.rollout.router import RunEpisode
from tailrace.types import Prompt


class EpisodeKind(EnvironmentKind):
    """A kind of environment of several turns."""

    sends_new: ClassVar[bool] = True
    """Whether it sends new messages only. Another one sends whole conversations, and compares them itself."""

    def check(self, settings: Any) -> None:
        """Check what `open` needs and `tools` does not, before anything starts. Raises a ConfigError."""

    def reads_template(self, settings: Any) -> bool:
        """Return whether prompts of the data must go through the model's chat template."""
        return False

    def writes_first(self, settings: Any) -> bool:
        """Return whether its programs write the first request of an episode themselves."""
        return False

    def encoder(self, settings: Any, run: Surroundings) -> RequestEncoder:
        """Return what encodes the first requests of programs."""
        return RequestEncoder(run.data, run.tokenizer, run.max_context_tokens, self.tools(settings))

    @asynccontextmanager
    async def open(
        self, settings: Any, tokenizer: Tokenizer, encoder: RequestEncoder
    ) -> AsyncIterator[Environment]:
        """Open it for the length of the block. Raises a ConfigError if the settings name what cannot be
        imported or made. `encoder`: of requests of programs."""
        raise NotImplementedError
        yield

    @override
    def gives_every_reward(self, settings: Any) -> bool:
        return bool(settings.always_rewards)

    @override
    def prompts(self, settings: EpisodeSettings, prompts: Prompts, run: Surroundings) -> Prompts:
        if not self.writes_first(settings):
            return prompts
        return AgentPrompts(prompts, self.encoder(settings, run).start())

    @override
    def check_episodes(self, settings: EpisodeSettings, run: Surroundings) -> None:
        _chat(settings, run)
        self.check(settings)
        tools, parser = self.tools(settings), getattr(settings, "parser", "hermes")
        for source in run.data.sources:
            if self.reads_template(settings) and source.chat_template == "never":
                problem = "the model reads the tools and the messages of agents through its chat template"
                raise ConfigError("data.chat_template", "never", problem, 'set it to "auto"')
            if tools:
                _check_tools(settings, PromptEncoder(source, run.tokenizer, tools=tools))
            if source.tools_in_system_prompt and parser != "hermes":
                problem = 'data.tools_in_system_prompt asks the model for calls in the format "hermes"'
                raise ConfigError("environment.parser", parser, problem, 'set it to "hermes"')

    @override
    @asynccontextmanager
    async def play(
        self, settings: EpisodeSettings, run: Surroundings, reference: Reference | None, *, must_reward: bool
    ) -> AsyncIterator[RunEpisode]:
        encoder, max_branches = self.encoder(settings, run), settings.max_branches
        sends_new = settings.history == "template" and self.sends_new
        async with self.open(settings, run.tokenizer, encoder) as environment:
            episode = partial(
                Episode,
                observe=_chat(settings, run).observe,
                decode=text_of(run.tokenizer, CALL_MARKS),
                sampling=run.sampling,
                max_context_tokens=run.max_context_tokens,
                parking_timeout_s=settings.parking_timeout_s,
                max_branches=max_branches,
            )
            episodes = Episodes(
                environment,
                text_of(run.tokenizer),
                episode,
                max_failures=settings.max_failures,
                episode_timeout_s=settings.episode_timeout_s,
                must_reward=must_reward,
                reference=reference,
                history=(lambda prompt: encoder.history(prompt, max_branches)) if sends_new else None,
            )
            yield episodes.run


def _check_tools(settings: EpisodeSettings, encoder: PromptEncoder) -> None:
    """Raises a ConfigError if the model would not see the tools."""
    try:
        encoder.encode("Why?")
    except BadRow as why:
        if why.reason == LEFT_OUT:
            problem = "the model's chat template leaves tools out, so the model would not know of them"
            remedy = "set data.tools_in_system_prompt = true, or choose a model whose template has them"
            functions = list(getattr(settings, "functions", ()))
            raise ConfigError("environment.functions", functions, problem, remedy) from why


def _chat(settings: EpisodeSettings, run: Surroundings) -> Chat:
    first, *others = [source.chat_template_kwargs for source in run.data.sources]
    for other in others:
        if other != first:
            problem = f"another source has {first}, and the turns of all episodes are written in one way"
            raise ConfigError("data.sources.chat_template_kwargs", other, problem, "write the same in each")
    return Chat(run.tokenizer, settings.kind, first, getattr(settings, "answer_role", "user"))


class FromFunction(Environment):
    """An environment from an async function."""

    def __init__(self, function: Callable[[Prompt, Policy], Awaitable[Outcome]]) -> None:
        self._function = function

    @override
    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        return await self._function(prompt, policy)


class PythonEnvironments(EpisodeKind):
    """An environment of the user's own."""

    @override
    def check(self, settings: PythonSettings) -> None:
        _import_environment(settings)

    @override
    @asynccontextmanager
    async def open(
        self, settings: PythonSettings, tokenizer: Tokenizer, encoder: RequestEncoder
    ) -> AsyncIterator[Environment]:
        yield _import_environment(settings)


def _import_environment(settings: PythonSettings) -> Environment:
    key, spec = "environment.environment", settings.environment
    found: Any = import_function(spec, key)
    if inspect.iscoroutinefunction(found):
        return FromFunction(found)
    try:
        environment: Any = found(**settings.arguments)
    except Exception as why:
        remedy = "check environment.arguments"
        raise ConfigError(key, spec, f"it cannot be made ({type(why).__name__}: {why})", remedy) from why
    if not inspect.iscoroutinefunction(getattr(environment, "run", None)):
        remedy = "write `async def run(self, prompt, policy)`, which returns an Outcome"
        raise ConfigError(key, spec, "it has no async method `run`", remedy)
    made: Environment = environment
    return made
