"""Judges: models that score completions, beside the reward functions.

Requests to a judge behind an OpenAI-compatible endpoint are made in the controller's event loop, so a slow
answer delays nothing else. A failure of the endpoint is retried and is never a score. An answer that cannot
be read is asked for again.
"""

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import Any, SupportsFloat

import httpx

from tailrace.clock import now
from tailrace.drivers.reward.calls import Call, column_of
from tailrace.drivers.reward.kinds import Verdict
from tailrace.errors import ConfigError, RewardFailed
from tailrace.extras.judges.settings import AnswerSettings, AnyJudgeSettings, EndpointJudgeSettings

OWN_NAMES = ("prompt", "completion")
"""Names that a template may use besides the columns of the data."""
_FIELD = re.compile(r"\{\{([\w.-]+)\}\}|\{([A-Za-z_][\w.-]*)\}")


def render(template: str, call: Call) -> str:
    """Fill a template in. Raises a RewardFailed if the row lacks a column that the template names."""

    def value(match: re.Match[str]) -> str:
        literal, name = match.groups()
        if literal:
            return f"{{{literal}}}"
        if name == "prompt":
            return transcript(call)
        found = call.turn if name == "completion" else column_of(call.row, name)
        if found is None:
            raise RewardFailed("judge template", f"the row has no column {name!r}", is_defect=True)
        return str(found)

    return _FIELD.sub(value, template)


def transcript(call: Call) -> str:
    """Return the prompt as the data give it; chat messages with their roles, unless there is one only."""
    if not isinstance(call.given, list):
        return call.prompt if call.given is None else str(call.given)
    contents = [str(message.get("content", "")) for message in call.given]
    if len(contents) == 1:
        return contents[0]
    roles = [message.get("role", "user") for message in call.given]
    return "\n\n".join(f"{role}: {content}" for role, content in zip(roles, contents, strict=True))


def messages_of(settings: AnyJudgeSettings, call: Call) -> list[dict[str, str]]:
    """Return what the judge reads: the template filled in, or without one the conversation. Raises a
    RewardFailed if the row lacks a column, or holds text that is not Unicode."""
    system = [{"role": "system", "content": settings.system}] if settings.system is not None else []
    if settings.template is not None:
        messages = [*system, {"role": "user", "content": render(settings.template, call)}]
    else:
        plain = [{"role": "user", "content": transcript(call)}]
        given = call.given if isinstance(call.given, list) else plain
        asked = [{"role": str(each.get("role")), "content": str(each.get("content", ""))} for each in given]
        messages = [*system, *asked, {"role": "assistant", "content": call.turn}]
    try:
        for message in messages:
            message["content"].encode()
    except UnicodeEncodeError as why:  # JSON can spell halves of surrogate pairs
        raise RewardFailed("judge template", f"the text is not valid Unicode ({why})") from why
    return messages


