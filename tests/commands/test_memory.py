"""--dry-run says what memory a run needs, and a run that cannot fit is refused before anything starts."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.commands import memory
from tailrace.commands.memory import host_limit, run_memory
from tailrace.config import load_config
from tailrace.model_folder import context_length


def dry_run(config: Path, *words: str) -> int:
    return main(["train", str(config), "--output-dir", str(config.parent / "out"), "--dry-run", *words])


def named(config: Path, overrides: dict[str, str]) -> dict[str, int]:
    return {each.name: each.num for each in run_memory(load_config(config, overrides))}


def test_a_dry_run_prints_every_process_as_comments_of_the_config(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(config_path, "--engine.replicas", "2") == 0
    out = capsys.readouterr().out
    assert tomllib.loads(out)["engine"]["replicas"] == 2
    comments = [line for line in out.splitlines() if line.startswith("#")]
    starts: Sequence[str] = (
        "# memory, estimated:",
        "#   trainer: ",
        "#   engine: 2 x ",
        "#   weights in /dev/shm",
    )
    for line, start in zip(comments, starts, strict=False):
        assert line.startswith(start)
    assert comments[-1].startswith("#   host: ")


def test_a_run_that_cannot_fit_is_refused_with_the_numbers(
    config_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_limit", lambda: 2**30)
    folder = config_path.parent / "out"
    for words in ([], ["--dry-run"]):
        assert main(["train", str(config_path), "--output-dir", str(folder), *words]) == 2
        error = capsys.readouterr().err
        assert "model.path = " in error
        assert "GiB of host memory, and this machine has 1.0 GiB; the largest part is 1 x " in error
        assert "lower " in error
    assert not folder.exists()


def test_the_processes_are_those_of_the_config(config_path: Path) -> None:
    assert named(config_path, {})["trainer"] == 1
    sharded = named(config_path, {"trainer.ranks": "2", "trainer.replicas": "2"})
    assert (sharded["trainer"], sharded["trainer rank"]) == (2, 2)
    with_reference = {"algorithm.kl_coef": "0.1"}
    assert "reference" in named(config_path, with_reference)
    assert "reference" not in named(config_path, with_reference | {"trainer.lora.rank": "4"})
    joined = {"broker.url": '"redis://nowhere:1"', "broker.joined": '["trainer"]'}
    assert "trainer" not in named(config_path, joined)
    assert "engine" not in named(config_path, {"engine": '{ kind = "vllm", urls = ["http://nowhere:1"] }'})


def test_an_episode_may_fill_the_context_of_the_model(config_path: Path) -> None:
    def kv_bytes(environment: str) -> int:
        given = {"environment": environment, "data.max_prompt_tokens": "32", "engine.max_num_seqs": "1"}
        processes = run_memory(load_config(config_path, given))
        return next(each.on_device["KV cache"] for each in processes if each.name == "engine")

    single, episodes = map(kv_bytes, ('{ kind = "single_turn" }', '{ kind = "python", environment = "a:b" }'))
    config = load_config(config_path)
    assert config.model and config.sampling
    context = context_length(config.model.path)
    assert single * context == episodes * (32 + config.sampling.max_completion_tokens)


def test_the_trainer_computes_the_longest_sample_alone(config_path: Path) -> None:
    """Prompts count where they are bounded, and the tokens of an environment fill the context."""

    def activations(**given: str) -> int:
        overrides = {"trainer.max_tokens_per_microbatch": "1", "trainer.device": "cuda"} | {
            key.replace("__", "."): value for key, value in given.items()
        }
        processes = run_memory(load_config(config_path, overrides))
        return next(each.on_device["activations"] for each in processes if each.name == "trainer")

    of_one_token = activations(sampling__max_completion_tokens="1")
    assert activations(sampling__max_completion_tokens="8") == 8 * of_one_token
    assert activations(sampling__max_completion_tokens="8", data__max_prompt_tokens="32") == 40 * of_one_token
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
