"""The replies of the three routes of generation, whole or as the events of a stream.

One class a route turns new tokens of a sample into a `choice`, and choices into an event or a reply. They are
plain dictionaries: a stream makes thousands of them a second.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tailrace.engine.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    SamplingFields,
)
from tailrace.engine.serve.requests import Job, Tokens
from tailrace.engine.serve.text import Text, TokenStrings
from tailrace.engine.serve.versions import Versions

Choice = dict[str, Any]
Reply = dict[str, Any]
Top = Sequence[tuple[int, float]]

ABSENT_LOGPROB = -9999.0
"""JSON has no infinities; this is what vLLM sends in their place."""


class Format(Protocol):
    """The form of one route's replies, with the state of one request."""

    def choice(self, number: int, new: Tokens, *, whole: bool) -> Choice:
        """New tokens of a sample.

        Args:
            whole: these are all of its tokens, for a reply; otherwise for an event.
        """

    def envelope(self, choices: Sequence[Choice], usage: Reply | None, *, whole: bool) -> Reply:
        """A reply, or an event of a stream, around its choices."""


@dataclass(frozen=True, slots=True)
class Context:
    """What all formats need.

    Args:
        tokenizer: of the library `tokenizers`.
    """

    model: str
    tokenizer: Any
    strings: TokenStrings
    versions: Versions


class _Sample:
    """What the server remembers of a sample between two events."""

    def __init__(self, context: Context, sampling: SamplingFields) -> None:
        self._stop_ids = sampling.stop_token_ids or ()
        self.text = Text(
            context.tokenizer,
            sampling.stops,
            include_stop=sampling.include_stop_str_in_output,
            skip_special=sampling.skip_special_tokens,
        )
        self.spans: list[tuple[int, int]] = []
        """(version, number of tokens)"""
        self.num_characters = 0
        """Length of the tokens' strings, for offsets in log-probs."""

    def stop_reason(self, new: Tokens) -> int | str | None:
        """The stop token or string that has ended the sample; None: something else, or it goes on."""
        if new.finish == "stop" and new.ids and new.ids[-1] in self._stop_ids:
            return new.ids[-1]
        return self.text.stop


class _Formats:
    """What the formats have in common."""

    def __init__(self, context: Context, job: Job, sampling: SamplingFields) -> None:
        self.context, self.job = context, job
        self.created = int(time.time())
        self._samples = [_Sample(context, sampling) for _ in range(job.size)]
        self._begun: set[int] = set()

    def begins(self, number: int) -> bool:
        """Whether this is the first choice of a sample."""
        begins = number not in self._begun
        self._begun.add(number)
        return begins

    def versions(self, number: int, new: Tokens) -> list[Reply] | None:
        """The spans of versions of all tokens of a sample, once it has ended."""
        spans = self._samples[number].spans
        spans += new.spans
        return self.context.versions.spans(spans) if new.finish else None

    def prompt(self, number: int) -> Sequence[int]:
        """The prompt of a sample."""
        return self.job.prompts[number // self.job.num_samples]


class CompletionFormat(_Formats):
    """/v1/completions."""

    def __init__(self, context: Context, job: Job, body: CompletionRequest) -> None:
        super().__init__(context, job, body)
        self._body = body

    def choice(self, number: int, new: Tokens, *, whole: bool) -> Choice:
        """As Format.choice."""
        body, sample, begins = self._body, self._samples[number], self.begins(number)
        text = sample.text.extend(new.ids, ended=new.finish is not None)
        choice: Choice = {
            "index": number,
            "text": text,
            "logprobs": None if body.logprobs is None else self._logprobs(sample, new, body.logprobs),
            "finish_reason": new.finish,
            "stop_reason": sample.stop_reason(new),
        }
        if body.return_token_ids:
            choice["token_ids"] = new.ids
            choice["prompt_token_ids"] = self.prompt(number) if begins else None
        versions = self.versions(number, new)
        if body.return_weight_versions:
            choice["weight_versions"] = versions
        return choice

    def envelope(self, choices: Sequence[Choice], usage: Reply | None, *, whole: bool) -> Reply:
        """As Format.envelope."""
        return {
            "id": f"{self.job.prefix}{self.job.id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.context.model,
            "choices": choices,
            "usage": usage,
        }

    def _logprobs(self, sample: _Sample, new: Tokens, num_top: int) -> Reply:
        strings, as_ids = self.context.strings, bool(self._body.return_tokens_as_token_ids)
        tokens = [strings(id, as_ids=as_ids) for id in new.ids]
        ends = list(itertools.accumulate(map(len, tokens), initial=sample.num_characters))
        sample.num_characters = ends[-1]
        logprobs = [_finite(logprob) for logprob in new.logprobs]
        tops = [
            {strings(id, as_ids=as_ids): _finite(value) for id, value in top} | {token: logprob}
            for token, logprob, top in zip(tokens, logprobs, _tops(new, num_top), strict=True)
        ]
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": ends[:-1],
        }


