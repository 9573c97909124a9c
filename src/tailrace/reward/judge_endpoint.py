"""A judge behind an OpenAI-compatible endpoint.

Requests are made in the controller's event loop, so a slow answer delays nothing else. A failure of the
endpoint is retried and is never a score. An answer that cannot be read is asked for again.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import httpx

from tailrace.clock import now
from tailrace.errors import ConfigError, RewardFailed
from tailrace.reward.base import Call
from tailrace.reward.judge import Verdict, messages_of
from tailrace.reward.judge_answers import AnswerCache, score_reader
from tailrace.reward.judge_settings import EndpointJudgeSettings

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Between two attempts after a failure of the endpoint; doubled each time."""
RETRIED = {408, 409, 425, 429, *range(500, 600)}
"""HTTP statuses of failures that may pass."""
RETRY_TEMPERATURE = 1.0
"""A greedy judge would give the same unreadable answer again."""
KEY = "reward.judges"


class EndpointJudge:
    """A Judge (judge.py). Equal questions that are open at the same time are asked once.

    Args:
        timeout_s: seconds for one answer; waiting for a free place does not count.

    Raises:
        ConfigError: the address is malformed, or the environment variable of the API key is not set.
    """

    def __init__(self, settings: EndpointJudgeSettings, timeout_s: float) -> None:
        self.settings, self._timeout_s = settings, timeout_s
        self._secret = _api_key(settings)
        self._read = score_reader(settings)
        self._cache = AnswerCache(settings.cache_size, settings.cache_folder)
        self._open: dict[str, asyncio.Task[Verdict]] = {}
        self._places = asyncio.Semaphore(settings.concurrency)
        try:
            is_local = httpx.URL(settings.url).host in ("localhost", "127.0.0.1", "::1")
        except httpx.InvalidURL as why:
            remedy = "write http://host:port/v1"
            raise ConfigError(f"{KEY}.url", settings.url, f"this is no address ({why})", remedy) from None
        self._client = httpx.AsyncClient(
            base_url=settings.url.rstrip("/") + "/",
            headers={"authorization": f"Bearer {self._secret}"} if self._secret else {},
            timeout=httpx.Timeout(None, connect=timeout_s / 2),
            limits=httpx.Limits(max_connections=None),
            trust_env=not is_local,  # a proxy of the environment is for other hosts
        )

    async def judge(self, call: Call) -> Verdict:
        """As Judge.judge. When this is cancelled, the question stays open, for others that ask it.

        Raises:
            RewardFailed: reason "judge unavailable", "judge refused", "judge unreadable" or "judge template".
        """
        messages = messages_of(self.settings, call)
        key = AnswerCache.key(self.settings.url, self.settings.model, messages, self.settings.parameters)
        known = self._cache.get(key)
        if known is not None and (score := self._read(known)) is not None:
            return Verdict(score, known)
        if key not in self._open:
            self._open[key] = task = asyncio.create_task(self._ask(key, messages))
            task.add_done_callback(lambda done: self._closed(key, done))
        return await asyncio.shield(self._open[key])

    async def close(self) -> None:
        """Give open questions up, and close all connections."""
        tasks = list(self._open.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _closed(self, key: str, task: asyncio.Task[Verdict]) -> None:
        del self._open[key]
        if not task.cancelled():
            task.exception()  # asyncio warns of one that was not read

    async def _ask(self, key: str, messages: Sequence[Mapping[str, str]]) -> Verdict:
        answer = ""
        for attempt in range(self.settings.asks):
            answer = await self._answer(messages, is_first=attempt == 0)
            if (score := self._read(answer)) is not None:
                self._cache.put(key, answer)
                return Verdict(score, answer)
        raise RewardFailed("judge unreadable", f"no score in {self.settings.asks} answers: {answer!r:.300}")

    async def _answer(self, messages: Sequence[Mapping[str, str]], *, is_first: bool) -> str:
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": messages,
            **self.settings.parameters,
        }
        temperature = body.get("temperature")
        if not is_first and isinstance(temperature, int | float):
            body["temperature"] = max(temperature, RETRY_TEMPERATURE)
        reply = await self._post(body)
        try:
            content = str(reply.json()["choices"][0]["message"]["content"] or "")
            return content.encode(errors="replace").decode()  # JSON can spell halves of surrogate pairs
        except (LookupError, TypeError, ValueError):
            return f"[no chat completion] {self._without_secret(reply.text)[:300]}"

    async def _post(self, body: Mapping[str, Any]) -> httpx.Response:
        """Send a question until the endpoint answers.

        Raises:
            TimeoutError: it did not answer in time.
            RewardFailed: it refuses the question, or has failed for `give_up_s`.
        """
        begun, pause_s = now(), FIRST_PAUSE_S
        while True:
            try:
                async with self._places, asyncio.timeout(self._timeout_s):
                    reply = await self._client.post("chat/completions", json=body)
                if reply.is_success:
                    return reply
                problem = f"HTTP {reply.status_code}: {self._without_secret(reply.text)[:300]}"
                if reply.status_code not in RETRIED:
                    raise RewardFailed("judge refused", problem)
                pause_s = max(pause_s, _retry_after_s(reply))
            except httpx.HTTPError as why:
                problem = f"{type(why).__name__}: {why}"
            if now() + pause_s > begun + self.settings.give_up_s:
                raise RewardFailed("judge unavailable", problem)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def models(self) -> list[str]:
        """Return the names of the endpoint's models; empty where it does not tell."""
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._client.get("models")
            return [str(model["id"]) for model in reply.json()["data"]] if reply.is_success else []
        except (httpx.HTTPError, TimeoutError, LookupError, TypeError, ValueError):
            return []

    def _without_secret(self, text: str) -> str:
        return text.replace(self._secret, "***") if self._secret else text


