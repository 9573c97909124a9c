"""The memory of the processes of a run."""

from pathlib import Path

import pytest

from tailrace.config import load_config
from tailrace.drivers.assembly import machine
from tailrace.drivers.assembly.machine import host_limit
from tailrace.drivers.assembly.memory import longest_sample, run_memory
from tailrace.model_folder import context_length


def named(config: Path, overrides: dict[str, str]) -> dict[str, int]:
    return {each.name: each.num for each in run_memory(load_config(config, overrides), 8)}


def test_the_processes_are_those_of_the_config(config_path: Path) -> None:
    assert named(config_path, {})["trainer"] == 1
    sharded = named(config_path, {"trainer.ranks": "2", "trainer.replicas": "2"})
    assert sharded["trainer"] == 4
    files = {"weights.transport": "filesystem", "trainer.replicas": "2"}
    assert "copies of the weights" not in named(config_path, files), "the trainer's estimate has them"
    assert named(config_path, files | {"trainer.device": "cuda"})["copies of the weights"] == 2
    with_reference = {"algorithm.kl_coef": "0.1"}
    assert "reference" in named(config_path, with_reference)
    assert "reference" not in named(config_path, with_reference | {"trainer.lora.rank": "4"})
    joined = {"host.listen": '"0.0.0.0:7777"', "host.join": '["trainer", "engine"]'}
    assert named(config_path, joined).keys().isdisjoint({"trainer", "engine"})
    assert "engine" not in named(config_path, {"engine": '{ kind = "vllm", urls = ["http://nowhere:1"] }'})


def test_the_longest_sample_follows_from_data_and_limits_and_an_episode_fills_the_context(
    config_path: Path,
) -> None:
    def longest(**given: str) -> int:
        overrides = {key.replace("__", "."): value for key, value in given.items()}
        return longest_sample(load_config(config_path, overrides), 32)

    assert longest(sampling__max_completion_tokens="8") == 40
    assert longest(sampling__max_completion_tokens="8", data__max_prompt_tokens="16") == 24
    model = load_config(config_path).model
    assert model
    environment = '{ kind = "python", environment = "a:b" }'
    assert longest(environment=environment) == context_length(model.path)


def test_the_limit_of_the_machine_is_that_of_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text("123456\n")
    (tmp_path / "unlimited").write_text("max\n")
    monkeypatch.setattr(machine, "_CGROUP_LIMITS", (tmp_path / "memory.max", tmp_path / "absent"))
    assert host_limit() == 123456
    monkeypatch.setattr(machine, "_CGROUP_LIMITS", (tmp_path / "unlimited",))
    assert host_limit() > 2**29