def check_template(judge: AnyJudgeSettings, rows: Sequence[Mapping[str, object]]) -> None:
    """Match the template to the columns of the data before anything starts. Raises a ConfigError if it names
    a column that the data lack."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for _, name in _FIELD.findall(judge.template or ""):
        if name and name not in OWN_NAMES and all(column_of(row, name) is None for row in rows):
            problem = f"{{{name}}} is no column of the data (columns: {', '.join(columns) or 'none'})"
            remedy = f"name a column, or write {{{{{name}}}}} for the text {{{name}}}"
            raise ConfigError("reward.judges.template", judge.template, problem, remedy)


_NUMBER = r"\d++(?:\.\d++)?"
_TO = r"[ \t]*(?:to|and|[-\u2013\u2014\u2026]|\.\.+)[ \t]*"
_RANGE = rf"(?<!\d)(?:{_NUMBER}{_TO}{_NUMBER}|{_NUMBER}[- ]point\b|\[{_NUMBER}, *{_NUMBER}\])"
_SCALE = r"\b(?:scale(?: of| from)?|max(?:imum)?(?: of)?)[.:]?[ \t]*"
_ENDS = re.compile(rf"(?:{_SCALE})?{_RANGE}|{_SCALE}{_NUMBER}", re.IGNORECASE)
"""Numbers that name a scale or a range, and no score."""
_OF = r"(?:/[\s*(]*+|\bof\b\s*+[^\d\n.,:;!?]{0,20}?)"
_SCORE = re.compile(
    rf"(-?{_NUMBER}|(?={_OF}{_NUMBER}))"
    rf"(?:(?:[^\d\n]{{0,20}}?\bout |[\s*(){{}}\]]*){_OF}({_NUMBER})|[ \t]*(%))?",
    re.IGNORECASE,
)
"""A score, and the end of its scale where it is given; the score is empty where only the end is given."""
_DECODER = json.JSONDecoder()


def score_reader(settings: AnswerSettings) -> Callable[[str], float | None]:
    """Return a function from an answer to its score, 0 to 1; None where the answer cannot be read."""
    values = {word.lower(): value for word, value in settings.values.items()}
    worst, best = settings.scale

    def read(answer: str) -> float | None:
        found = _find(settings, answer)
        word = str(found).strip().lower()
        try:
            number = values[word] if word in values else float(found)
        except (TypeError, ValueError, OverflowError):
            return None
        score = (number - worst) / (best - worst)
        return score if 0 <= score <= 1 else None

    return read


def _find(settings: AnswerSettings, answer: str) -> Any:
    """Return what the answer gives as the score, as text or JSON; None: nothing."""
    if settings.pattern is not None:
        matches: list[str] = re.findall(settings.pattern, answer)
        return matches[-1] if matches else None
    if settings.field is None:
        score, end, percent = (_SCORE.findall(_ENDS.sub("", answer)) or [("", "", "")])[-1]
        end = "100" if percent else end
        return score if not end or float(end) == max(settings.scale) else None
    for match in reversed(list(re.finditer(r"\{", answer))):
        with suppress(ValueError, RecursionError):
            found, _ = _DECODER.raw_decode(answer, match.start())
            value = found.get(settings.field)
            if isinstance(value, str | SupportsFloat):
                return value
    return None


class AnswerCache:
    """Answers by question: the ones used last in memory, and all in a folder where one is named."""

    def __init__(self, size: int, folder: Path | None) -> None:
        self._size, self._folder = size, folder
        self._answers: dict[str, str] = {}
        """The one used last comes last."""

    @staticmethod
    def key(*question: object) -> str:
        """Return the key of a question, which is plain data."""
        return blake2b(json.dumps(question, sort_keys=True).encode(), digest_size=16).hexdigest()

    def get(self, key: str) -> str | None:
        """Return the answer to a question, or None."""
        answer = self._answers.get(key)
        if answer is None and self._folder:
            with suppress(OSError, ValueError):
                answer = self._file(self._folder, key).read_text(encoding="utf-8")
        if answer is not None:
            self._remember(key, answer)
        return answer

    def put(self, key: str, answer: str) -> None:
        """Keep an answer."""
        self._remember(key, answer)
        if self._folder:
            with suppress(OSError, ValueError):  # the run goes on without the cache
                file = self._file(self._folder, key)
                file.parent.mkdir(parents=True, exist_ok=True)
                new = file.with_suffix(".new")
                new.write_text(answer, encoding="utf-8")
                new.replace(file)

    def _remember(self, key: str, answer: str) -> None:
        self._answers.pop(key, None)
        self._answers[key] = answer
        if len(self._answers) > self._size:
            del self._answers[next(iter(self._answers))]

    @staticmethod
    def _file(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key[2:]}.txt"


FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Pauses between attempts after a failure of the endpoint: the first, doubled up to the longest."""
RETRIED = {408, 409, 425, 429, *range(500, 600)}
"""HTTP statuses of failures that may pass."""
RETRY_TEMPERATURE = 1.0
"""A greedy judge would give the same unreadable answer again."""
KEY = "reward.judges"


class EndpointJudge:
    """A `Judge`. Equal questions that are open at the same time are asked once. An answer may take
    `timeout_s`; waiting for a free place does not count. Raises a ConfigError if the address is malformed, or
    the environment variable of the API key is not set."""

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
        """Score as `Judge.judge`. When this is cancelled, the question stays open, for others that ask it.
        Raises a RewardFailed ("judge unavailable", "judge refused", "judge unreadable", "judge template")."""
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
        asked = {"model": self.settings.model, "messages": messages}
        body: dict[str, Any] = asked | self.settings.parameters
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
            RewardFailed: it refuses the question, or has failed for `retry_timeout_s`.
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
            if now() + pause_s > begun + self.settings.retry_timeout_s:
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
    """Ask a judge about one completion before anything starts. Return a warning if its answer cannot be read,
    else None. Raises a ConfigError if it cannot be reached, does not have the model, refuses the question, or
    is too slow."""
    judge = EndpointJudge(settings.model_copy(update={"retry_timeout_s": 0.0, "cache_size": 0}), timeout_s)
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
