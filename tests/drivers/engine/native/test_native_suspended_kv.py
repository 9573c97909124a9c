"""What was aborted goes on from its own keys and values, where there is room for them."""

import random

import pytest
from native_cases import (
    PROMPTS,
    assert_close,
    assert_consistent,
    assert_undisturbed,
    finish,
    mixed_reference,
    reference,
    submit_all,
)

from helpers.tiny_models import tiny_model
from tailrace.contracts.engine import GenerationRequest
from tailrace.drivers.engine.settings import NativeEngineSettings

PROMPT = PROMPTS["17"]


def abort_after(engine, steps):
    """Some of a completion of PROMPT, and the request that goes on with it."""
    submit_all(engine, {id: PROMPTS[id] for id in ("5", "40")})
    engine.submit(GenerationRequest("x", PROMPT, (), 7))
    for _ in range(steps):
        engine.step()
    part = engine.abort("x")
    assert_consistent(engine)
    return part, GenerationRequest("x", PROMPT, part.ids, 7)


def test_an_aborted_request_goes_on_without_being_computed_again(make_engine, models):
    engine = make_engine()
    part, again = abort_after(engine, 23)
    before = engine.usage().num_prefilled
    engine.submit(again)
    rest = finish(engine)["x"]
    assert engine.usage().num_prefilled == before
    assert_undisturbed([part, rest], make_engine(), models["qwen3"][1])


def test_over_new_weights_the_kept_cache_is_the_old_one_s(make_engine, models):
    engine, new = make_engine(), tiny_model("qwen3", seed=1)
    part, again = abort_after(engine, 23)
    before = engine.usage().num_prefilled
    engine.load(new.state_dict(), version=1, kv="keep")
    engine.submit(again)
    rest = finish(engine)["x"]
    assert engine.usage().num_prefilled == before
    assert_close(rest, mixed_reference(models["qwen3"][1], new, [*PROMPT, *part.ids], rest.ids))


def test_recomputing_forgets_what_is_parked(make_engine):
    engine, new = make_engine(), tiny_model("qwen3", seed=1)
    part, again = abort_after(engine, 23)
    finish(engine)
    engine.load(new.state_dict(), version=1, kv="recompute")
    before = engine.usage().num_prefilled
    engine.submit(again)
    rest = finish(engine)["x"]
    assert engine.usage().num_prefilled == before + len(PROMPT) + len(part.ids) - 1
    assert_close(rest, reference(new, [*PROMPT, *part.ids], rest.ids))


@pytest.mark.parametrize("change", ["other tokens", "from nothing"])
def test_a_request_that_comes_back_different_is_computed(make_engine, models, change):
    engine = make_engine()
    part, _ = abort_after(engine, 23)
    had = part.ids[:9] if change == "other tokens" else []
    engine.submit(GenerationRequest("x", PROMPT, had, 7))
    rest = finish(engine)["x"]
    assert_close(rest, reference(models["qwen3"][1], [*PROMPT, *had], rest.ids))


def test_what_is_parked_gives_way_to_what_runs_within_one_budget(make_engine, models):
    """Requests come, are aborted and come back at random in a cache that holds few of them."""
    engine, chance = make_engine(settings=NativeEngineSettings(kv_cache_tokens=700)), random.Random(3)
    had = {id: [] for id in PROMPTS}
    running, done = set(), {}
    while len(done) < len(PROMPTS):
        for id in sorted(PROMPTS.keys() - running - done.keys()):
            if chance.random() < 0.3:
                engine.submit(GenerationRequest(id, PROMPTS[id], had[id], len(PROMPTS[id])))
                running.add(id)
        for output in engine.step():
            had[output.id] += output.ids
            running.remove(output.id)
            done[output.id] = had[output.id]
        for id in sorted(running):
            if chance.random() < 0.05:
                output = engine.abort(id)
                had[id] += output.ids
                running.remove(id)
        assert_consistent(engine)
    whole = make_engine()
    for id, prompt in PROMPTS.items():
        whole.submit(GenerationRequest(id, prompt, (), len(prompt)))
    assert done == {id: output.ids for id, output in finish(whole).items()}
