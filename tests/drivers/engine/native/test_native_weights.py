"""New weights between two decode steps, with the cache kept or recomputed."""

import json

import pytest
import torch
from native_cases import (
    PROMPTS,
    assert_close,
    finish,
    mixed_reference,
    random_ids,
    reference,
    submit_all,
)

import tailrace.drivers.engine.native.model as model_module
from helpers.tiny_models import save_tiny_model, tiny_model
from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.engine import NativeEngine
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.errors import ConfigError


@pytest.fixture(scope="module")
def new_model():
    return tiny_model("qwen3", seed=1)


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
    assert {output.id: (len(output.ids), output.version) for output in gained} == {
        id: (20, 0) for id in PROMPTS
    }
    for output in gained:
        assert_close(output, reference(models["qwen3"][1], PROMPTS[output.id], output.ids))
    assert {(len(output.ids), output.version) for output in finish(engine).values()} == {(40, 1)}


def test_recomputed_cache_equals_a_forward_of_the_new_weights(make_engine, new_model):
    engine = make_engine(settings=NativeEngineSettings(max_prefill_tokens=100))
    half_way(engine)
    gained = {
        output.id: output.ids for output in engine.load(new_model.state_dict(), version=1, kv="recompute")
    }
    for id, output in finish(engine).items():
        assert_close(output, reference(new_model, PROMPTS[id] + gained[id], output.ids))


def test_kept_cache_equals_a_forward_that_mixes_the_weights_the_same_way(make_engine, models, new_model):
    engine = make_engine()
    half_way(engine)
    gained = {output.id: output.ids for output in engine.load(new_model.state_dict(), version=1, kv="keep")}
    for id, output in finish(engine).items():
        tokens = PROMPTS[id] + gained[id]
        mixed = mixed_reference(models["qwen3"][1], new_model, tokens, output.ids)
        assert_close(output, mixed)
        assert (mixed - reference(new_model, tokens, output.ids)).abs().max() > 0.01


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_matrices_in_the_layout_for_few_rows_have_the_weights_of_the_last_load(
    make_engine, models, family, monkeypatch
):
    """Also of a load that followed sleep."""
    monkeypatch.setattr(model_module, "MIN_PACKED", 1)
    engine = make_engine(family)
    assert all(matrix.packed is not None for matrix in engine._model._matrices())
    new = tiny_model(family, seed=1)
    for version, model in enumerate((models[family][1], new), 1):
        engine.load(model.state_dict(), version=version, kv="keep")
        submit_all(engine, PROMPTS)
        for id, output in finish(engine).items():
            assert_close(output, reference(model, PROMPTS[id], output.ids))
    engine.sleep()
    assert all(matrix.packed is None for matrix in engine._model._matrices())
    engine.wake()
    submit_all(engine, PROMPTS)
    for id, output in finish(engine).items():
        assert_close(output, reference(models[family][1], PROMPTS[id], output.ids))


@pytest.mark.parametrize(
    ("rank", "more_inputs", "more_outputs", "has_b"),
    [(2, 0, 0, False), (2, 1, 0, True), (2, 0, 1, True), (3, 0, 0, True)],
    ids=["no B", "inputs", "outputs", "ranks"],
)
def test_an_adapter_that_does_not_fit_changes_nothing(
    make_engine, models, rank, more_inputs, more_outputs, has_b
):
    engine = make_engine(adapter_scale=1.0, num_versions=2)
    model = engine._model
    name, fitting = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
    outputs, inputs = model._weights[f"{name}.weight"].shape
    tensors = {
        f"{fitting}.lora_A.weight": torch.ones(2, inputs),
        f"{fitting}.lora_B.weight": torch.ones(len(model._weights[f"{fitting}.weight"]), 2),
        f"{name}.lora_A.weight": torch.ones(rank, inputs + more_inputs),
    }
    if has_b:
        tensors[f"{name}.lora_B.weight"] = torch.ones(outputs + more_outputs, 2)
    before = {key: weight.clone() for key, weight in model._weights.items()}
    with pytest.raises(ValueError, match=f"the adapter of {name} is incomplete or of another model"):
        engine.load(tensors, version=1, kv="keep")
    assert all(torch.equal(weight, before[key]) for key, weight in model._weights.items())
    submit_all(engine, PROMPTS)
    for id, output in finish(engine).items():
        assert output.version == 0
        assert_close(output, reference(models["qwen3"][1], PROMPTS[id], output.ids))


def test_recomputing_is_counted(make_engine, new_model):
    engine = make_engine()
    half_way(engine)
    before = engine.usage().num_prefilled
    engine.load(new_model.state_dict(), version=1, kv="recompute")
    engine.step()
    assert engine.usage().num_prefilled - before == sum(len(p) + 20 - 1 for p in PROMPTS.values())
    assert engine.usage().num_preempted == 0


def test_a_prompt_kept_from_old_weights_is_not_lent_to_a_new_sibling(make_engine, new_model):
    engine, prompt = make_engine(), random_ids(3, 12)
    engine.submit(GenerationRequest("old", prompt, (), 0))
    engine.step()
    engine.load(new_model.state_dict(), version=1, kv="keep")
    engine.submit(GenerationRequest("new", prompt, (), 1))
    assert_close(ended := finish(engine)["new"], reference(new_model, prompt, ended.ids))


def test_a_recomputed_prompt_is_lent_to_a_new_sibling(make_engine, new_model):
    engine, prompt = make_engine(), random_ids(3, 12)
    engine.submit(GenerationRequest("old", prompt, (), 0))
    engine.step()
    engine.load(new_model.state_dict(), version=1, kv="recompute")
    engine.step()
    before = engine.usage().num_prefilled
    engine.submit(GenerationRequest("new", prompt, (), 1))
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
    for id, output in finish(engine).items():
        assert output.version == 0 and len(output.ids) == 60
        assert_close(output, reference(models["qwen3"][1], PROMPTS[id], output.ids))


def test_a_folder_whose_weights_do_not_fit_its_config_is_refused(tmp_path):
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))
    with pytest.raises(
        ConfigError, match=r"6 of 24 weights are missing or of another shape: model\.layers\.0\."
    ):
        NativeEngine(tmp_path, NativeEngineSettings(), SamplingSettings(max_completion_tokens=1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_broken_weights_left_in_the_cache_harms_nobody_under_better_ones(make_engine, new_model, dtype):
    def served(engine, version):
        engine.load(new_model.state_dict(), version=version, kv="keep")
        submit_all(engine, {id: prompt[:2] for id, prompt in PROMPTS.items()})
        return {id: output.ids for id, output in finish(engine).items()}

    broken = make_engine(settings=NativeEngineSettings(dtype=dtype))
    nonsense = {name: tensor * torch.nan for name, tensor in new_model.state_dict().items()}
    broken.load(nonsense, version=1, kv="keep")
    submit_all(broken, PROMPTS)
    finish(broken)
    fresh = make_engine(settings=NativeEngineSettings(dtype=dtype))
    assert served(broken, version=2) == served(fresh, version=1)
