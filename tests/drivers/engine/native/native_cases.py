"""Requests for the embedded engine, and what transformers says of the same tokens."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers.tiny_models import VOCABULARY
from tailrace.contracts.engine import GenerationOutput, GenerationRequest
from tailrace.drivers.engine.native.engine import NativeEngine

TEMPERATURE = 0.8


def random_ids(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


@torch.no_grad()
def reference(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Log-prob of each completion token by transformers' own forward, [num_tokens]."""
    ids = torch.tensor([[*prompt, *completion]])
    return _chosen(model(ids).logits[0, len(prompt) - 1 : -1], completion)


@torch.no_grad()
def mixed_reference(
    old: PreTrainedModel, new: PreTrainedModel, tokens: Sequence[int], completion: Sequence[int]
) -> Tensor:
    """Of a completion by `new`, where `old` computed the cache of all `tokens` before it but the last."""
    cache = old(torch.tensor([tokens[:-1]]), use_cache=True).past_key_values
    rest = torch.tensor([[tokens[-1], *completion]])
    return _chosen(new(rest, past_key_values=cache).logits[0, :-1], completion)


def _chosen(logits: Tensor, ids: Sequence[int]) -> Tensor:
    logprobs = torch.log_softmax(logits.float() / TEMPERATURE, -1)
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]


def assert_close(output: GenerationOutput, expected: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(output.behavior_logprobs), expected, atol=1e-4, rtol=0)


def assert_consistent(engine: NativeEngine) -> None:
    """Nothing leaked: sequences wait or run; those that run have a slot of their own, within the budget."""
    scheduler = engine._scheduler
    cache = scheduler.cache
    assert cache.num_occupied <= cache.num_allocated
    assert cache.size <= cache.budget and cache.num_allocated <= cache.budget
    for tier in cache.tiers:
        held = [*tier.running, *tier.suspended]
        assert len(held) <= tier.num_slots
        assert all(len(sequence.tokens) - 1 <= tier.capacity for sequence in held)
    with torch.inference_mode():
        places = sorted(cache.slots().values())
    assert all(start + num <= after for (start, num), (after, _) in pairwise([*places, (cache.size, 0)]))
    cached = [sequence.id for sequence in cache.sequences()]
    assert sorted(cached) == sorted(scheduler.running)
    assert scheduler.running.keys().isdisjoint(scheduler.waiting)


def finish(engine: NativeEngine) -> dict[str, GenerationOutput]:
    """Step until nothing is left; nothing may leak at any step."""
    ended: dict[str, GenerationOutput] = {}
    while not engine.idle:
        ended |= {output.id: output for output in engine.step()}
        assert_consistent(engine)
    return ended


def assert_undisturbed(
    parts: Sequence[GenerationOutput], undisturbed: NativeEngine, model: PreTrainedModel
) -> None:
    """The parts are what PROMPTS["17"] with seed 7 gives in a run of its own, with the model's log-probs."""
    prompt = PROMPTS["17"]
    undisturbed.submit(GenerationRequest("x", prompt, (), 7))
    expected = finish(undisturbed)["x"].ids
    assert [id for part in parts for id in part.ids] == expected
    logprobs = torch.tensor([logprob for part in parts for logprob in part.behavior_logprobs])
    torch.testing.assert_close(logprobs, reference(model, prompt, expected), atol=1e-4, rtol=0)


def submit_all(engine: NativeEngine, prompts: Mapping[str, Sequence[int]]) -> None:
    """One request a prompt; seeds by their order."""
    for seed, (id, prompt) in enumerate(prompts.items()):
        engine.submit(GenerationRequest(id, prompt, (), seed))


PROMPTS = {f"{length}": random_ids(length, length) for length in (1, 2, 5, 17, 40, 40, 79, 130)}
"""Short and long together."""
