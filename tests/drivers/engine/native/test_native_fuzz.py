"""Requests of all kinds at random moments: each token is the one that the weights of its version draw after
the tokens before it with the noise of its place, whatever is drafted meanwhile.

A plain forward pass of transformers says which one that is. Where it says another one, the two candidates
must lie within rounding of each other, which at most one token in 10,000 may.
"""

import copy
import random
from dataclasses import dataclass, field
from itertools import count

import pytest
import torch
from forced_drafts import KINDS, ForcedDrafts, make_rows_free
from native_cases import assert_consistent
from test_native_adapters import SCALE, adapter_of, merged

from helpers.tiny_models import FAMILIES, LETTERS, VOCABULARY
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.sampler import draw, noise_keys, noise_stream
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.types import SamplingParams

TIE, STEPS, LEAST = 1e-4, 300, 10_000
KEPT = 3
"""Adapters that an engine serves at the same time."""


@dataclass
class Request:
    """One request over all its calls, with its tokens, their log-probs and versions."""

    prompt: list[int]
    seed: int
    greedy: bool
    sampling: SamplingParams
    pin: int | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str | None = None


class Fuzz:
    """An engine to which things happen, and the models of all its versions."""

    def __init__(self, make_engine, models, drafts, adapted, seed):
        self.chance = chance = random.Random(seed)
        family = chance.choice(FAMILIES)
        self.models, self.version, self.adapted = {0: models[family][1]}, 0, adapted
        self.engine = make_engine(
            family,
            # Little of everything: requests wait, are preempted, and are computed in parts.
            NativeEngineSettings(
                max_num_seqs=6, kv_cache_tokens=700, max_prefill_tokens=40, drafts="auto" if drafts else "off"
            ),
            SamplingSettings(max_completion_tokens=120, stop=("never said",)),
            **({"adapter_scale": SCALE, "num_versions": KEPT} if adapted else {}),
        )
        if drafts:
            drafter = self.engine._drafter
            self.engine._drafter = drafter if drafts == "matched" else ForcedDrafts(drafts, self.engine)
            make_rows_free(self.engine._drafter)
        else:
            self.engine._reads_late = chance.random() < 0.5
        lengths = [chance.choice((1, 2, 5, 30, 90, 150)) for _ in range(6)]
        self.prompts = [[chance.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
        self.live, self.parked, self.ended = dict[str, Request](), dict[str, Request](), list[Request]()
        self.num_made = self.num_refused = 0

    def run(self):
        for _ in range(STEPS):
            kind = self.chance.random()
            if kind < 0.35 and len(self.live) < 14:
                self.submit()
            elif kind < 0.42 and self.live:
                self.park(self.chance.choice([*self.live]))
            elif kind < 0.46:
                self.load()
            elif kind < 0.50:
                self.take(self.engine.report())
            self.step()
        while not self.engine.idle:
            self.step()
        assert not self.live

    def step(self):
        self.take(self.engine.step())
        assert_consistent(self.engine)
        for id in self.engine.refused:
            assert self.live[id].pin not in range(self.version - KEPT + 1, self.version + 1)
            self.ended.append(self.live.pop(id))
            self.num_refused += 1
        self.engine.refused.clear()

    def submit(self):
        if self.parked and self.chance.random() < 0.6:
            id = self.chance.choice([*self.parked])
            request = self.parked.pop(id)
        else:
            id, request = f"r{self.num_made}", self.new_request()
            self.num_made += 1
        self.live[id] = request
        others = [each.tokens for each in self.ended if each.prompt == request.prompt and each.tokens]
        self.engine.submit(
            GenerationRequest(
                id,
                request.prompt,
                [*request.tokens],
                request.seed,
                greedy=request.greedy,
                sampling=request.sampling,
                pin=request.pin,
                references=others[-4:],
            )
        )

    def new_request(self):
        choose = self.chance.choice
        sampling = SamplingParams(
            choose((1, 3, 20, 60, 120)),
            temperature=choose((1.0, 0.7, 1.5, 0.1)),
            top_p=choose((1.0, 1.0, 0.9)),
            top_k=choose((0, 0, 5)),
            stop_token_ids=choose(((), (3, 9))),
            stop=choose(((), (), ("AB", LETTERS[7] + LETTERS[2], "C"))),
        )
        pinned = self.adapted and self.chance.random() < 0.6
        pin = self.chance.randrange(max(0, self.version - KEPT), self.version + 1) if pinned else None
        greedy = self.chance.random() < 0.1
        return Request(choose(self.prompts), self.chance.randrange(2**40), greedy, sampling, pin)

    def park(self, id):
        """Its refusal may not have been taken yet; then nothing of it is left."""
        if output := self.engine.abort(id):
            self.take([output])
            self.parked[id] = self.live.pop(id)

    def load(self):
        base, version = self.models[0], self.version + 1
        if self.adapted:
            tensors = adapter_of(base, version)
            self.models[version] = merged(base, tensors)
        else:
            generator = torch.Generator().manual_seed(version)
            self.models[version] = new = copy.deepcopy(self.models[self.version])
            with torch.no_grad():
                for weight in new.parameters():
                    weight += 0.03 * torch.randn(weight.shape, generator=generator)
            tensors = {name: weight.detach().clone() for name, weight in new.named_parameters()}
        self.take(self.engine.load(tensors, version=version, kv="recompute"))
        self.version = version

    def take(self, outputs):
        for output in outputs:
            request = self.live[output.id]
            assert output.version == (self.version if request.pin is None else request.pin)
            request.tokens += output.ids
            request.logprobs += output.behavior_logprobs
            request.versions += [output.version] * len(output.ids)
            if output.finish_reason:
                request.finish = output.finish_reason
                self.ended.append(self.live.pop(output.id))

    def checked(self):
        """Assert each log-prob and each end. Returns the tokens, and those that are others by rounding."""
        num_tokens = num_ties = 0
        for request in [*self.ended, *self.parked.values()]:
            assert_ended(request)
            for version in {*request.versions}:
                own = torch.tensor(request.versions) == version
                drawn, nudged = drawn_by(self.models[version], request)
                tokens = torch.tensor(request.tokens)
                logprobs = torch.tensor(request.logprobs)[own]
                same = (drawn.ids == tokens)[own]
                torch.testing.assert_close(logprobs[same], drawn.logprobs[own][same], atol=1e-4, rtol=0)
                assert torch.equal(nudged.ids[own], tokens[own])
                num_tokens += len(same)
                num_ties += int((~same).sum())
        return num_tokens, num_ties


@torch.no_grad()
def drawn_by(model, request):
    """The draw at each place of a request, and the same where its own token is likelier by a rounding."""
    prompt, ids = request.prompt, torch.tensor(request.tokens)
    logits = model(torch.tensor([[*prompt, *request.tokens]])).logits[0, len(prompt) - 1 : -1].float()
    keys = noise_keys(torch.tensor(noise_stream(request.seed)), torch.arange(len(ids)))
    greedy, nudged = range(len(ids)) if request.greedy else (), logits.clone()
    nudged[range(len(ids)), ids] += TIE
    both = [draw(each, keys, [request.sampling] * len(ids), [*greedy]) for each in (logits, nudged)]
    return both[0], both[1]


def assert_ended(request):
    """It has ended at the first token that ends it."""
    text, sampling = "".join(LETTERS[id] for id in request.tokens), request.sampling
    ends = [place for place, id in enumerate(request.tokens) if id in sampling.stop_token_ids]
    ends += [found + len(stop) - 1 for stop in sampling.stop if (found := text.find(stop)) >= 0]
    last = len(request.tokens) - 1
    if request.finish == "stop":
        assert min(ends) == last
    else:
        assert not ends
        assert (request.finish == "length") == (last + 1 == sampling.max_completion_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [None, "matched", *KINDS])
def test_each_token_is_the_one_that_its_weights_draw(make_engine, models, drafts):
    num_tokens = num_ties = num_refused = num_preempted = num_accepted = 0
    for seed in count():
        fuzz = Fuzz(make_engine, models, drafts, seed % 2 == 1, seed)
        fuzz.run()
        found, ties = fuzz.checked()
        usage = fuzz.engine.usage()
        assert fuzz.version > 3 and usage.num_generated == found
        num_tokens, num_ties = num_tokens + found, num_ties + ties
        num_refused, num_preempted = num_refused + fuzz.num_refused, num_preempted + usage.num_preempted
        num_accepted += usage.decoded.accepted
        if num_tokens >= LEAST:
            break
    assert num_preempted and num_refused and num_ties <= num_tokens / LEAST
    assert (num_accepted > num_tokens / 50) == (drafts not in (None, "wrong"))
