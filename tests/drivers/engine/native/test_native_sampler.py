"""How tokens are drawn: exact noise, exact distributions, and log-probs of the whole vocabulary."""

import pytest
import torch
from native_cases import PROMPTS, finish, submit_all

from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.sampler import draw, noise, noise_stream
from tailrace.types import SamplingParams

MASK = 2**64 - 1


def mix(z: int) -> int:
    """SplitMix64's finaliser on Python's integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def drawn(logits, uniforms, greedy=(), **params):
    """Token ids and their log-probs, [T] each; all rows are sampled alike."""
    return draw(logits, uniforms, [SamplingParams(1, **params)] * len(logits), greedy)


def noise_of(seeds, places):
    """Of the first place of each seed, and so on: [T]."""
    streams = torch.tensor([noise_stream(seed) for seed in seeds])
    return noise(streams, torch.tensor(list(places)))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 + 5])
def test_noise_is_splitmix64_of_seed_and_place(seed):
    expected = [
        (mix((mix(seed & MASK) + (place + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53
        for place in range(200)
    ]
    assert noise_of([seed] * 200, range(200)).tolist() == expected


def test_each_completion_has_the_noise_of_its_own_seed_and_place():
    alone = [noise_of([3], [7]).item(), noise_of([4], [0]).item()]
    assert noise_of([3, 4], [7, 0]).tolist() == alone


def test_drawn_frequencies_are_the_probabilities():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    num = 40_000
    uniforms = noise_of([3] * num, range(num))
    ids, logprobs = drawn(logits.expand(num, -1), uniforms)
    frequencies = torch.bincount(ids, minlength=5) / num
    torch.testing.assert_close(frequencies, logits.softmax(0), atol=0.008, rtol=0)
    torch.testing.assert_close(logprobs, logits.log_softmax(0)[ids])


def test_the_draw_inverts_the_cumulative_distribution():
    logits = torch.tensor([0.0, 0.25, 0.25, 0.5, 0.0]).log()
    uniforms = torch.tensor([0.0, 0.2499, 0.2501, 0.4999, 0.5001, 1 - 2**-53], dtype=torch.float64)
    ids, _ = drawn(logits.expand(6, -1), uniforms)
    assert ids.tolist() == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_k": 3, "top_p": 0.95}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
    ],
)
def test_truncation_cuts_the_tail_but_not_the_recorded_logprob(settings, kept):
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    uniforms = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    ids, logprobs = drawn(probs.log().expand(1000, -1), uniforms, **settings)
    assert set(ids.tolist()) == kept
    torch.testing.assert_close(logprobs, probs.log()[ids])


def test_tokens_do_not_depend_on_the_company(make_engine):
    together = make_engine()
    submit_all(together, PROMPTS)
    ended = finish(together)
    for seed, (id, prompt) in enumerate(PROMPTS.items()):
        alone = make_engine()
        alone.submit(GenerationRequest(id, prompt, (), seed))
        assert finish(alone)[id].ids == ended[id].ids


def test_top_k_one_is_greedy(make_engine, models):
    engine = make_engine(sampling=SamplingSettings(max_completion_tokens=10, top_k=1))
    engine.submit(GenerationRequest("x", PROMPTS["17"], (), 0))
    tokens = PROMPTS["17"] + finish(engine)["x"].ids
    with torch.no_grad():
        best = models["qwen3"][1](torch.tensor([tokens])).logits[0].argmax(-1).tolist()
    assert tokens[17:] == best[16:-1]


def test_a_token_of_a_large_vocabulary_is_chosen_as_from_one_cumulative_sum():
    """All mass lies in four of 24 blocks; the last tokens have none."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((1, 6000), float("-inf"))
    places = torch.randperm(5000, generator=generator)[:900] // 4 + 1000
    logits[0, places] = torch.randn(900, generator=generator)
    num = 4_000
    uniforms = torch.rand(num, generator=generator, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    ids, logprobs = drawn(logits.expand(num, -1), uniforms)
    cumulative = logits[0].double().softmax(0).cumsum(0)
    wanted = torch.searchsorted(cumulative, uniforms * cumulative[-1], right=True)
    near = (cumulative[ids] - uniforms).abs().minimum((cumulative[wanted] - uniforms).abs()) < 1e-6
    assert torch.equal(ids[~near], wanted[~near]) and (~near).sum() > 0.99 * num
    assert logits[0, ids].isfinite().all()
    torch.testing.assert_close(logprobs, logits[0].log_softmax(0)[ids])


def test_greedy_rows_get_the_most_likely_token_and_the_others_do_not_change():
    logits = torch.tensor([[0.0, 1.0, 0.5]] * 3)
    uniforms = torch.tensor([0.99, 0.01, 0.99], dtype=torch.float64)
    ids, logprobs = drawn(logits, uniforms, greedy=[0, 1])
    assert ids.tolist() == [1, 1, 2]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1, 2], [1, 1, 2]])


