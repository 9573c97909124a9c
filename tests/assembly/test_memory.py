"""The memory of the processes of a run."""

from pathlib import Path

import pytest

from tailrace.assembly import memory
from tailrace.assembly.memory import host_limit, run_memory
from tailrace.config import load_config
from tailrace.model_folder import context_length


def named(config: Path, overrides: dict[str, str]) -> dict[str, int]:
    return {each.name: each.num for each in run_memory(load_config(config, overrides), 8)}


def test_the_processes_are_those_of_the_config(config_path: Path) -> None:
    assert named(config_path, {})["trainer"] == 1
    sharded = named(config_path, {"trainer.ranks": "2", "trainer.replicas": "2"})
    assert (sharded["trainer"], sharded["trainer rank"]) == (2, 2)
    with_reference = {"algorithm.kl_coef": "0.1"}
    assert "reference" in named(config_path, with_reference)
    assert "reference" not in named(config_path, with_reference | {"trainer.lora.rank": "4"})
    joined = {"host.listen": '"0.0.0.0:7777"', "host.join": '["trainer", "engine"]'}
    assert named(config_path, joined).keys().isdisjoint({"trainer", "engine"})
    assert "engine" not in named(config_path, {"engine": '{ kind = "vllm", urls = ["http://nowhere:1"] }'})


def test_an_episode_may_fill_the_context_of_the_model(config_path: Path) -> None:
    def kv_bytes(environment: str) -> int:
        given = {"environment": environment, "engine.max_num_seqs": "1", "engine.device": "cuda"}
        processes = run_memory(load_config(config_path, given), 32)
        return next(each.on_device["KV cache"] for each in processes if each.name == "engine")

    single, episodes = map(kv_bytes, ('{ kind = "single_turn" }', '{ kind = "python", environment = "a:b" }'))
    config = load_config(config_path)
    assert config.model and config.sampling
    context = context_length(config.model.path)
    assert single * context == episodes * (32 + config.sampling.max_completion_tokens)


def test_the_trainer_computes_the_longest_sample_alone(config_path: Path) -> None:
    """The longest prompt counts as far as the data are bounded, and the tokens of an environment fill the
    context."""

    def activations(prompt_tokens: int = 0, **given: str) -> int:
        overrides = {"trainer.max_tokens_per_microbatch": "1", "trainer.device": "cuda"} | {
            key.replace("__", "."): value for key, value in given.items()
        }
        processes = run_memory(load_config(config_path, overrides), prompt_tokens)
        return next(each.on_device["activations"] for each in processes if each.name == "trainer")

    of_one_token = activations(sampling__max_completion_tokens="1")
    assert activations(32, sampling__max_completion_tokens="8") == 40 * of_one_token
    bounded = activations(32, sampling__max_completion_tokens="8", data__max_prompt_tokens="16")
    assert bounded == 24 * of_one_token
    model = load_config(config_path).model
    assert model
    episodes = activations(environment='{ kind = "python", environment = "a:b" }')
    assert episodes == context_length(model.path) * of_one_token


def test_the_limit_of_the_machine_is_that_of_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text("123456\n")
    (tmp_path / "unlimited").write_text("max\n")
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (tmp_path / "memory.max", tmp_path / "absent"))
    assert host_limit() == 123456
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (tmp_path / "unlimited",))
    assert host_limit() > 2**29
