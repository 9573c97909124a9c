"""The tokens of a seed are those in reference_tokens.json. They were drawn one a step, and read at once."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from native_cases import PROMPTS, finish, random_ids
from test_native_adapters import SCALE, adapter_of

from helpers.tiny_models import LETTERS, tiny_model
from tailrace.contracts.engine import GenerationRequest
from tailrace.types import SamplingParams

FILE = Path(__file__).with_name("reference_tokens.json")
KINDS = {
    "plain": {},
    "greedy": {"greedy": True},
    "cut": {"sampling": SamplingParams(150, temperature=0.9, top_k=7, top_p=0.9)},
    "stop": {"sampling": SamplingParams(90, temperature=1.1, stop_token_ids=(3, 17))},
}
"""Of the requests of a group, which share their prompt."""


class Recorder:
    """All outputs of an engine, the parts of a request put together."""

    def __init__(self, engine):
        self.engine, self.ids, self.logprobs, self.reasons = engine, defaultdict(list), defaultdict(list), {}

    def add(self, outputs):
        for output in outputs:
            self.ids[output.id] += output.ids
            self.logprobs[output.id] += output.behavior_logprobs
            self.reasons[output.id] = output.finish_reason

    def step(self, times):
        for _ in range(times):
            self.add(self.engine.step())

    def found(self):
        self.add(finish(self.engine).values())
        assert self.engine.usage().num_generated == sum(map(len, self.ids.values()))
        return {
            id: ["".join(LETTERS[each] for each in ids), round(sum(self.logprobs[id]), 3), self.reasons[id]]
            for id, ids in sorted(self.ids.items())
        }


def whole_weights(engine):
    """Groups of any lengths; requests that are aborted and come back; two updates in flight."""
    recorder = Recorder(engine)
    requests = [
        GenerationRequest(f"{id} {kind}", prompt, (), 10 * seed + number, **words)
        for seed, (id, prompt) in enumerate(PROMPTS.items())
        for number, (kind, words) in enumerate(KINDS.items())
    ]
    for request in requests[:20]:
        engine.submit(request)
    recorder.step(12)
    for request in requests[20:]:
        engine.submit(request)
    recorder.step(13)
    for seed, (id, kind) in enumerate([("5", "plain"), ("40", "cut"), ("130", "greedy")]):
        recorder.add([engine.abort(f"{id} {kind}")])
        recorder.step(seed)
        again = next(each for each in requests if each.id == f"{id} {kind}")
        words = KINDS[kind]
        had = recorder.ids[again.id]
        engine.submit(GenerationRequest(again.id, again.prompt_ids, had, again.seed, **words))
    for version, kv in ((1, "keep"), (2, "recompute")):
        recorder.add(engine.load(tiny_model("qwen3", seed=version).state_dict(), version=version, kv=kv))
        recorder.step(15)
    return recorder.found()


def adapters(engine, model):
    """Requests of three versions at the same time, of which one is dropped."""
    recorder = Recorder(engine)
    for version in (1, 2):
        recorder.add(engine.load(adapter_of(model, version), version=version, kv="keep"))
    for seed, (pin, length) in enumerate([(1, 9), (2, 9), (None, 9), (2, 33), (None, 70)]):
        engine.submit(GenerationRequest(f"{seed}", random_ids(length, length), (), seed, pin=pin))
    recorder.step(20)
    recorder.add(engine.load(adapter_of(model, 3), version=3, kv="keep"))
    assert engine.refused == ["0"]
    return recorder.found()


@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read a step late"])
@pytest.mark.parametrize("case", ["whole weights", "adapters"])
def test_the_tokens_of_a_seed_are_those_that_were_recorded(make_engine, models, case, late):
    """Whether the tokens of a step are read at once or while the next one runs."""
    if case == "whole weights":
        engine = make_engine(max_completion_tokens=100)
        engine._reads_late = late
        found = whole_weights(engine)
    else:
        engine = make_engine(adapter_scale=SCALE, num_versions=2)
        engine._reads_late = late
        found = adapters(engine, models["qwen3"][1])
    expected = json.loads(FILE.read_text())[case]
    for id, (ids, total, reason) in expected.items():
        assert found[id] == [ids, pytest.approx(total, abs=2e-3), reason], id
    assert found.keys() == expected.keys()
