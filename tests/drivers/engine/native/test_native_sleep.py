"""An engine asleep holds no memory; awake it is what it was at its start."""

import pytest
from native_cases import PROMPTS, finish, submit_all

from helpers.tiny_models import tiny_model


def memory(engine):
    """Bytes of the weights and positions of the cache."""
    storages = {storage.data_ptr(): storage for storage, _ in engine._model._storages.values()}
    cache = engine._scheduler.cache
    positions = len(cache.pieces[0]) - 1
    assert positions == cache.size >= cache.num_allocated
    return sum(storage.nbytes() for storage in storages.values()), positions


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_asleep_it_holds_neither_weights_nor_cache_and_awake_it_generates_the_same(make_engine, family):
    engine = make_engine(family)
    before, _ = memory(engine)
    submit_all(engine, PROMPTS)
    first = finish(engine)
    engine.load(tiny_model(family, seed=1).state_dict(), version=1, kv="keep")
    submit_all(engine, PROMPTS)
    engine.step()
    with pytest.raises(ValueError, match="abort them first"):
        engine.sleep()
    for id in PROMPTS:
        engine.abort(id)
    assert memory(engine)[1] > 0
    num_generated = engine.usage().num_generated
    engine.sleep()
    assert memory(engine) == (0, 0)
    assert engine.usage().num_generated == num_generated
    engine.wake()
    assert memory(engine) == (before, 0)
    submit_all(engine, PROMPTS)
    assert finish(engine) == first  # of version 0, too


def test_weights_that_come_after_it_woke_are_those_it_uses(make_engine):
    engine, other = make_engine(), make_engine()
    engine.sleep()
    engine.wake()
    weights = tiny_model("qwen3", seed=1).state_dict()
    for each in (engine, other):
        each.load(weights, version=1, kv="recompute")
        submit_all(each, PROMPTS)
    assert finish(engine) == finish(other)
