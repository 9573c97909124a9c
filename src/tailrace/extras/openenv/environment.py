"""Episodes of an environment behind a server of OpenEnv.

An episode that begins again after an interruption gets a new session, in which the actions so far are
repeated. So an environment must do the same after the same seed and the same actions.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Mapping
from typing import Any

from openenv.core.generic_client import GenericEnvClient
from typing_extensions import override
from websockets.exceptions import WebSocketException

from tailrace.contracts.environments import Environment, EpisodeOver, Message, Outcome, Policy
from tailrace.drivers.environments.history import RequestEncoder, TooManyBranches, opening_messages
from tailrace.errors import BadRow, EnvironmentFailed
from tailrace.extras.openenv.settings import OpenEnvSettings
from tailrace.types import Prompt

FENCED = re.compile(r"```\w*\n(.*)\n```", re.DOTALL)
INVALID = "(code: VALIDATION_ERROR)"
"""End of the error of OpenEnv's client after an action that does not fit the schema."""


class OpenEnvEnvironment(Environment):
    """Plays the episodes of a server. `schema`: of its actions."""

    def __init__(self, settings: OpenEnvSettings, schema: Mapping[str, Any], encoder: RequestEncoder) -> None:
        self._settings, self._schema, self._encoder = settings, schema, encoder
        self._sessions = asyncio.Semaphore(settings.max_sessions)

    @override
    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        limit_s = self._settings.step_timeout_s
        client = GenericEnvClient(self._settings.url, connect_timeout_s=limit_s, message_timeout_s=limit_s)
        rewards, counts = list[float](), {"turns": 0, "malformed": 0}
        async with self._sessions:
            try:
                await self._play(prompt, policy, client, rewards, counts)
            except EpisodeOver:
                pass
            finally:
                await client.close()
        given = rewards if self._settings.reward == "sum" else rewards[-1:]
        return Outcome(sum(given), counts)

    async def _play(
        self, prompt: Prompt, policy: Policy, client: Any, rewards: list[float], counts: dict[str, int]
    ) -> None:
        settings = self._settings
        seed = prompt.index if prompt.row_number is None else prompt.row_number
        arguments = {"seed": seed, **self._arguments(prompt.row)}
        seen = self._message(await _answered(client.reset(**arguments)))
        *before, last = opening_messages(prompt)
        if last["role"] == "user":  # templates refuse two messages of one role in sequence
            seen = {"role": "user", "content": f"{last['content']}\n\n{seen['content']}"}
        else:
            before.append(last)
        messages = [*before, seen]
        contexts = self._encoder.contexts(prompt, settings.history, settings.max_branches)
        try:
            policy.open(contexts.first(messages, None))
            for _ in range(settings.max_turns):
                new = [seen] if counts["turns"] else []
                whole = (
                    contexts.rewritten(policy.context_ids, messages, None, continues=True) if new else None
                )
                turn = await policy.complete(new, context_ids=whole or None)
                counts["turns"] += 1
                seen, is_done = await self._step(client, turn.text, rewards, counts)
                if is_done:
                    return
                messages += [{"role": "assistant", "content": turn.text}, seen]
        except BadRow as why:
            raise EnvironmentFailed("template", str(why)) from why
        except TooManyBranches as why:
            raise EpisodeOver from why

    async def _step(
        self, client: Any, text: str, rewards: list[float], counts: dict[str, int]
    ) -> tuple[Message, bool]:
        """Return what the server says to a turn, and whether the episode is over."""
        try:
            result = await _answered(client.step(action_of(text, self._schema)))
        except ValueError as why:
            counts["malformed"] += 1
            return {"role": "user", "content": f"error: {why}"}, False
        if result.reward is not None:
            rewards.append(float(result.reward))
        return self._message(result), bool(result.done)

    def _message(self, result: Any) -> Message:
        field, seen = self._settings.observation, result.observation
        if field:
            if field not in seen:
                raise EnvironmentFailed("observation", f"it has no field {field!r}, it has {', '.join(seen)}")
            seen = seen[field]
        return {"role": "user", "content": seen if isinstance(seen, str) else json.dumps(seen)}

    def _arguments(self, row: Mapping[str, object]) -> dict[str, object]:
        missing = [column for column in self._settings.reset.values() if column not in row]
        if missing:
            raise EnvironmentFailed("reset", f"the row has no column {missing[0]!r}")
        return {name: row[column] for name, column in self._settings.reset.items()}


async def _answered(answer: Awaitable[Any]) -> Any:
    """Await an answer of the server. Raises a ValueError if the action does not fit its schema, and an
    EnvironmentFailed if there is no answer, or an error."""
    try:
        return await answer
    except TimeoutError as why:
        raise EnvironmentFailed("timeout", "the server did not answer in environment.step_timeout_s") from why
    except (OSError, RuntimeError, WebSocketException) as why:
        if str(why).endswith(INVALID):
            raise ValueError("the action does not fit its schema") from why
        raise EnvironmentFailed("server", f"{type(why).__name__}: {why}") from why


def action_of(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the action that a turn is: a JSON object with the required fields of the schema, also in a
    fenced block; or the value of the only one that is required. Thinking does not count. Raises a ValueError
    if it is neither."""
    text = text.rpartition("</think>")[2].strip()
    if fenced := FENCED.fullmatch(text):
        text = fenced[1].strip()
    required = list(schema.get("required", ()))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, dict) and value.keys() >= {*required}:
        return value
    if len(required) != 1:
        raise ValueError(
            f"an action is a JSON object with {', '.join(required) or 'the fields of the action'}"
        )
    is_text = schema["properties"][required[0]].get("type") == "string"
    return {required[0]: text if is_text else value}
