"""Completions whose tokens are too old: what the new weights draw again with the same noise is kept, and the
whole is what these weights generate from nothing."""

import random
from pathlib import Path

import pytest
import torch
from native_cases import PROMPTS, TEMPERATURE, assert_consistent, finish, random_ids, reference

from helpers.architectures import SHAPES, random_model
from helpers.tiny_models import tiny_model
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.engine import NativeEngine, engine_class
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.types import Group, Prompt, Sample, SampleId

LIMIT = 60


def updated(tensors, size: float = 0.003, number: int = 0):
    """Weights after a small update, which changes some tokens of most completions."""
    chance = torch.Generator().manual_seed(number)
    return {
        name: tensor + size * torch.randn(tensor.shape, generator=chance) for name, tensor in tensors.items()
    }


def samples(prompts=PROMPTS) -> dict[str, Sample]:
    group = Group(Prompt(0, ()), len(prompts), [])
    group.samples = [Sample(SampleId(0, 0, number), group, max_age=0) for number in range(len(prompts))]
    return dict(zip(prompts, group.samples, strict=True))


def submit(engine: NativeEngine, id: str, sample: Sample, prompts=PROMPTS) -> None:
    oldest = sample.oldest_version if sample.spans else None
    ids, seed = sample.completion_ids, sample.id.number
    request = GenerationRequest(
        id, prompts[id], ids, seed, max_completion_tokens=LIMIT, max_age=sample.max_age, oldest_version=oldest
    )
    engine.submit(request)


def take(outputs, samples: dict[str, Sample]) -> int:
    """Give samples what an engine reports. Returns the tokens that they gain."""
    for output in outputs:
        sample = samples[output.id]
        if output.verified_logprobs is not None:
            sample.verify(len(output.verified_logprobs), output.version, output.verified_logprobs)
        sample.extend(output.ids, output.behavior_logprobs, output.version)
        sample.finish_reason = output.finish_reason or sample.finish_reason
    return sum(len(output.ids) for output in outputs)


def from_nothing(engine: NativeEngine, tensors, prompts=PROMPTS) -> dict[str, Sample]:
    """What weights generate alone."""
    engine.load(tensors, version=1, kv="recompute")
    fresh = samples(prompts)
    for id, sample in fresh.items():
        submit(engine, id, sample, prompts)
    while not engine.idle:
        take(engine.step(), fresh)
    return fresh


