"""Any engine with the three routes that PipelineRL needs (earlier version, section 4).

    /v1/chat/completions     messages, or the prompt's token ids; token ids and log-probs come back
    /init_process_group      {master_address, master_port, rank_offset, world_size, backend}
    /request_weight_update   {version, parameters_info: [{name, shape, dtype}], clear_cache}

The group is that of torch.distributed.init_process_group over all such engines, with the trainer as rank 0
(process_group.py).
Requests go on during an update, so there is nothing to resume, and such an engine does not sleep. A cancelled
request is one whose stream is closed.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from typing_extensions import override

from tailrace.contracts.engine import Capabilities
from tailrace.contracts.sampling import SamplingSettings
from tailrace.contracts.weights import Address, Link, Weights
from tailrace.errors import NotJoined, ServerRefused
from tailrace.extras.http.dialect import Attempt, Chunk, Dialect, call, finish_of, spans_of
from tailrace.types import KV

CHAT, CONNECT, UPDATE = "/v1/chat/completions", "/init_process_group", "/request_weight_update"
PROBE = (1, 2)  # token ids that every model knows


@dataclass(slots=True, kw_only=True)
class PipelineRl(Dialect):
    """The dialect of one such engine. Made by `detect`."""

    rendezvous: Callable[[Link], Awaitable[Address]]
    """Returns where the trainer and the engines of a link meet."""
    server: str = "the engine"
    _link: Link | None = field(default=None, init=False)
    """The link whose group the engine has made."""
    _clear_cache: bool = field(default=False, init=False)

    @override
    def request(self, attempt: Attempt) -> tuple[str, dict[str, Any]]:
        return CHAT, {
            "messages": [{"role": "user", "content": ""}],  # the field must not be absent
            "prompt_token_ids": list(attempt.ids),
            "stream": True,
            "max_tokens": attempt.max_tokens,
            "temperature": attempt.temperature_or(self.sampling.temperature),
            "seed": attempt.seed,
            "logprobs": True,
            "stop_token_ids": self.stop_token_ids,
            "stop": list(self.sampling.stop),
            "ignore_eos": True,  # the ids above are all that end a completion
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_weight_versions": True,
            "cache_salt": attempt.salt,
        }

    @override
    def chunk(self, event: Mapping[str, Any], num_received: int) -> Chunk:
        if error := event.get("error"):
            raise ServerRefused(CHAT, int(error.get("code") or 500), str(error.get("message")))
        (choice,) = event["choices"]
        ids = list(choice.get("token_ids") or ())
        entries = (choice.get("logprobs") or {}).get("content") or ()
        logprobs = [float(entry["logprob"]) for entry in entries]
        if len(logprobs) != len(ids):
            raise ValueError(f"{len(ids)} tokens came with {len(logprobs)} log-probs")
        return Chunk(
            ids, logprobs, finish_of(choice.get("finish_reason")), spans_of(choice.get("weight_versions"))
        )

    @override
    async def pause(self, kv: KV) -> None:
        self._clear_cache = kv == "recompute"

    @override
    async def update(self, weights: Weights, link: Link) -> None:
        if link != self._link:
            address = await self.rendezvous(link)
            group = {"master_address": address.host, "master_port": address.port, "backend": address.backend}
            group |= {"rank_offset": link.first_rank, "world_size": 1 + link.num_ranks}
            try:
                await call(self.client, "POST", CONNECT, body=group)
            except ServerRefused as refused:
                raise NotJoined(str(refused)) from refused
            self._link = link
        infos = [info._asdict() for info in weights.tensors]
        body = {"version": weights.version, "parameters_info": infos, "clear_cache": self._clear_cache}
        await call(self.client, "POST", UPDATE, body=body)

    @override
    async def health(self) -> None:
        """There is no route for it: a refusal is an answer, too."""
        try:
            await call(self.client, "GET", CHAT)
        except ServerRefused as refused:
            if refused.status >= 500:
                raise


async def detect(
    client: httpx.AsyncClient,
    sampling: SamplingSettings,
    end_of_text: Collection[int],
    rendezvous: Callable[[Link], Awaitable[Address]],
) -> PipelineRl:
    """Detect by one token what an engine can do. Raises as `call`. `end_of_text`: tokens that end a text."""
    stop = sorted({*end_of_text, *sampling.stop_token_ids})
    dialect = PipelineRl(client=client, sampling=sampling, stop_token_ids=stop, rendezvous=rendezvous)
    _, body = dialect.request(Attempt("probe", PROBE, 1, 0, greedy=True, salt="probe"))
    reply = await call(client, "POST", CHAT, body=body | {"stream": False}) or {}
    (choice, *_) = reply.get("choices") or [{}]
    told = {
        "prompt_token_ids in the request": reply.get("prompt_token_ids") == list(PROBE),
        "token_ids in the reply": bool(choice.get("token_ids")),
        "logprobs in the reply": bool((choice.get("logprobs") or {}).get("content")),
    }
    dialect.missing = tuple(f"{CHAT} with {what}" for what, is_there in told.items() if not is_there)
    dialect.capabilities = Capabilities(exact_versions="weight_versions" in choice)
    return dialect
