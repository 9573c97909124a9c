"""LoRA adapters beside the weights: one, or the last few versions at the same time."""

import copy

import pytest
import torch
from native_cases import PROMPTS, assert_close, finish, random_ids, reference

import tailrace.drivers.engine.native.model as model_module
from helpers.tiny_models import FAMILIES
from tailrace.contracts.engine import GenerationRequest
from tailrace.drivers.engine.settings import NativeEngineSettings

SCALE, RANK = 0.5, 3
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = [ALL, ("v_proj",), ("up_proj", "q_proj"), ("down_proj", "k_proj")]


def adapter_of(model, seed, targets=ALL):
    """Random factors of the layers of these kinds, large enough to change what is drawn."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.endswith(targets):
            for key, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
                tensors[f"{name}.lora_{key}.weight"] = 0.1 * torch.randn(shape, generator=generator)
    return tensors


def merged(model, tensors):
    """A copy that transformers runs with W + scale B A."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if f"{name}.lora_A.weight" in tensors:
            a, b = (tensors[f"{name}.lora_{key}.weight"] for key in "AB")
            module.weight.data += SCALE * b @ a
    return model


@pytest.fixture
def served(make_engine, models):
    """An engine that keeps two adapters, those of the versions 1 and 2, and the models by version."""
    base = models["qwen3"][1]
    adapters = {version: adapter_of(base, version) for version in (1, 2, 3)}
    engine = make_engine(adapter_scale=SCALE, num_versions=2)
    for version in (1, 2):
        engine.load(adapters[version], version=version, kv="keep")
    return engine, adapters, {0: base} | {each: merged(base, adapter) for each, adapter in adapters.items()}


def submit(engine, pins):
    """A request of each prompt; the pins in turn. Returns them by id."""
    of_request = {id: pins[number % len(pins)] for number, id in enumerate(PROMPTS)}
    for seed, (id, prompt) in enumerate(PROMPTS.items()):
        engine.submit(GenerationRequest(id, prompt, (), seed, pin=of_request[id]))
    return of_request


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", TARGETS, ids=["all", "v", "up, q", "down, k"])
def test_an_adapter_is_added_to_the_layers_that_it_names(make_engine, models, monkeypatch, family, targets):
    monkeypatch.setattr(model_module, "MIN_PACKED", 1)  # in the layout for few rows, too
    base = models[family][1]
    engine, tensors = make_engine(family, adapter_scale=SCALE), adapter_of(base, 1, targets)
    engine.load(tensors, version=1, kv="keep")
    submit(engine, [None])
    for id, output in finish(engine).items():
        assert output.version == 1
        assert_close(output, reference(merged(base, tensors), PROMPTS[id], output.ids))


def test_requests_of_several_versions_are_decoded_together(served):
    engine, _, models = served
    pins = submit(engine, [1, 2, None])
    for id, output in finish(engine).items():
        version = pins[id] or 2
        assert output.version == version
        assert_close(output, reference(models[version], PROMPTS[id], output.ids))


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_pinned_request_ends_under_its_version_while_another_one_is_loaded(served, kv):
    engine, adapters, models = served
    submit(engine, [2])
    for _ in range(20):
        assert engine.step() == []
    before = engine.usage().num_prefilled
    outputs = {output.id: output for output in engine.load(adapters[3], version=3, kv=kv)}
    for id, last in finish(engine).items():
        assert outputs[id].version == last.version == 2
        ids = [*outputs[id].ids, *last.ids]
        expected = reference(models[2], PROMPTS[id], ids)
        assert_close(outputs[id], expected[:20])
        assert_close(last, expected[20:])
    assert engine.usage().num_prefilled == before


def test_a_request_without_a_pin_goes_on_under_the_new_version(served):
    engine, adapters, models = served
    prompt = PROMPTS["17"]
    engine.submit(GenerationRequest("x", prompt, (), 0))
    for _ in range(20):
        engine.step()
    (old,) = engine.load(adapters[3], version=3, kv="recompute")
    last = finish(engine)["x"]
    assert (old.version, last.version) == (2, 3)
    assert_close(last, reference(models[3], [*prompt, *old.ids], last.ids))


