"""The behavior policies of kl_study.py: their responses, and the KL of these to on-policy.

The embedded engine generates the responses and records the log-prob of each drawn token. A KL needs the whole
distribution. So `transformers` computes the responses again, with the weights mixed in the same way, the KV
cache kept or not.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tailrace.engine.base import GenerationRequest
from tailrace.engine.native.engine import NativeEngine
from tailrace.engine.settings import NativeEngineSettings, SamplingSettings
from tailrace.types import KV, Prompt

LENGTH, MAX_LAG = 128, 32
"""L and g_max of PipelineRL (5.1), in tokens and in optimizer steps."""
BATCH = 64
"""Largest number of responses that are computed together."""
ROOM = 2**19
"""Tokens of the engine's KV cache and of a prefill: all responses start at once, and none is preempted."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Policy:
    """`models[i]` generates from token `starts[i]` of a response to the next start."""

    models: Sequence[PreTrainedModel]
    starts: Sequence[int] = (0,)
    kv: KV = "keep"

    def segments(self, length: int) -> Iterator[tuple[PreTrainedModel, int, int]]:
        """Each model and the tokens [start, stop) that it generates of a response of `length` tokens."""
        for model, start, stop in zip(self.models, self.starts, [*self.starts[1:], length], strict=True):
            if start < length:
                yield model, start, min(stop, length)


@dataclass(slots=True)
class Response:
    """A response of a policy, and the log-probs that the engine recorded."""

    prompt_ids: Sequence[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def switch_positions(lag: int, length: int = LENGTH) -> list[int]:
    """t_1 ... t_g (below eq. 8): the first update takes twice as long. Those beyond the length are left out.

    Example:
        >>> switch_positions(3)
        [8, 12, 16]
    """
    positions = [(update + 1) * length // MAX_LAG for update in range(1, lag + 1)]
    return [position for position in positions if position < length]


def mixed(models: Sequence[PreTrainedModel], lag: int, kv: KV) -> Policy:
    """A policy that starts with `models[0]` and takes the next model at each switch (eq. 8)."""
    starts = [0, *switch_positions(lag)]
    return Policy(models[: len(starts)], starts, kv)


def respond(folder: Path, policy: Policy, prompts: Sequence[Prompt]) -> list[Response]:
    """A response to each prompt. The noise does not depend on the policy.

    Args:
        folder: the Hugging Face folder of the policy's first model.
    """
    responses = [Response(prompt.ids) for prompt in prompts]
    settings = NativeEngineSettings(
        max_num_seqs=len(responses), kv_cache_tokens=ROOM, max_prefill_tokens=ROOM
    )
    engine = NativeEngine.from_pretrained(folder, settings, SamplingSettings(max_completion_tokens=LENGTH))
    for seed, response in enumerate(responses):
        engine.submit(GenerationRequest(str(seed), response.prompt_ids, (), seed))
    updates = dict(zip(policy.starts[1:], policy.models[1:], strict=True))
    for position in range(LENGTH):
        outputs = []
        if position in updates:
            outputs += engine.load(updates[position].state_dict(), version=position, kv=policy.kv)
        for output in outputs + engine.step():
            responses[int(output.id)].ids += output.ids
            responses[int(output.id)].logprobs += output.behavior_logprobs
    assert engine.idle and not engine.usage().num_preempted
    return responses


@torch.no_grad()
def replay(policy: Policy, ids: Tensor, num_prompt: int) -> Tensor:
    """Log-probs [B, T, V], float64, of each next token of given responses under the policy.

    Args:
        ids: [B, num_prompt + T], int64. Shorter responses are padded on the right; attention is causal.
    """
    before = num_prompt - 1
    segments = list(policy.segments(ids.shape[1] - num_prompt))
    if policy.kv == "recompute":
        whole = {model: model(ids[:, :-1]).logits for model in dict.fromkeys(m for m, _, _ in segments)}
        parts = [whole[model][:, before + start : before + stop] for model, start, stop in segments]
    else:
        # The last token before a switch is not in the cache yet: the new weights read it.
        cache, parts, read = DynamicCache(), [], 0
        for model, start, stop in segments:
            logits = model(ids[:, read : before + stop], past_key_values=cache, use_cache=True).logits
            parts.append(logits[:, start - stop :])
            read = before + stop
    return torch.log_softmax(torch.cat(parts, 1).double(), -1)


def divergence(
    responses: Sequence[Response], behaviour: Policy, target: PreTrainedModel
) -> tuple[Array, float]:
    """KL(behavior || target), exact over the vocabulary, at each token of the responses.

    The target is computed in the same pieces as the behavior policy, so equal weights give equal bits.

    Returns:
        [N, LENGTH] in nats, NaN after the end of a response; and the largest difference between the log-probs
        that the engine recorded and those of the replay.
    """
    kl, error = np.full((len(responses), LENGTH), np.nan), 0.0
    twin = replace(behaviour, models=[target] * len(behaviour.models))
    for places in _batches(responses):
        group = [responses[place] for place in places]
        num_prompt, longest = len(group[0].prompt_ids), len(group[-1].ids)
        padding = [[0] * (longest - len(r.ids)) for r in group]
        ids = torch.tensor([[*r.prompt_ids, *r.ids, *pad] for r, pad in zip(group, padding, strict=True)])
        p, q = replay(behaviour, ids, num_prompt), replay(twin, ids, num_prompt)
        exact = (p.exp() * (p - q)).sum(-1).numpy()
        drawn = p.gather(2, ids[:, num_prompt:, None])[:, :, 0].numpy()
        for row, (place, response) in enumerate(zip(places, group, strict=True)):
            end = len(response.ids)
            kl[place, :end] = exact[row, :end]
            error = max(error, float(np.abs(drawn[row, :end] - response.logprobs).max()))
    return kl, error


def _batches(responses: Sequence[Response]) -> Iterator[list[int]]:
    """Indices of responses to equally long prompts, the shortest response first: no batch needs a mask."""
    of_length: dict[int, list[int]] = defaultdict(list)
    for place in sorted(range(len(responses)), key=lambda place: len(responses[place].ids)):
        of_length[len(responses[place].prompt_ids)].append(place)
    for places in of_length.values():
        yield from (places[begin : begin + BATCH] for begin in range(0, len(places), BATCH))