def test_a_greedy_request_does_not_depend_on_its_seed(make_engine):
    engine = make_engine()
    for seed in range(3):
        engine.submit(GenerationRequest(str(seed), next(iter(PROMPTS.values())), (), seed, greedy=True))
    completions = {tuple(output.ids) for output in finish(engine).values()}
    assert len(completions) == 1


def test_every_row_is_sampled_by_its_own_parameters():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 4)
    uniforms = torch.full((4,), 0.999, dtype=torch.float64)
    params = [
        SamplingParams(1),
        SamplingParams(1, top_k=2),
        SamplingParams(1, top_p=0.5),
        SamplingParams(1, temperature=0.1),
    ]
    found = draw(logits, uniforms, params)
    assert found.ids.tolist() == [3, 1, 0, 0]
    plain, cold = logits[0].log_softmax(-1).tolist(), (logits[0] / 0.1).log_softmax(-1).tolist()
    assert found.logprobs.tolist() == pytest.approx([plain[3], plain[1], plain[0], cold[0]], abs=1e-6)


def test_parameters_of_a_request_replace_the_settings_of_the_engine(make_engine):
    engine = make_engine(max_completion_tokens=60)
    own = SamplingParams(5, temperature=0.8)
    for id, params in (("own", own), ("settings", None)):
        engine.submit(GenerationRequest(id, PROMPTS["17"], (), 7, sampling=params))
    ended = finish(engine)
    assert ended["own"].ids == ended["settings"].ids[:5]


def test_a_request_may_have_a_temperature_of_its_own(make_engine):
    engine = make_engine(max_completion_tokens=20)
    for id, temperature in (("plain", None), ("cold", 1e-4)):
        engine.submit(GenerationRequest(id, PROMPTS["17"], (), 7, temperature=temperature))
    engine.submit(GenerationRequest("greedy", PROMPTS["17"], (), 7, greedy=True))
    ended = finish(engine)
    assert ended["cold"].ids == ended["greedy"].ids
    assert ended["cold"].behavior_logprobs == pytest.approx([0.0] * len(ended["cold"].ids), abs=1e-3)
    assert min(ended["plain"].behavior_logprobs) < -0.01


def test_a_request_may_have_a_top_p_of_its_own(make_engine):
    engine = make_engine(max_completion_tokens=20)
    for id, top_p in (("plain", None), ("whole", 1.0), ("likeliest", 1e-6)):
        engine.submit(GenerationRequest(id, PROMPTS["17"], (), 7, top_p=top_p))
    engine.submit(GenerationRequest("greedy", PROMPTS["17"], (), 7, greedy=True))
    ended = finish(engine)
    assert ended["whole"].ids == ended["plain"].ids != ended["likeliest"].ids == ended["greedy"].ids
    assert (
        ended["likeliest"].behavior_logprobs == ended["greedy"].behavior_logprobs
    )  # of the whole vocabulary


def test_a_request_may_have_a_limit_of_its_own(make_engine):
    engine = make_engine(max_completion_tokens=20)
    engine.submit(GenerationRequest("plain", PROMPTS["17"], (), 7))
    engine.submit(GenerationRequest("short", PROMPTS["17"], (), 7, max_completion_tokens=5))
    ended = finish(engine)
    assert ended["short"].ids == ended["plain"].ids[:5]
    assert ended["short"].finish_reason == "length"