def test_a_version_that_is_not_kept_any_more_is_refused(served):
    engine, adapters, models = served
    engine.load(adapters[3], version=3, kv="keep")
    pins = submit(engine, [1, 0, 2])
    assert engine.refused == [id for id, pin in pins.items() if pin != 2]
    outputs = finish(engine)
    assert outputs.keys() == {id for id, pin in pins.items() if pin == 2}
    for id, output in outputs.items():
        assert output.version == 2
        assert_close(output, reference(models[2], PROMPTS[id], output.ids))


def test_a_load_gives_requests_of_the_version_that_leaves_back_with_their_tokens(served):
    engine, adapters, models = served
    pins = submit(engine, [1, 2])
    for _ in range(5):
        engine.step()
    last = {output.id: output for output in engine.load(adapters[3], version=3, kv="recompute")}
    assert engine.refused == [id for id, pin in pins.items() if pin == 1]
    assert finish(engine).keys() == {id for id, pin in pins.items() if pin == 2}
    for id in engine.refused:
        assert last[id].version == 1
        assert_close(last[id], reference(models[1], PROMPTS[id], last[id].ids))


def test_before_the_second_publication_the_model_without_an_adapter_is_served_too(make_engine, served):
    _, adapters, models = served
    engine = make_engine(adapter_scale=SCALE, num_versions=2)
    engine.load(adapters[1], version=1, kv="keep")
    pins = submit(engine, [0, 1])
    for id, output in finish(engine).items():
        assert output.version == pins[id]
        assert_close(output, reference(models[output.version], PROMPTS[id], output.ids))


def test_a_version_that_is_loaded_again_replaces_itself(served):
    engine, adapters, models = served
    engine.load(adapters[3], version=2, kv="keep")
    pins = submit(engine, [1, 2])
    for id, output in finish(engine).items():
        assert output.version == pins[id]
        assert_close(output, reference(models[{1: 1, 2: 3}[output.version]], PROMPTS[id], output.ids))


def test_a_prompt_is_lent_only_to_requests_of_its_version(served):
    engine, _, models = served
    prompt = random_ids(3, 12)
    for id, pin in (("a", 1), ("b", 2), ("c", 1), ("d", None)):
        engine.submit(GenerationRequest(id, prompt, (), 7, pin=pin))
    engine.step()
    assert engine.usage().num_prefilled == 2 * 11
    ended = finish(engine)
    for id, version in (("a", 1), ("b", 2), ("c", 1), ("d", 2)):
        assert_close(ended[id], reference(models[version], prompt, ended[id].ids))


def test_an_aborted_request_takes_its_cache_back_only_under_its_pin(served):
    engine, _, models = served
    prompt = PROMPTS["40"]
    for pin, num_prefilled in ((1, 0), (2, len(prompt) + 9)):
        engine.submit(GenerationRequest("x", prompt, (), 0, pin=1))
        for _ in range(10):
            engine.step()
        part = engine.abort("x")
        before = engine.usage().num_prefilled
        engine.submit(GenerationRequest("x", prompt, part.ids, 0, pin=pin))
        last = finish(engine)["x"]
        assert engine.usage().num_prefilled - before == num_prefilled
        assert last.version == pin
        assert_close(last, reference(models[pin], [*prompt, *part.ids], last.ids))


def test_preempted_requests_are_computed_again_under_their_version(make_engine, served):
    _, adapters, models = served
    settings = NativeEngineSettings(kv_cache_tokens=400)
    engine = make_engine(settings=settings, adapter_scale=SCALE, num_versions=2)
    for version in (1, 2):
        engine.load(adapters[version], version=version, kv="keep")
    pins = submit(engine, [1, 2])
    parts = {id: [] for id in pins}
    while not engine.idle:
        for output in [*engine.step(), *engine.report()]:
            assert output.version == pins[output.id]
            parts[output.id] += zip(output.ids, output.behavior_logprobs, strict=True)
    assert engine.usage().num_preempted > 0
    for id, part in parts.items():
        ids, logprobs = zip(*part, strict=True)
        expected = reference(models[pins[id]], PROMPTS[id], ids)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


def test_after_a_sleep_the_model_has_no_adapter_until_the_next_load(served):
    engine, adapters, models = served
    engine.sleep()
    engine.wake()
    submit(engine, [None])
    for id, output in finish(engine).items():
        assert output.version == 0
        assert_close(output, reference(models[0], PROMPTS[id], output.ids))
    engine.load(adapters[2], version=2, kv="keep")
    submit(engine, [1])
    for id, output in finish(engine).items():
        assert output.version == 2
        assert_close(output, reference(models[2], PROMPTS[id], output.ids))
