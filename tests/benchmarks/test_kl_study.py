"""The parts of the KL study: who writes which token, and the divergence that is measured of it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kl_policies import LENGTH, MAX_LAG, Policy, divergence, mixed, respond, switch_positions
from kl_study import interval, mean_lag, resample
from tailrace.data.encoding import load_tokenizer
from tailrace.types import KV, Prompt

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
OLD, NEW = QUICKSTART / "worked", QUICKSTART / "model"
PROBLEMS = ("1 + 2", "7 - 3", "8 - 4 + 2 - 9 + 5 + 1 - 6 + 3", "2 + 2 + 2 + 2 + 9 - 1 - 4 + 4")


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    tokenizer = load_tokenizer(OLD)
    text = "State the final answer to the following arithmetic problem: {} =\n"
    return [Prompt(n, tokenizer.encode(text.format(problem))) for n, problem in enumerate(PROBLEMS)]


def model(folder: Path) -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    """Checkpoints of a policy that changes much at each step."""
    old, new = model(OLD), model(NEW)
    return [old, new] * MAX_LAG


def test_weights_switch_where_the_paper_says() -> None:
    assert switch_positions(3, length=2048) == [128, 192, 256]


def test_an_update_beyond_the_longest_response_never_comes() -> None:
    assert len(switch_positions(MAX_LAG)) == MAX_LAG - 2
    assert max(switch_positions(MAX_LAG)) < LENGTH


def test_a_mixed_policy_takes_the_next_weights_at_each_switch(models: list[PreTrainedModel]) -> None:
    old, new = models[:2]
    assert list(mixed(models, 2, "keep").segments(length=14)) == [(old, 0, 8), (new, 8, 12), (old, 12, 14)]


def test_the_mean_lag_counts_the_tokens_that_were_written() -> None:
    kl = np.full((1, LENGTH), np.nan)
    kl[0, :10] = 0.0  # eight tokens before the first of two updates, two after it
    assert mean_lag(2, kl) == pytest.approx((8 * 2 + 2 * 1) / 10)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_identical_checkpoints_diverge_by_exactly_zero(
    models: list[PreTrainedModel], prompts: list[Prompt], kv: KV
) -> None:
    same = mixed([model(OLD)] * MAX_LAG, MAX_LAG, kv)
    kl, _ = divergence(respond(OLD, same, prompts), same, model(OLD))
    assert np.nanmax(np.abs(kl)) == 0.0


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_the_replay_mixes_the_weights_as_the_engine_does(
    models: list[PreTrainedModel], prompts: list[Prompt], kv: KV
) -> None:
    policy = mixed(models, MAX_LAG, kv)
    responses = respond(OLD, policy, prompts)
    assert max(len(response.ids) for response in responses) > switch_positions(1)[0]
    _, error = divergence(responses, policy, models[1])
    assert error < 1e-3


def test_a_kept_cache_is_another_policy_than_a_recomputed_one(
    models: list[PreTrainedModel], prompts: list[Prompt]
) -> None:
    responses = respond(OLD, mixed(models, MAX_LAG, "keep"), prompts)
    _, error = divergence(responses, mixed(models, MAX_LAG, "recompute"), models[1])
    assert error > 1e-2


def test_the_divergence_of_a_lag_ends_with_each_response(
    models: list[PreTrainedModel], prompts: list[Prompt]
) -> None:
    old, new = models[:2]
    responses = respond(OLD, Policy([old]), prompts)
    kl, _ = divergence(responses, Policy([old]), new)
    assert np.isfinite(kl).sum(1).tolist() == [len(response.ids) for response in responses]
    assert np.nanmin(kl) >= 0 and np.nansum(kl[:, 0]) > 0.1


def test_nats_a_token_are_those_of_all_prompts_with_the_draws_around_them() -> None:
    kl = np.array([[1.0, 2.0], [3.0, np.nan]])
    mean, low, high = interval(resample(kl))
    assert (mean, low, high) == (2.0, 1.5, 3.0)
