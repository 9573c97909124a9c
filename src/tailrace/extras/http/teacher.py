"""A teacher behind a server that returns log-probs of a prompt: vLLM, or `tailrace serve`."""

import asyncio
import math
import os
from typing import Any

import httpx
from typing_extensions import override

from tailrace.clock import now
from tailrace.config import LiveConfig
from tailrace.contracts.trainer import Reference
from tailrace.drivers.data.encoding import Tokenizer, vocabulary_digest
from tailrace.drivers.data.settings import longest_sequence
from tailrace.drivers.kinds.base import Opening
from tailrace.drivers.kinds.teacher import SAME_TOKENIZER, TeacherKind, check_context, check_vocabulary
from tailrace.errors import ConfigError, EngineDied, RewardFailed, ServerRefused
from tailrace.extras.http.dialect import call
from tailrace.extras.http.settings import ServerTeacherSettings
from tailrace.model_folder import context_length
from tailrace.types import Sample

ROUTE = "/inference/v1/generate"
PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Seconds until a request is repeated: the first time, and then twice as many each time up to the longest."""
OTHER_TOKENS = "its tokens are not those of the model that is trained"
NOT_TOLD = "update it if it is tailrace serve, or set teacher.tokenizer to a folder with its tokenizer"
NO_ROUTE = {404, 405, 501}  # statuses of a server that lacks a route


class ServerTeacher(TeacherKind):
    """A server, which gives log-probs at temperature 1."""

    settings = ServerTeacherSettings

    @override
    def check(self, teacher: ServerTeacherSettings, config: LiveConfig) -> None:
        sampling = config.sampling
        if sampling and sampling.temperature != 1:
            problem = "a server gives log-probs of a prompt at temperature 1"
            raise ConfigError("sampling.temperature", sampling.temperature, problem, "set it to 1")
        if config.environment.has_turns:
            problem = "a server reads a prompt and one completion, and an episode may have several contexts"
            raise ConfigError("teacher.kind", "server", problem, 'use a "folder"')
        if teacher.tokenizer and config.model:
            check_vocabulary("teacher.tokenizer", teacher.tokenizer, config.model.path)
        if teacher.api_key_env and teacher.api_key_env not in os.environ:
            problem = "this environment variable is not set"
            raise ConfigError("teacher.api_key_env", teacher.api_key_env, problem, "set it")

    @override
    async def begin(self, teacher: ServerTeacherSettings, name: str, opening: Opening) -> Reference:
        client = ScoringClient(teacher)
        opening.closing.append(client.close)
        try:
            _, context = await client.rows([0]), await client.context()
            is_same = teacher.tokenizer is not None or await client.has_tokens_of(opening.tokenizer)
        except (EngineDied, ServerRefused, httpx.HTTPError, ValueError) as why:
            remedy = "start it, or name another; it must be vLLM 0.30 or later, or tailrace serve"
            raise ConfigError("teacher.url", teacher.url, f"it gives no log-probs ({why})", remedy) from None
        if is_same is None:
            raise ConfigError("teacher.url", teacher.url, "it does not tell its vocabulary", NOT_TOLD)
        if not is_same:
            raise ConfigError("teacher.url", teacher.url, OTHER_TOKENS, SAME_TOKENIZER)
        data, limit = LiveConfig.of(opening.config).data, context_length(opening.config.model.path)
        longest = longest_sequence(
            data, opening.config.sampling, max_context_tokens=limit, unbounded_prompt=1
        )
        check_context("teacher.url", teacher.url, context, longest)
        return client


class ScoringClient:
    """A `Reference` behind a server."""

    def __init__(self, settings: ServerTeacherSettings) -> None:
        self._settings = settings
        key = os.environ.get(settings.api_key_env or "", "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        base = settings.url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(base_url=base, headers=headers, trust_env=False)
        self._places = asyncio.Semaphore(settings.concurrency)

    async def logprobs(self, sample: Sample) -> list[float]:
        """Return the log-probs of a sample's tokens. Raises a RewardFailed if the server refuses it, or has
        failed for `retry_timeout_s`."""
        prompt, ids, begun, pause_s = [*sample.prompt.ids], sample.completion_ids, now(), PAUSE_S
        async with self._places:
            while True:
                try:
                    rows = await self.rows(prompt + ids)
                    placed = [(rows[place], str(id)) for place, id in enumerate(ids, len(prompt))]
                    return [float(row.get(id, {}).get("logprob", math.nan)) for row, id in placed]
                except (EngineDied, ServerRefused) as why:
                    may_pass = isinstance(why, EngineDied) or why.status >= 500 or why.status in (408, 429)
                    if not may_pass or now() + pause_s > begun + self._settings.retry_timeout_s:
                        raise RewardFailed("teacher", str(why)) from None
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def rows(self, ids: list[int]) -> list[dict[str, Any]]:
        """Return what the server says of each token of a sequence. Raises as `call`."""
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        body: dict[str, Any] = {"token_ids": ids, "sampling_params": sampling, "stream": False}
        body |= {"model": self._settings.model} if self._settings.model else {}
        reply = await call(self._client, "POST", ROUTE, body=body, timeout_s=600.0)
        rows: list[dict[str, Any]] = (reply or {}).get("prompt_logprobs") or []
        if len(rows) != len(ids):
            raise ServerRefused(f"POST {self._client.base_url}{ROUTE}", 400, "no prompt_logprobs in it")
        return [row or {} for row in rows]

    async def has_tokens_of(self, tokenizer: Tokenizer) -> bool | None:
        """Return whether the server's tokens are those of a tokenizer; it may have more after them. None: it
        does not tell. Raises a httpx.HTTPError, a ServerRefused, or a ValueError: the reply is no JSON."""
        below = (ids := sorted(tokenizer.backend_tokenizer.get_vocab().values()))[-1] + 1
        reply = await self._client.get("/vocabulary", params={"below": below}, timeout=60)
        if reply.status_code in NO_ROUTE:
            reply = await self._client.post("/detokenize", json={"tokens": ids}, timeout=60)  # of vLLM
        if not reply.is_success and reply.status_code not in NO_ROUTE:
            raise ServerRefused(str(reply.url), reply.status_code, reply.text)
        right = vocabulary_digest(tokenizer, below), {"prompt": tokenizer.decode(ids)}
        return reply.json() in right if reply.is_success else None

    async def context(self) -> float:
        """Return how many tokens the model reads; infinity: the server does not say. Raises as `call`."""
        cards = (await call(self._client, "GET", "/v1/models") or {}).get("data") or [{}]
        card = next((each for each in cards if each.get("id") == self._settings.model), cards[0])
        return card.get("max_model_len") or math.inf

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()
