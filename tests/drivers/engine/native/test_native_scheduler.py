"""Admission, sharing, limits and stops, and the books at every step."""

import random

import pytest
from native_cases import (
    PROMPTS,
    TEMPERATURE,
    assert_close,
    assert_consistent,
    finish,
    random_ids,
    reference,
    submit_all,
)

from helpers.tiny_models import LETTERS, save_tiny_model, tiny_model
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.cache import capacities
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.errors import ConfigError


def test_the_samples_of_a_group_share_one_prefill(make_engine):
    engine, prompt = make_engine(), random_ids(0, 10)
    submit_all(engine, {f"{index}": prompt for index in range(8)})
    engine.step()
    assert engine.usage().num_running == 8
    assert engine.usage().num_prefilled == 9


def test_decode_steps_are_summed_with_their_requests_and_positions(make_engine):
    """Two prompts of 10 tokens: the positions are 20 in the first step, and two more in each."""
    engine = make_engine(max_completion_tokens=3)
    submit_all(engine, {"a": random_ids(0, 10), "b": random_ids(1, 10)})
    finish(engine)
    sums = engine.usage().decoded
    assert (sums.steps, sums.running, sums.positions, sums.prefilled) == (3, 6, 20 + 22 + 24, 2 * 9)
    assert sums.seconds > 0 and sums.prefill_s > 0


def test_a_late_sibling_copies_the_prompt_of_one_that_runs(make_engine):
    engine, prompt = make_engine(), random_ids(0, 10)
    engine.submit(GenerationRequest("early", prompt, (), 0))
    engine.step()
    engine.submit(GenerationRequest("late", prompt, (), 1))
    ended = finish(engine)
    assert engine.usage().num_prefilled == 9
    assert len(ended["late"].ids) == 60


def test_a_step_prefills_no_more_than_its_budget_and_a_longer_context_in_parts(make_engine):
    """Another one that does not fit any more waits for the next step and is computed at once."""
    engine = make_engine(settings=NativeEngineSettings(max_prefill_tokens=30))
    submit_all(engine, {"a": random_ids(0, 50), "b": random_ids(1, 14), "c": random_ids(2, 14), "d": [1, 2]})
    steps = []
    for _ in range(3):
        engine.step()
        usage = engine.usage()
        steps.append((usage.num_running, usage.num_prefilled, usage.num_generated))
    assert steps == [(1, 30, 0), (1, 49, 1), (4, 49 + 13 + 13 + 1, 1 + 4)]


