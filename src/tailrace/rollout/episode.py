"""One episode: the policy that an environment talks to, over the record in the sample.

The record is the sample itself: its tokens, its turns and the results of calls. An interrupted episode is
continued by playing the environment again over that record; nothing else is kept.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from math import inf

import msgspec
from typing_extensions import override

from tailrace.contracts.environments import Completion, EpisodeOver, Message, Policy
from tailrace.contracts.sampling import SamplingSettings
from tailrace.errors import EnvironmentFailed
from tailrace.rollout.router import Serve, Written, not_written
from tailrace.turns import Branch, Turn, branches_of
from tailrace.types import Sample

Observe = Callable[[Sequence[Message], int | None], list[int]]
"""The tokens between a turn and the next one: at least one. Its arguments are the messages of the environment
and the last token of the turn (None in a simulation, which has no tokens)."""
Rewritten = Callable[[Sequence[int], Sequence[Turn], Sequence[Message]], Sequence[int] | None]
"""The context of a turn that begins a branch; None: it extends the context so far. Its arguments are all
tokens so far, the turns of the policy, and the new messages."""
Decode = Callable[[Sequence[int]], str]


class Episode(Policy):
    """The policy in one episode.

    Args:
        sampling: its limit of tokens is that of all turns together.
        max_context_tokens: of the prompt, the turns and the environment together, in each branch.
        parking_timeout_s: for which an action under way is awaited when the episode is parked.
        written: awaited before an action begins and before its result is used.
        max_branches: that its turns may make.
        rewritten: asked at each turn for which the environment gives no context.
    """

    def __init__(
        self,
        sample: Sample,
        serve: Serve,
        observe: Observe,
        decode: Decode,
        *,
        sampling: SamplingSettings,
        max_context_tokens: int,
        parking_timeout_s: float,
        written: Written = not_written,
        max_branches: float = inf,
        rewritten: Rewritten | None = None,
    ) -> None:
        self._written = written
        self._sample, self._serve, self._observe, self._decode = sample, serve, observe, decode
        self._sampling, self._max_context_tokens = sampling, max_context_tokens
        self._parking_timeout_s, self._rewritten = parking_timeout_s, rewritten
        self._max_branches = max_branches
        self.id = sample.id
        self._num_turns = self._num_calls = 0
        """Turns, and calls after the last of them, that the environment has seen."""
        self._is_generating = False
        self._num_openings = 0
        """1: the first recorded turn is no turn of the policy, but what `open` has put after the prompt."""

    @property
    @override
    def context_ids(self) -> list[int]:
        branch = self._branch(self._sample.turns[self._num_turns - 1].num_tokens)
        return [*branch.context_ids, *branch.response_ids(self._sample.completion_ids)]

    @override
    def open(self, prompt_ids: Sequence[int]) -> None:
        turns, prompt = self._sample.turns, list(self._sample.prompt.ids)
        ids = list(prompt_ids[len(prompt) :])
        if list(prompt_ids[: len(prompt)]) != prompt:
            raise ValueError("the context of the first turn does not begin with the prompt")
        opening = turns[0].observation_ids if turns and not turns[0].num_tokens else []
        if turns and opening != ids:
            raise diverged()
        if ids and not turns:
            self._check_room(len(prompt_ids))
            turns.append(Turn(0, "stop", observation_ids=ids))
        self._num_turns = self._num_openings = 1 if ids else 0

    @override
    async def complete(
        self,
        messages: Sequence[Message] = (),
        *,
        max_tokens: int | None = None,
        context_ids: Sequence[int] | None = None,
    ) -> Completion:
        if self._is_generating:
            raise RuntimeError("an environment called Policy.complete while another turn was generated")
        turns = self._sample.turns
        if self._num_turns > self._num_openings:
            self._continue(turns[self._num_turns - 1], messages, context_ids)
        elif context_ids is not None:
            raise RuntimeError("the context of the first turn is set with Policy.open")
        if self._num_turns < len(turns) and self._sample.to_verify:
            await self._verify(max_tokens)
        if self._num_turns == len(turns):
            await self._generate(max_tokens)
            assert self._sample.finish_reason is not None
            text = self._decode(self._sample.turn_ids)
            turns.append(Turn(self._sample.num_tokens, self._sample.finish_reason, text=text))
        start = turns[self._num_turns - 1].num_tokens if self._num_turns else 0
        turn = turns[self._num_turns]
        self._num_turns, self._num_calls = self._num_turns + 1, 0
        ids = self._sample.completion_ids[start : turn.num_tokens]
        logprobs = self._sample.behavior_logprobs[start : turn.num_tokens]
        num_context = self._branch(start).num_tokens
        return Completion(turn.text, turn.finish_reason, turn.num_tokens - start, ids, logprobs, num_context)

    @override
    async def call(self, action: Callable[[], Awaitable[str]]) -> str:
        if not self._num_turns:
            raise RuntimeError("an environment called Policy.call before the first Policy.complete")
        results = self._sample.turns[self._num_turns - 1].results
        place, self._num_calls = self._num_calls, self._num_calls + 1
        if place == len(results):
            results.append(None)
        if (known := results[place]) is not None:
            return known
        await self._written()
        task = asyncio.ensure_future(action())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task], timeout=self._parking_timeout_s)
            raise
        finally:
            if task.done() and not task.cancelled() and not task.exception():
                # A ledger stores it, so it must be Unicode: the environment sees what will be read again.
                results[place] = str(task.result()).encode(errors="replace").decode()
            task.cancel()
        result = results[place]
        assert result is not None
        await self._written()
        return result

    async def _generate(self, max_tokens: int | None) -> None:
        self._sample.turn_limit = self._sample.turn_start + (max_tokens or inf)
        self._is_generating = True
        try:
            await self._serve(self._sample)
        finally:
            self._is_generating = False

    async def _verify(self, max_tokens: int | None) -> None:
        """Let an engine verify a recorded turn. If it changes, it is generated to its end, and the turns
        after it are gone."""
        self._sample.verified_turn = self._num_turns
        try:
            await self._generate(max_tokens)
        finally:
            self._sample.verified_turn = None

    def _branch(self, num_tokens: int) -> Branch:
        """The branch of the last turn that the environment has seen, up to a completion token."""
        before = self._sample.turns[: self._num_turns - 1]
        return branches_of(self._sample.prompt.ids, before, num_tokens)[-1]

    def _continue(self, last: Turn, given: Sequence[Message], context_ids: Sequence[int] | None) -> None:
        """Put the environment's tokens after the last turn, unless they are there."""
        sample = self._sample
        last_id = sample.completion_ids[last.num_tokens - 1] if sample.completion_ids else None
        messages = _unicode(given)
        if context_ids is None and self._rewritten:
            seen = sample.turns[self._num_openings : self._num_turns]
            context_ids = self._rewritten(self.context_ids, seen, messages)
        begins_branch = context_ids is not None
        ids = self._observe(messages, last_id) if context_ids is None else list(context_ids)
        if last.observation_ids:
            if (last.observation_ids, last.begins_branch) != (ids, begins_branch):
                raise diverged()
            return
        if begins_branch and len(sample.branches) >= self._max_branches:
            raise EpisodeOver
        num_before = 0 if begins_branch else sample.num_context_tokens
        self._check_room(num_before + len(ids), is_cut_off=last.finish_reason == "length")
        last.messages, last.begins_branch = messages, begins_branch
        last.observation_ids, sample.finish_reason = ids, None

    def _check_room(self, num_context: int, *, is_cut_off: bool = False) -> None:
        """Raises EpisodeOver if no turn fits after a context of so many tokens."""
        sample = self._sample
        is_full = num_context >= self._max_context_tokens
        if is_cut_off or is_full or sample.num_tokens >= self._sampling.max_completion_tokens:
            sample.finish_reason = "length"
            raise EpisodeOver


def _unicode(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Return messages that tokenizer and ledger can encode: JSON can spell halves of surrogate pairs, and a
    policy writes JSON in tool calls."""
    text = json.dumps(msgspec.to_builtins(list(messages)), ensure_ascii=False)
    replaced: list[dict[str, object]] = json.loads(text.encode(errors="replace"))
    return replaced


def diverged() -> EnvironmentFailed:
    """The failure of an environment that does not repeat what it said before."""
    return EnvironmentFailed("not repeatable", "after an interruption it said something else than before")
