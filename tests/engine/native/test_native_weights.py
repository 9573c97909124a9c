"""New weights between two decode steps, with the cache kept or recomputed."""

import pytest
import torch
from native_cases import (
    PROMPTS,
    assert_close,
    finish,
    mixed_reference,
    random_ids,
    random_model,
    reference,
    submit_all,
)

from tailrace.engine.base import EngineSettings
from tailrace.engine.native.engine import Request


@pytest.fixture(scope="module")
def new_model():
    return random_model("qwen3", seed=1)


def half_way(engine):
    """Twenty tokens each under the old weights; prompts and tokens so far, by id."""
    submit_all(engine, PROMPTS)
    for _ in range(20):
        assert engine.step() == []
    return PROMPTS


def test_load_reports_what_the_old_version_produced(make_engine, models, new_model):
    engine = make_engine()
    half_way(engine)
    gained = engine.load(new_model.state_dict(), version=1, kv="keep")
    assert {delta.id: (len(delta.ids), delta.version) for delta in gained} == {id: (20, 0) for id in PROMPTS}
    for delta in gained:
        assert_close(delta, reference(models["qwen3"][1], PROMPTS[delta.id], delta.ids))
    assert {(len(delta.ids), delta.version) for delta in finish(engine).values()} == {(40, 1)}


def test_recomputed_cache_equals_a_forward_of_the_new_weights(make_engine, new_model):
    engine = make_engine(settings=EngineSettings(prefill_tokens=100))
    half_way(engine)
    gained = {delta.id: delta.ids for delta in engine.load(new_model.state_dict(), version=1, kv="recompute")}
    for id, delta in finish(engine).items():
        assert_close(delta, reference(new_model, PROMPTS[id] + gained[id], delta.ids))


def test_kept_cache_equals_a_forward_that_mixes_the_weights_the_same_way(make_engine, models, new_model):
    engine = make_engine()
    half_way(engine)
    gained = {delta.id: delta.ids for delta in engine.load(new_model.state_dict(), version=1, kv="keep")}
    for id, delta in finish(engine).items():
        tokens = PROMPTS[id] + gained[id]
        mixed = mixed_reference(models["qwen3"][1], new_model, tokens, delta.ids)
        assert_close(delta, mixed)
        assert (mixed - reference(new_model, tokens, delta.ids)).abs().max() > 0.01


def test_recomputing_is_counted(make_engine, new_model):
    engine = make_engine()
    half_way(engine)
    before = engine.usage().num_prefilled
    engine.load(new_model.state_dict(), version=1, kv="recompute")
    assert engine.usage().num_prefilled - before == sum(len(p) + 20 - 1 for p in PROMPTS.values())


def test_a_prompt_kept_from_old_weights_is_not_lent_to_a_new_sibling(make_engine, new_model):
    engine, prompt = make_engine(), random_ids(3, 12)
    engine.submit(Request("old", prompt, (), 0))
    engine.step()
    engine.load(new_model.state_dict(), version=1, kv="keep")
    engine.submit(Request("new", prompt, (), 1))
    assert_close(ended := finish(engine)["new"], reference(new_model, prompt, ended.ids))


def test_a_recomputed_prompt_is_lent_to_a_new_sibling(make_engine, new_model):
    engine, prompt = make_engine(), random_ids(3, 12)
    engine.submit(Request("old", prompt, (), 0))
    engine.step()
    engine.load(new_model.state_dict(), version=1, kv="recompute")
    before = engine.usage().num_prefilled
    engine.submit(Request("new", prompt, (), 1))
    assert_close(ended := finish(engine)["new"], reference(new_model, prompt, ended.ids))
    assert engine.usage().num_prefilled == before


def test_what_overflowed_under_broken_weights_does_not_reach_later_requests(make_engine, models):
    old = models["qwen3"][1]
    engine, prompt = make_engine(), random_ids(5, 20)
    submit_all(engine, PROMPTS)
    engine.load(
        {name: torch.full_like(t, float("nan")) for name, t in old.state_dict().items()}, version=1, kv="keep"
    )
    finish(engine)
    engine.load(old.state_dict(), version=2, kv="keep")
    submit_all(engine, {"a": prompt, "b": prompt[:4]})
    assert_close(ended := finish(engine)["b"], reference(old, prompt[:4], ended.ids))


def test_incomplete_weights_are_refused_and_change_nothing(make_engine, models, new_model):
    engine, state = make_engine(), new_model.state_dict()
    submit_all(engine, PROMPTS)
    engine.step()
    name = "model.layers.1.mlp.up_proj.weight"
    for broken in ({n: t for n, t in state.items() if n != name}, {**state, name: state[name][:1]}):
        with pytest.raises(ValueError, match=rf"1 of \d+ weights are missing or of another shape: {name}"):
            engine.load(broken, version=1, kv="keep")
    for id, delta in finish(engine).items():
        assert delta.version == 0 and len(delta.ids) == 60
        assert_close(delta, reference(models["qwen3"][1], PROMPTS[id], delta.ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_broken_weights_left_in_the_cache_harms_nobody_under_better_ones(make_engine, new_model, dtype):
    def served(engine, version):
        engine.load(new_model.state_dict(), version=version, kv="keep")
        submit_all(engine, {id: prompt[:2] for id, prompt in PROMPTS.items()})
        return {id: delta.ids for id, delta in finish(engine).items()}

    broken = make_engine(settings=EngineSettings(dtype=dtype))
    nonsense = {name: tensor * torch.nan for name, tensor in new_model.state_dict().items()}
    broken.load(nonsense, version=1, kv="keep")
    submit_all(broken, PROMPTS)
    finish(broken)
    fresh = make_engine(settings=EngineSettings(dtype=dtype))
    assert served(broken, version=2) == served(fresh, version=1)
