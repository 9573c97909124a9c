"""How far responses of mixed policies are from on-policy: where the weights change, and what is zero."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from common import save_model
from kl_study import Policy, divergence, mixed, nats, respond, switch_positions

PROMPTS = [[3, 4, 5], [6, 7, 8]]
LENGTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    save_model(path, vocab_size=32, num_key_value_heads=2, head_dim=16, max_position_embeddings=128, **shape)
    return path


@pytest.fixture(scope="module")
def models(folder: Path) -> list[torch.nn.Module]:
    """The model, and the same after two changes of its weights."""
    found = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(3)]
    for number, model in enumerate(found):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.1 * number)
    return found


def test_the_first_update_takes_twice_as_long() -> None:
    assert switch_positions(3, 128) == [8, 12, 16]
    assert switch_positions(32, 2048)[:2] == [128, 192]
    assert len(switch_positions(32, 2048)) == 30  # t_31 = L


def test_a_mixed_policy_is_the_old_one_until_the_first_update_and_its_replay_is_the_engines(
    folder: Path, models: list[torch.nn.Module]
) -> None:
    old = Policy(models[:1])
    first = switch_positions(1, LENGTH)[0]
    before, error = divergence(respond(folder, old, PROMPTS, LENGTH), old, models[2], LENGTH)
    assert error < 1e-4
    for kv in ("keep", "recompute"):
        policy = mixed(models, 2, LENGTH, kv)
        responses = respond(folder, policy, PROMPTS, LENGTH)
        kl, error = divergence(responses, policy, models[2], LENGTH)
        assert error < 1e-4
        assert kl[:, :first] == pytest.approx(before[:, :first], rel=1e-4, nan_ok=True)
    late = kl[:, switch_positions(2, LENGTH)[-1] :]
    assert nats(late) == pytest.approx(0.0, abs=1e-6)  # recomputed, and all weights are the newest


def test_equal_weights_have_no_divergence_with_either_cache(
    folder: Path, models: list[torch.nn.Module]
) -> None:
    for kv in ("keep", "recompute"):
        policy = mixed(models[:1] * 3, 2, LENGTH, kv)
        kl, _ = divergence(respond(folder, policy, PROMPTS, LENGTH), policy, models[0], LENGTH)
        assert nats(kl) == 0.0