@pytest.mark.parametrize("late", [False, True])
def test_a_long_prompt_does_not_stop_the_others(make_engine, models, late):
    """While it is computed, each step gives each of them a token. Its samples share it."""
    engine = make_engine(settings=NativeEngineSettings(max_prefill_tokens=32), max_completion_tokens=40)
    engine._reads_late = late
    submit_all(engine, {f"{index}": random_ids(index, 8) for index in range(4)})
    engine.step()
    long = random_ids(9, 300)
    for id in ("x", "y"):
        engine.submit(GenerationRequest(id, long, (), 7 if id == "x" else 8))
    num_steps = -(-299 // 32)
    for _ in range(1, num_steps):
        before = engine.usage()
        engine.step()
        usage = engine.usage()
        assert usage.num_prefilled - before.num_prefilled == 32
        assert (usage.num_generated - before.num_generated, usage.num_waiting) == (4, 1)
    ended = finish(engine)
    assert engine.usage().num_prefilled == 4 * 7 + 299
    for id in ("x", "y"):
        assert_close(ended[id], reference(models["qwen3"][1], long, ended[id].ids))


def test_new_weights_compute_the_whole_of_a_context_of_which_a_part_is_computed(make_engine, models):
    new, long = tiny_model("qwen3", seed=1), random_ids(9, 100)
    for kv in ("keep", "recompute"):
        engine = make_engine(settings=NativeEngineSettings(max_prefill_tokens=32))
        engine.submit(GenerationRequest("x", long, (), 7))
        engine.step()
        assert engine.load(new.state_dict(), version=1, kv=kv) == []
        output = finish(engine)["x"]
        assert engine.usage().num_prefilled == 32 + 99
        assert_close(output, reference(new, long, output.ids))


def test_a_context_of_which_a_part_is_computed_is_computed_again_after_an_abort(make_engine):
    engine, long = make_engine(settings=NativeEngineSettings(max_prefill_tokens=32)), random_ids(9, 100)
    engine.submit(GenerationRequest("x", long, (), 7))
    engine.step()
    assert engine.abort("x").ids == []
    assert_consistent(engine)
    engine.submit(GenerationRequest("x", long, (), 7))
    ended = finish(engine)["x"]
    assert engine.usage().num_prefilled == 32 + 99
    whole = make_engine()
    whole.submit(GenerationRequest("x", long, (), 7))
    assert finish(whole)["x"].ids == ended.ids


def test_no_more_run_than_may_and_the_rest_wait_in_order(make_engine):
    engine = make_engine(settings=NativeEngineSettings(max_num_seqs=3), max_completion_tokens=5)
    submit_all(engine, PROMPTS)
    order = []
    while not engine.idle:
        order += sorted((output.id for output in engine.step()), key=list(PROMPTS).index)
        usage = engine.usage()
        assert usage.num_running <= 3
    assert order == list(PROMPTS)


def test_the_cache_is_empty_when_idle_and_tokens_are_counted(make_engine):
    engine = make_engine()
    submit_all(engine, PROMPTS)
    finish(engine)
    usage = engine.usage()
    assert (usage.kv_tokens, usage.num_running, usage.num_waiting) == (0, 0, 0)
    assert usage.num_generated == 60 * len(PROMPTS)
    assert usage.num_prefilled == sum(len(prompt) - 1 for prompt in PROMPTS.values())


def test_a_request_at_its_limit_or_without_a_prompt_ends_at_once(make_engine):
    engine = make_engine(max_completion_tokens=4)
    engine.submit(GenerationRequest("full", [1, 2], [3, 4, 5, 6], 0))
    engine.submit(GenerationRequest("empty", [], [], 0))
    engine.submit(GenerationRequest("too long", [1] * 600, [], 0))
    ended = engine.step()
    assert [(d.id, d.ids, d.finish_reason) for d in ended] == [
        ("full", [], "length"),
        ("empty", [], "length"),
        ("too long", [], "length"),
    ]
    assert engine.idle


def test_a_response_ends_where_the_models_positions_end(make_engine):
    engine = make_engine(max_completion_tokens=100)
    engine.submit(GenerationRequest("x", random_ids(0, 500), (), 0))
    ended = finish(engine)["x"]
    assert (len(ended.ids), ended.finish_reason) == (12, "length")


def test_a_stop_token_is_the_last_of_the_completion(make_engine):
    engine = make_engine()
    submit_all(engine, PROMPTS)
    free = finish(engine)
    stop = free["17"].ids[8]
    engine = make_engine(
        sampling=SamplingSettings(max_completion_tokens=60, temperature=TEMPERATURE, stop_token_ids=(stop,))
    )
    submit_all(engine, PROMPTS)
    for id, output in finish(engine).items():
        ids = free[id].ids
        if stop in ids:
            assert (output.ids, output.finish_reason) == (ids[: ids.index(stop) + 1], "stop")
        else:
            assert (output.ids, output.finish_reason) == (ids, "length")


def test_the_models_own_end_token_stops(tmp_path):
    model = save_tiny_model(tmp_path, "qwen3")
    sampling = SamplingSettings(max_completion_tokens=60)

    def generate():
        engine = NativeEngine(tmp_path, NativeEngineSettings(), sampling)
        engine.submit(GenerationRequest("x", [1, 2, 3], (), 0))
        return finish(engine)["x"]

    free = generate()
    model.generation_config.eos_token_id = [free.ids[5], 60]
    model.save_pretrained(tmp_path)
    stopped = generate()
    assert stopped.ids == free.ids[: free.ids.index(free.ids[5]) + 1]
    assert stopped.finish_reason == "stop"


def test_a_stop_string_may_straddle_tokens(make_engine):
    def generate(**stop):
        engine = make_engine(sampling=SamplingSettings(max_completion_tokens=60, **stop))
        engine.submit(GenerationRequest("x", [1, 2, 3], (), 0))
        return finish(engine)["x"]

    free = generate()
    stop = "".join(LETTERS[id] for id in free.ids[20:24])
    ended = generate(stop=("never seen", stop))
    assert (ended.ids, ended.finish_reason) == (free.ids[:24], "stop")


def test_stop_strings_without_a_tokenizer_are_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    sampling = SamplingSettings(max_completion_tokens=5, stop=("x",))
    with pytest.raises(ConfigError, match=r"sampling.stop needs a tokenizer.json; save the tokenizer"):
        NativeEngine(tmp_path, NativeEngineSettings(), sampling)


def test_aborting_an_unknown_or_ended_request_gives_none(make_engine):
    engine = make_engine(max_completion_tokens=1)
    engine.submit(GenerationRequest("x", [1], (), 0))
    assert [output.id for output in engine.step()] == ["x"]
    assert engine.abort("x") is None
    assert engine.abort("nobody") is None


def test_a_waiting_request_can_be_aborted(make_engine):
    engine = make_engine()
    engine.submit(GenerationRequest("x", [1], (), 0))
    assert engine.abort("x").ids == []
    assert engine.idle


def test_books_close_under_random_aborts_resumes_and_a_tight_cache(make_engine):
    whole = make_engine()
    prompts = {f"{index}": random_ids(index // 4, 5 + 11 * (index // 4)) for index in range(24)}
    submit_all(whole, prompts)
    expected = {id: output.ids for id, output in finish(whole).items()}

    engine = make_engine(
        settings=NativeEngineSettings(kv_cache_tokens=500, max_num_seqs=6, max_prefill_tokens=64)
    )
    submit_all(engine, prompts)
    chance, gained, seeds = random.Random(0), {id: [] for id in prompts}, list(prompts)
    while not engine.idle:
        for output in (*engine.step(), *engine.report()):
            gained[output.id] += output.ids
        id = chance.choice(seeds)
        part = engine.abort(id)
        if part is not None:
            gained[id] += part.ids
            engine.submit(GenerationRequest(id, prompts[id], gained[id], seeds.index(id)))
        assert_consistent(engine)
    assert engine.usage().num_preempted > 0
    assert gained == expected


@pytest.mark.parametrize("longest", [1, 64, 80, 81, 500, 4096, 131_072])
def test_tiers_grow_up_to_the_longest_context(longest):
    sizes = capacities(longest)
    assert sizes[-1] == longest and sizes == sorted(set(sizes))


def test_an_id_that_is_being_served_is_refused_and_free_again_afterwards(make_engine):
    engine = make_engine(settings=NativeEngineSettings(max_num_seqs=1), max_completion_tokens=3)
    for id in ("runs", "waits"):
        engine.submit(GenerationRequest(id, [1, 2], (), 0))
    engine.step()
    for id in ("runs", "waits"):
        with pytest.raises(ValueError, match=f"request '{id}' is already being served; abort it first"):
            engine.submit(GenerationRequest(id, [3], (), 0))
    engine.abort("waits")
    engine.submit(GenerationRequest("waits", [1, 2], (), 0))
    assert {id: len(output.ids) for id, output in finish(engine).items()} == {"runs": 3, "waits": 3}
    engine.submit(GenerationRequest("runs", [1, 2], (), 0))
    assert set(finish(engine)) == {"runs"}


def test_the_samples_of_a_group_share_no_prefill_once_their_contexts_differ(make_engine):
    """As in the later turns of episodes: each has its own completion and observation in its prompt."""
    engine, prompt = make_engine(), random_ids(0, 10)
    contexts = {"a": [*prompt, 7, 1], "b": [*prompt, 8, 1], "c": [*prompt, 7, 1]}
    submit_all(engine, contexts)
    engine.step()
    assert engine.usage().num_prefilled == 2 * 11
    alone = make_engine()
    alone.submit(GenerationRequest("b", contexts["b"], (), 1))
    assert finish(engine)["b"].ids == finish(alone)["b"].ids
