"""How tokens are drawn: exact noise, exact distributions, and log-probs of the whole vocabulary."""

import math

import pytest
import torch
from native_cases import PROMPTS, finish, submit_all

from tailrace.contracts.engine import GenerationRequest
from tailrace.contracts.sampling import SamplingSettings
from tailrace.drivers.engine.native.sampler import draw, noise, noise_keys, noise_stream
from tailrace.types import SamplingParams

MASK = 2**64 - 1


def mix(z: int) -> int:
    """SplitMix64's finaliser on Python's integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def drawn(logits, keys, greedy=(), **params):
    """Token ids and their log-probs, [T] each; all rows are sampled alike."""
    return draw(logits, keys, [SamplingParams(1, **params)] * len(logits), greedy)


def keys_of(seeds, places):
    """Of the first place of each seed, and so on: [T]."""
    streams = torch.tensor([noise_stream(seed) for seed in seeds])
    return noise_keys(streams, torch.tensor(list(places)))


def keys(num, seed=3):
    """Of the first places of one seed."""
    return noise_keys(torch.tensor(noise_stream(seed)), torch.arange(num))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 + 5])
def test_noise_is_splitmix64_of_seed_place_and_number(seed):
    expected = [
        [
            -math.log(((mix((mix(seed & MASK) + counter * 0x9E3779B97F4A7C15) & MASK) >> 12) + 0.5) / 2**52)
            for counter in range((place << 20) + 1, (place << 20) + 8)
        ]
        for place in range(100)
    ]
    found = noise(keys(100, seed), 7)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_each_completion_has_the_noise_of_its_own_seed_and_place():
    alone = [noise(keys_of([3], [7]), 9).tolist()[0], noise(keys_of([4], [0]), 9).tolist()[0]]
    assert noise(keys_of([3, 4], [7, 0]), 9).tolist() == alone


def zipf(num, power):
    return -power * torch.arange(1, num + 1).float().log()


DISTRIBUTIONS = {
    "two": (torch.tensor([0.0, 1.0]), {}),
    "ties": (torch.zeros(5), {}),
    "zeros": (torch.tensor([2.0, float("-inf"), 1.0, 0.0, -1.0, float("-inf")]), {}),
    "a sharp one": (zipf(96, 3.0), {}),
    "hot": (zipf(61, 2.0), {"temperature": 1.7}),
    "blocks of 16": (zipf(640, 1.0), {}),
    "large blocks, the last of them short": (zipf(2100, 0.7).flip(0), {}),
    "blocks without weight": (zipf(2304, 1.1).index_fill(0, torch.arange(128, 2000), float("-inf")), {}),
    "top-k with ties": (zipf(300, 1.0).repeat_interleave(2), {"top_k": 7}),
    "top-p": (zipf(96, 1.0), {"top_p": 0.6, "temperature": 0.8}),
}


def kept(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The distribution of a draw, in Python's numbers: [V]."""
    weights = (logits.double() / temperature).softmax(0).tolist()
    if top_k:
        least = sorted(weights)[-top_k]
        weights = [weight if weight >= least * (1 - 1e-9) else 0.0 for weight in weights]
    if top_p < 1:
        total, before = sum(weights), 0.0
        for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
            own = weights[place]
            weights[place] = own if before < top_p * total else 0.0
            before += own
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_million_draws_have_the_frequencies_of_the_distribution(name):
    """Chi-square, within five standard deviations of its mean."""
    logits, params = DISTRIBUTIONS[name]
    num, part = 1_000_000, 4_000
    counts = torch.zeros(len(logits), dtype=torch.float64)
    for part_keys in keys(num).split(part):
        ids, _ = drawn(logits.expand(part, -1), part_keys, **params)
        counts += torch.bincount(ids, minlength=len(logits))
    expected = num * kept(logits, **params)
    assert counts[expected == 0].sum() == 0
    often = expected >= 10
    observed, expected = (torch.cat((x[often], x[~often].sum()[None])) for x in (counts, expected))
    rows = expected > 0
    squares, degrees = ((observed - expected)[rows] ** 2 / expected[rows]).sum(), int(rows.sum()) - 1
    assert abs(squares - degrees) < 5 * math.sqrt(2 * degrees)


def test_the_log_prob_of_a_drawn_token_is_that_of_the_whole_vocabulary():
    """In a vocabulary of several blocks, the last of them short. No token without weight is drawn."""
    logits = zipf(2500, 1.0).index_fill(0, torch.arange(0, 2000, 3), float("-inf"))
    ids, logprobs = drawn(logits.expand(2_000, -1), keys(2_000))
    torch.testing.assert_close(logprobs, logits.log_softmax(0)[ids])
    assert logprobs.isfinite().all() and len(set(ids.tolist())) > 300


@pytest.mark.parametrize("size", [96, 300, 3000])
def test_other_weights_change_few_tokens_of_a_seed(size):
    """At most three times the total variation. The inverse of the cumulative distribution would change some
    thirty times it in a large vocabulary."""
    num, generator = 4_000, torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(num, size, generator=generator)
    moved = logits + 0.03 * torch.randn(num, size, generator=generator)
    variation = (logits.softmax(-1) - moved.softmax(-1)).abs().sum(-1).mean() / 2
    changed = drawn(logits, keys(num)).ids != drawn(moved, keys(num)).ids
    assert 0.5 * variation < changed.double().mean() < 3 * variation


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
    ids, logprobs = drawn(probs.log().expand(1000, -1), keys(1000), **settings)
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


def test_greedy_rows_get_the_most_likely_token_and_the_others_do_not_change():
    logits = torch.tensor([[0.0, 1.0, 0.5]] * 300)
    ids, logprobs = drawn(logits, keys(300), greedy=range(200))
    assert ids.tolist()[:200] == [1] * 200
    assert ids.tolist()[200:] == drawn(logits, keys(300)).ids.tolist()[200:] != [1] * 100
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])


def test_a_greedy_request_does_not_depend_on_its_seed(make_engine):
    engine = make_engine()
    for seed in range(3):
        engine.submit(GenerationRequest(str(seed), next(iter(PROMPTS.values())), (), seed, greedy=True))
    completions = {tuple(output.ids) for output in finish(engine).values()}
    assert len(completions) == 1


def test_every_row_is_sampled_by_its_own_parameters():
    """As if all rows had them."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(400, -1)
    params = [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.1}]
    found = draw(logits, keys(400), [SamplingParams(1, **each) for each in params * 100])
    for number, each in enumerate(params):
        alike = drawn(logits, keys(400), **each)
        assert found.ids[number::4].tolist() == alike.ids[number::4].tolist()
        assert found.logprobs[number::4].tolist() == alike.logprobs[number::4].tolist()
    assert [len(set(found.ids[number::4].tolist())) for number in range(3)] == [4, 2, 1]


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
    whole = pytest.approx(ended["greedy"].behavior_logprobs, abs=1e-5)  # of the whole vocabulary
    assert ended["likeliest"].behavior_logprobs == whole


def test_a_request_may_have_a_limit_of_its_own(make_engine):
    engine = make_engine(max_completion_tokens=20)
    engine.submit(GenerationRequest("plain", PROMPTS["17"], (), 7))
    engine.submit(GenerationRequest("short", PROMPTS["17"], (), 7, max_completion_tokens=5))
    ended = finish(engine)
    assert ended["short"].ids == ended["plain"].ids[:5]
    assert ended["short"].finish_reason == "length"
