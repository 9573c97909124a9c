"""Models of any architecture behind the embedded engine: what it generates is what transformers computes."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from native_cases import TEMPERATURE, assert_close, reference
from transformers import PreTrainedModel

from helpers.architectures import SHAPES, VOCABULARY, random_model
from tailrace.contracts.engine import GenerationOutput, GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.any_model import AnyEngine
from tailrace.drivers.engine.native.engine import NativeEngine, engine_class
from tailrace.drivers.engine.settings import NativeEngineSettings
from tailrace.drivers.models.causal_lm import as_in_files, tensors_of
from tailrace.model_folder import tensor_shapes

pytestmark = pytest.mark.filterwarnings("ignore")
ANY, EQUAL = "batches of any lengths", "batches of equal lengths"
UNCACHED = f"{ANY}, without a cache"
OTHERS = {"mamba": EQUAL, "minimax": UNCACHED, "nemotron_h": UNCACHED, "recurrent_gemma": UNCACHED}
"""Those whose own decoding is not their forward pass, or that keep no state in a cache of transformers."""
DIFFERENT = {
    *OTHERS,
    *("bamba", "bloom", "deepseek_v3", "falcon", "falcon_h1", "gemma3_text", "glm4_moe", "gpt2", "gpt_neox"),
    *("gpt_oss", "lfm2", "llama", "llama4_text", "mamba2", "mixtral", "phi3", "qwen3_5_text", "qwen3_moe"),
}
"""Those that decode, keep a state or name their tensors in a way of their own. The others are slow tests."""
UNLIMITED = {"bloom", "mamba", "mamba2"}
"""Their config names no longest sequence."""


Saved = tuple[Path, PreTrainedModel]


def random_ids(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


PROMPTS = {f"{length}.{twin}": random_ids(length, length) for length in (1, 2, 17, 40) for twin in range(2)}
"""Two requests each, of short and long prompts."""


def save(folder: Path, model_type: str) -> PreTrainedModel:
    model = random_model(model_type, SHAPES[model_type])
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    if model_type in UNLIMITED:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 256}))
    model.set_attn_implementation("eager")
    return model


def engine_of(folder: Path, **settings: object) -> NativeEngine:
    sampling = SamplingSettings(max_completion_tokens=20, temperature=TEMPERATURE)
    return engine_class(folder)(folder, NativeEngineSettings.model_validate(settings), sampling)


def published(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    tensors = tensors_of(model).items()
    return dict(part for name, tensor in tensors for part in as_in_files(model, name, tensor))


def submit(engine: NativeEngine, had: Mapping[str, list[int]] = {}) -> None:
    for seed, (id, prompt) in enumerate(PROMPTS.items()):
        engine.submit(GenerationRequest(id, prompt, had.get(id, []), seed))


def finish(engine: NativeEngine) -> dict[str, GenerationOutput]:
    found: dict[str, GenerationOutput] = {}
    while not engine.idle:
        found |= {output.id: output for output in engine.step()}
    return found


@pytest.mark.parametrize(
    "model_type", [pytest.param(each, marks=() if each in DIFFERENT else pytest.mark.slow) for each in SHAPES]
)
def test_log_probs_equal_transformers_and_new_weights_are_loaded(model_type: str, tmp_path: Path) -> None:
    model = save(tmp_path, model_type)
    sampling = SamplingSettings(max_completion_tokens=20, temperature=TEMPERATURE)
    engine = AnyEngine(tmp_path, NativeEngineSettings(), sampling)
    assert engine._model.together == OTHERS.get(model_type, ANY)
    submit(engine)
    for id, output in finish(engine).items():
        assert len(output.ids) == 20
        assert_close(output, reference(model, PROMPTS[id], output.ids))
    new = random_model(model_type, SHAPES[model_type], std=0.15)
    new.set_attn_implementation("eager")
    tensors = published(new)
    assert tensors.keys() == tensor_shapes(tmp_path).keys()
    engine.load(tensors, version=1, kv="recompute")
    ids = random_ids(9, 30)
    scored = engine.score(ids, 20)
    torch.testing.assert_close(torch.tensor(scored), reference(new, ids[:20], ids[20:]), atol=1e-4, rtol=0)


@pytest.fixture(scope="module", params=["gemma3_text", "mamba", "nemotron_h", "qwen3_5_text"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save(folder, request.param)


def test_a_model_that_the_fast_forward_pass_computes_is_not_slowed_down(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    assert type(engine_of(tmp_path)) is NativeEngine


def test_what_was_aborted_goes_on_from_its_own_state(saved: Saved) -> None:
    folder, model = saved
    engine = engine_of(folder)
    submit(engine)
    for _ in range(7):
        engine.step()
    had = {id: engine.abort(id).ids for id in PROMPTS}
    assert {len(ids) for ids in had.values()} == {7}
    prefilled = engine.usage().num_prefilled
    submit(engine, had)
    for id, output in finish(engine).items():
        assert_close(output, reference(model, [*PROMPTS[id], *had[id]], output.ids))
    if isinstance(engine, AnyEngine) and engine._model.together != UNCACHED:
        assert engine.usage().num_prefilled == prefilled
    again = completions(engine_of(folder), had)
    assert {id: had[id] + ids for id, ids in again.items()} == completions(engine_of(folder))


def completions(engine: NativeEngine, had: Mapping[str, list[int]] = {}) -> dict[str, list[int]]:
    """The tokens that all requests get."""
    submit(engine, had)
    return {id: list(output.ids) for id, output in finish(engine).items()}


def test_preempted_requests_give_the_same_tokens(saved: Saved) -> None:
    folder, _ = saved
    roomy, tight = engine_of(folder), engine_of(folder, kv_cache_tokens=180)
    assert completions(tight) == completions(roomy)
    assert roomy.usage().num_preempted == 0 < tight.usage().num_preempted


def test_the_samples_of_a_group_share_one_prefill(saved: Saved) -> None:
    engine = engine_of(saved[0])
    for seed in range(4):
        engine.submit(GenerationRequest(str(seed), PROMPTS["40.0"], (), seed))
    assert len({tuple(output.ids) for output in finish(engine).values()}) > 1
    assert engine.usage().num_prefilled == 39


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_new_weights_take_over_between_two_steps(saved: tuple[Path, PreTrainedModel], kv: str) -> None:
    folder, old = saved
    engine, model_type = engine_of(folder), old.config.model_type
    new = random_model(model_type, SHAPES[model_type], std=0.15)
    new.set_attn_implementation("eager")
    submit(engine)
    for _ in range(5):
        engine.step()
    before = {output.id: output for output in engine.load(published(new), version=1, kv=kv)}
    assert {(len(output.ids), output.version) for output in before.values()} == {(5, 0)}
    after = finish(engine)
    assert {(len(output.ids), output.version) for output in after.values()} == {(15, 1)}
    uncached = isinstance(engine, AnyEngine) and engine._model.together == UNCACHED
    for id, output in after.items():
        tokens = [*PROMPTS[id], *before[id].ids]
        if kv == "recompute" or uncached:
            assert_close(output, reference(new, tokens, output.ids))
        else:
            past = "cache_params" if model_type == "mamba" else "past_key_values"
            cache, logprobs = old(torch.tensor([tokens[:-1]]), use_cache=True)[past], []
            for last, id in zip([tokens[-1], *output.ids], output.ids, strict=False):
                out = new(torch.tensor([[last]]), **{past: cache}, use_cache=True)
                cache = out[past]
                logprobs.append((out.logits[0, -1] / TEMPERATURE).log_softmax(-1)[id].item())
            assert_close(output, torch.tensor(logprobs))


def test_a_version_that_it_does_not_serve_is_refused(saved: Saved) -> None:
    engine = engine_of(saved[0])
    engine.submit(GenerationRequest("pinned", PROMPTS["17.0"], (), 0, pin=0))
    engine.step()
    engine.load(published(saved[1]), version=1, kv="keep")
    assert engine.refused == ["pinned"] and engine.idle


def test_after_a_sleep_it_generates_the_same(saved: Saved) -> None:
    engine = engine_of(saved[0])
    before = completions(engine)
    engine.sleep()
    engine.wake()
    assert completions(engine) == before


def test_incomplete_weights_are_refused_and_change_nothing(saved: Saved) -> None:
    engine, tensors = engine_of(saved[0]), published(saved[1])
    name = next(iter(tensors))
    with pytest.raises(
        ValueError, match=f"1 of {len(tensors)} weights are missing or of another shape: {name}"
    ):
        engine.load({each: tensors[each] * 2 for each in tensors if each != name}, version=1, kv="keep")
    assert torch.equal(engine.weights()[name], tensors[name])