class ChatFormat(_Formats):
    """/v1/chat/completions."""

    def __init__(self, context: Context, job: Job, body: ChatCompletionRequest) -> None:
        super().__init__(context, job, body)
        self._body = body
        self._prompt_shown = False

    def choice(self, number: int, new: Tokens, *, whole: bool) -> Choice:
        """As Format.choice."""
        body, sample, begins = self._body, self._samples[number], self.begins(number)
        text = sample.text.extend(new.ids, ended=new.finish is not None)
        message: Reply = {"role": "assistant"} if begins else {}
        choice: Choice = {
            "index": number,
            "message" if whole else "delta": message | {"content": text},
            "logprobs": {"content": self._logprobs(new)} if body.logprobs else None,
            "finish_reason": new.finish,
            "stop_reason": sample.stop_reason(new),
        }
        if body.return_token_ids:
            choice["token_ids"] = new.ids
        versions = self.versions(number, new)
        if body.return_weight_versions:
            choice["weight_versions"] = versions
        return choice

    def envelope(self, choices: Sequence[Choice], usage: Reply | None, *, whole: bool) -> Reply:
        """As Format.envelope."""
        reply: Reply = {
            "id": f"{self.job.prefix}{self.job.id}",
            "object": "chat.completion" if whole else "chat.completion.chunk",
            "created": self.created,
            "model": self.context.model,
            "choices": choices,
            "usage": usage,
        }
        if self._body.return_token_ids and not self._prompt_shown:
            self._prompt_shown = True
            reply["prompt_token_ids"] = self.job.prompts[0]
        return reply

    def _logprobs(self, new: Tokens) -> list[Reply]:
        tops = _tops(new, self._body.top_logprobs or 0)
        return [
            self._entry(id, logprob) | {"top_logprobs": [self._entry(*each) for each in top]}
            for id, logprob, top in zip(new.ids, new.logprobs, tops, strict=True)
        ]

    def _entry(self, id: int, logprob: float) -> Reply:
        token = self.context.strings(id, as_ids=bool(self._body.return_tokens_as_token_ids))
        return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode())}


class GenerateFormat(_Formats):
    """/inference/v1/generate. The entries of log-probs have the token's id under both keys that versions of
    vLLM have used, so that clients of either parse them."""

    def __init__(self, context: Context, job: Job, body: GenerateRequest) -> None:
        super().__init__(context, job, body.sampling_params)
        self._body = body
        self._prompt_shown = not body.return_token_ids

    def choice(self, number: int, new: Tokens, *, whole: bool) -> Choice:
        """As Format.choice."""
        sampling, sample = self._body.sampling_params, self._samples[number]
        if sampling.stops:
            sample.text.extend(new.ids, ended=new.finish is not None)
        return {
            "index": number,
            "token_ids": new.ids,
            "logprobs": None if sampling.logprobs is None else self._logprobs(new, sampling.logprobs),
            "finish_reason": new.finish,
            "stop_reason": sample.stop_reason(new),
            "weight_versions": self.versions(number, new),
            "routed_experts": None,
            "sampling_mask": None,
        }

    def envelope(self, choices: Sequence[Choice], usage: Reply | None, *, whole: bool) -> Reply:
        """As Format.envelope."""
        reply: Reply = {
            "request_id": self.job.id,
            "output_mode": "tokens",
            "choices": choices,
            "usage": usage,
        }
        if whole:
            reply |= {"model": self.context.model, "created": self.created}
        if not self._prompt_shown:
            self._prompt_shown = True
            reply["prompt_token_ids"] = self.job.prompts[0]
        return reply

    def _logprobs(self, new: Tokens, num_top: int) -> Reply:
        """The sampled token stands first among the likeliest ones, as in vLLM."""
        content = []
        for id, logprob, top in zip(new.ids, new.logprobs, _tops(new, num_top), strict=True):
            entry = _generate_entry(id, logprob)
            others = [_generate_entry(*each) for each in top if each[0] != id]
            content.append(entry | {"rank": None, "top_logprobs": [entry, *others][: max(num_top, 1)]})
        return {"content": content}


def _generate_entry(id: int, logprob: float) -> Reply:
    return {"token": f"token_id:{id}", "token_id": id, "logprob": _finite(logprob)}


def _tops(new: Tokens, num: int) -> Sequence[Top]:
    """The likeliest tokens at each position, `num` or none of them."""
    return new.top_logprobs if num and new.top_logprobs else [()] * len(new.ids)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else ABSENT_LOGPROB
