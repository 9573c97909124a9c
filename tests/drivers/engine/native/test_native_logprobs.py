"""The recorded log-probs are those of transformers' forward, whatever happened to the request."""

import pytest
import torch
from native_cases import (
    PROMPTS,
    assert_close,
    assert_consistent,
    assert_undisturbed,
    finish,
    random_ids,
    reference,
    submit_all,
)

from tailrace.contracts.engine import GenerationRequest
from tailrace.drivers.engine.native.cache import capacities
from tailrace.drivers.engine.settings import NativeEngineSettings


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "mistral"])
def test_short_and_long_in_one_batch_equal_transformers(make_engine, models, family):
    engine = make_engine(family)
    submit_all(engine, PROMPTS)
    for id, output in finish(engine).items():
        assert len(output.ids) == 60
        assert_close(output, reference(models[family][1], PROMPTS[id], output.ids))


def test_a_response_that_moves_through_four_tiers_equals_transformers(make_engine, models):
    assert capacities(512)[:4] == [80, 128, 204, 327]
    engine = make_engine(max_completion_tokens=340)
    submit_all(engine, {"a": random_ids(1, 5), "b": random_ids(2, 60)})
    for id, output in finish(engine).items():
        prompt = {"a": random_ids(1, 5), "b": random_ids(2, 60)}[id]
        assert_close(output, reference(models["qwen3"][1], prompt, output.ids))


def test_resumed_on_another_replica_gives_the_tokens_of_an_undisturbed_run(make_engine, models):
    prompt, first = PROMPTS["17"], make_engine()
    submit_all(first, PROMPTS)
    first.submit(GenerationRequest("x", prompt, (), 7))
    for _ in range(23):
        first.step()
    part = first.abort("x")
    assert part.finish_reason is None and len(part.ids) == 23
    assert_consistent(first)

    second = make_engine()
    submit_all(second, PROMPTS)
    second.submit(GenerationRequest("x", prompt, part.ids, 7))
    assert_undisturbed([part, finish(second)["x"]], make_engine(), models["qwen3"][1])


def test_preempted_responses_give_the_same_tokens_and_logprobs(make_engine, models):
    roomy, tight = make_engine(), make_engine(settings=NativeEngineSettings(kv_cache_tokens=400))
    for engine in (roomy, tight):
        submit_all(engine, PROMPTS)
    expected, preempted = finish(roomy), finish(tight)
    assert roomy.usage().num_preempted == 0 and tight.usage().num_preempted > 0
    for id, output in preempted.items():
        assert output.ids == expected[id].ids
        assert_close(output, reference(models["qwen3"][1], PROMPTS[id], output.ids))


def test_reports_and_aborts_add_up_to_the_completion(make_engine):
    engine = make_engine()
    submit_all(engine, PROMPTS)
    gained = {id: [] for id in PROMPTS}
    while not engine.idle:
        for output in (*engine.step(), *engine.report()):
            gained[output.id] += output.ids
    again = make_engine()
    submit_all(again, PROMPTS)
    assert gained == {id: output.ids for id, output in finish(again).items()}


def test_bfloat16_stays_near_float32(make_engine, models):
    engine = make_engine(settings=NativeEngineSettings(dtype="bfloat16"))
    submit_all(engine, PROMPTS)
    errors = [
        torch.tensor(output.behavior_logprobs) - reference(models["qwen3"][1], PROMPTS[id], output.ids)
        for id, output in finish(engine).items()
    ]
    assert torch.cat(errors).abs().mean() < 0.1


@pytest.mark.parametrize("num_prefix", [1, 5])
def test_a_shorter_or_longer_sequence_is_probed_with_the_prefix_of_the_last_one(
    make_engine, models, num_prefix
):
    engine, ids = make_engine(), random_ids(3, 40)
    for length in (20, 40, 12):
        warm, cold = engine.probe(ids[:length], num_prefix)
        assert engine.score(ids[:length], num_prefix) == cold
        expected = reference(models["qwen3"][1], ids[:num_prefix], ids[num_prefix:length])
        for logprobs in (warm, cold):
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