async def check_endpoint(settings: EndpointJudgeSettings, timeout_s: float, call: Call) -> str | None:
    """Ask a judge about one completion before anything starts.

    Returns:
        A warning if its answer cannot be read, else None.

    Raises:
        ConfigError: it cannot be reached, does not have the model, refuses the question, or is too slow.
    """
    judge = EndpointJudge(settings.model_copy(update={"give_up_s": 0.0, "cache_size": 0}), timeout_s)
    try:
        models = await judge.models()
        if models and not any(fnmatchcase(settings.model, model) for model in models):
            remedy = f"choose from {', '.join(models[:20])}"
            raise ConfigError(f"{KEY}.model", settings.model, "the endpoint has no such model", remedy)
        await judge.judge(call)
    except TimeoutError:
        problem = f"the judge {settings.name} did not answer in time"
        raise ConfigError("reward.timeout_s", timeout_s, problem, "raise it") from None
    except RewardFailed as failed:
        if failed.reason == "judge unreadable":
            return f"the judge {settings.name}: {failed.detail}"
        url = f"{KEY}.url", settings.url
        if failed.reason == "judge unavailable":
            problem = f"the judge cannot be reached ({failed.detail})"
            raise ConfigError(*url, problem, "start its server, or correct the address") from None
        remedy = "check reward.judges.model, parameters and api_key_env"
        raise ConfigError(*url, f"it refuses the question ({failed.detail})", remedy) from None
    finally:
        await judge.close()
    return None


def _api_key(settings: EndpointJudgeSettings) -> str | None:
    if settings.api_key_env is None:
        return None
    if not (secret := os.environ.get(settings.api_key_env, "").strip()):
        problem, remedy = "this environment variable is not set", "set it to the API key"
        raise ConfigError(f"{KEY}.api_key_env", settings.api_key_env, problem, remedy)
    return secret


def _retry_after_s(reply: httpx.Response) -> float:
    """Return the seconds that the endpoint asks to wait for; 0: it does not say."""
    try:
        return min(max(float(reply.headers["retry-after"]), 0.0), MAX_PAUSE_S)
    except (LookupError, ValueError):
        return 0.0