def assert_same(had: dict[str, Sample], expected: dict[str, Sample], version: int) -> None:
    for id, sample in had.items():
        assert sample.completion_ids == expected[id].completion_ids, id
        assert [span.version for span in sample.spans] == [version]
        assert sample.num_tokens == len(sample.completion_ids)
        assert sample.finish_reason == expected[id].finish_reason
        logprobs = (torch.tensor(each.behavior_logprobs) for each in (sample, expected[id]))
        torch.testing.assert_close(*logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_prefill_tokens", [30, 8192])
def test_what_is_in_flight_is_verified_by_the_load_that_makes_it_too_old(make_engine, max_prefill_tokens):
    engine = make_engine(settings=NativeEngineSettings(max_prefill_tokens=max_prefill_tokens))
    had, new = samples(), tiny_model("qwen3")
    new.load_state_dict(updated(new.state_dict()))
    for id, sample in had.items():
        submit(engine, id, sample)
    while engine.usage().num_counted < 30 * len(had):
        assert engine.step() == []
    num_gained = take(engine.load(new.state_dict(), version=1, kv="recompute"), had)
    old = {id: list(sample.completion_ids) for id, sample in had.items()}
    while not engine.idle:
        num_gained += take(engine.step(), had)
        assert_consistent(engine)
    expected = from_nothing(make_engine(), new.state_dict())
    assert_same(had, expected, version=1)
    for id, sample in had.items():
        torch.testing.assert_close(
            torch.tensor(sample.behavior_logprobs),
            reference(new, PROMPTS[id], sample.completion_ids),
            atol=1e-4,
            rtol=0,
        )
        kept = len(old[id]) - sample.num_changed
        assert sample.completion_ids[:kept] == old[id][:kept]
        assert sample.num_changed == 0 or sample.completion_ids[kept] != old[id][kept]
    num_changed = [sample.num_changed for sample in had.values()]
    assert 0 in num_changed and 0 < sum(num_changed) < sum(map(len, old.values()))
    assert engine.usage().num_counted == num_gained == LIMIT * len(had) + sum(num_changed)


def test_what_has_ended_is_verified_in_one_pass_and_ends_again(make_engine):
    engine, had, new = make_engine(), samples(), updated(tiny_model("qwen3").state_dict(), 0.0005)
    for id, sample in had.items():
        submit(engine, id, sample)
    take(finish(engine).values(), had)
    engine.load(new, version=1, kv="recompute")
    for id, sample in had.items():
        submit(engine, id, sample)
    first = engine.step()
    take(first, had)
    assert first and all(sample.num_changed == 0 for sample in (had[output.id] for output in first))
    assert engine.usage().decoded.verified == LIMIT * len(had), "a chunk has room for all of a sample"
    while not engine.idle:
        take(engine.step(), had)
    assert any(sample.num_changed for sample in had.values())
    assert_same(had, from_nothing(make_engine(), new), version=1)


def test_a_bound_leaves_tokens_until_they_are_older(make_engine):
    engine, old = make_engine(), tiny_model("qwen3")
    had = {"17": samples()["17"]}
    had["17"].max_age = 1
    submit(engine, "17", had["17"])
    for version in (1, 2):
        for _ in range(3):  # as drafts may be right, some tokens a step
            engine.step()
        take(engine.load(old.state_dict(), version=version, kv="recompute"), had)
        assert [span.version for span in had["17"].spans] == [*range(version)]
    had_before = had["17"].num_tokens
    engine.step()
    take(engine.report(), had)
    assert [span.version for span in had["17"].spans] == [2] and had["17"].num_tokens > had_before


@pytest.mark.parametrize("drafts", ["off", "auto"])
def test_random_loads_and_interruptions_end_in_what_the_last_weights_generate(make_engine, drafts):
    """Samples are aborted, come back, end and come back, in a cache that holds few of them, while updates
    arrive; also in the middle of a verification."""
    settings = NativeEngineSettings(kv_cache_tokens=900, max_prefill_tokens=50, drafts=drafts)
    engine, chance, had = make_engine(settings=settings), random.Random(5), samples()
    served, num_gained, weights, version = set[str](), 0, tiny_model("qwen3").state_dict(), 0

    def due() -> list[str]:
        return [id for id, each in had.items() if not each.finish_reason or each.oldest_version < version]

    while version < 6 or due():
        for id in [id for id in due() if id not in served and chance.random() < 0.3]:
            submit(engine, id, had[id])
            served.add(id)
        ended = engine.step()
        if version < 6 and (not due() or (served and chance.random() < 0.1)):
            version, weights = version + 1, updated(weights, number=version)
            ended += engine.load(weights, version=version, kv="recompute")
        for id in [id for id in sorted(served) if chance.random() < 0.03]:
            if output := engine.abort(id):
                ended.append(output)
                served.remove(id)
        num_gained += take(ended, had)
        served -= {output.id for output in ended if output.finish_reason}
        assert_consistent(engine)
    assert sum(sample.num_changed for sample in had.values()) > 20
    assert engine.usage().num_counted == num_gained
    assert_same(had, from_nothing(make_engine(), weights), version=6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["gpt2", "mamba", "nemotron_h"])
def test_any_model_verifies_by_its_own_forward_pass(tmp_path: Path, model_type: str):
    model = random_model(model_type, SHAPES[model_type])
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.config.max_position_embeddings = 256
    model.save_pretrained(tmp_path)
    sampling = SamplingSettings(max_completion_tokens=LIMIT, temperature=TEMPERATURE)
    prompts = {id: [token % 60 + 3 for token in random_ids(number, 9)] for number, id in enumerate("abcd")}
    first, second = (engine_class(tmp_path)(tmp_path, NativeEngineSettings(), sampling) for _ in range(2))
    had, near = samples(prompts), updated(first.weights(), 0.01)
    for id, sample in had.items():
        submit(first, id, sample, prompts)
    for _ in range(30):
        first.step()
    take(first.load(near, version=1, kv="recompute"), had)
    while not first.idle:
        take(first.step(), had)
    assert sum(sample.num_changed for sample in had.values()) > 0
    assert_same(had, from_nothing(second, near, prompts), version=1)
