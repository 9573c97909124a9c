"""Live runs: real processes, a real model, files on disk."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tailrace.commands.train import train
from tailrace.config import load_config
from tailrace.errors import CheckpointError, ConfigError


def trained_prompts(folder: Path) -> Counter[int]:
    """How many samples of each prompt were trained, by the run's own records."""
    records = [
        json.loads(line)
        for path in sorted((folder / "samples").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return Counter(int(record["id"].split(".")[0]) for record in records)


def test_a_run_leaves_everything_about_itself_in_its_output_directory(config_path: Path) -> None:
    folder = config_path.parent / "out"
    config = load_config(config_path)
    train(config, folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["groups"] == {"trained": 12, "filtered": 0, "dropped": 0, "reasons": {}, "parked": 0}
    assert summary["steps"] == 6
    assert trained_prompts(folder) == {prompt: 2 for prompt in range(12)}
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert tomllib.loads((folder / "config.toml").read_text())["schedule"]["R"] == 4
    assert json.loads((folder / "trace.json").read_text())
    assert (folder / "timeline.png").stat().st_size > 1000
    assert {path.name for path in (folder / "logs").iterdir()} == {
        "engine-0.log",
        "trainer.log",
        "scorer-0.log",
    }


def test_ppo_with_a_kl_trains_saves_its_critic_and_resumes(config_path: Path) -> None:
    folder = config_path.parent / "out"
    ppo = {"algorithm.name": "ppo", "algorithm.kl_coef": "0.05", "run.group_size": "1"}
    train(load_config(config_path, ppo | {"run.rounds": "2"}), folder)
    assert (folder / "checkpoints" / "round_000002" / "critic.safetensors").exists()
    train(load_config(config_path, ppo | {"run.rounds": "3"}), folder, resume=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert all(row["value_loss"] > 0 and row["skipped"] == 0 for row in steps)
    assert steps[0]["reference_kl"] == pytest.approx(0, abs=1e-6) and steps[-1]["reference_kl"] != 0
    assert (folder / "logs" / "reference.log").exists()


def test_a_checkpoint_is_a_hugging_face_folder(config_path: Path) -> None:
    folder = config_path.parent / "out"
    train(load_config(config_path, {"run.rounds": "1"}), folder)
    checkpoint = folder / "checkpoints" / "round_000001"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(checkpoint).encode("7") == AutoTokenizer.from_pretrained(
        load_config(config_path).model.path  # type: ignore[union-attr]
    ).encode("7")


def test_a_run_killed_with_sigkill_resumes_and_trains_no_group_twice(config_path: Path) -> None:
    folder = config_path.parent / "out"
    rounds = "12"
    command = [sys.executable, "-m", "tailrace.cli", "train", str(config_path), "--output-dir", str(folder)]
    command += ["--run.rounds", rounds]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        while not (folder / "checkpoints" / "round_000003").exists():
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert not (folder / "checkpoints" / "round_000012").exists()
    assert subprocess.run([*command, "--resume"], stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert trained_prompts(folder) == {prompt: 2 for prompt in range(48)}
    assert json.loads((folder / "summary.json").read_text())["groups"]["trained"] == 48


def test_a_used_output_directory_is_refused_without_resume(config_path: Path) -> None:
    folder = config_path.parent / "out"
    folder.mkdir()
    (folder / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="it holds a run already; add --resume, or choose another"):
        train(load_config(config_path), folder)


def test_resuming_without_a_checkpoint_says_so(config_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint; start without --resume"):
        train(load_config(config_path), config_path.parent / "out", resume=True)


def test_rewards_that_raise_hang_or_return_nonsense_are_counted_and_the_run_goes_on(
    config_path: Path,
) -> None:
    folder = config_path.parent / "out"
    rewards = f"{config_path.parent / 'rewards.py'}:unreliable"
    overrides = {
        "reward.function": rewards,
        "reward.timeout_s": "0.5",
        "run.rounds": "2",
        "run.eval_every": "0",
    }
    train(load_config(config_path, overrides), folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["groups"]["trained"] == 8
    reasons = summary["groups"]["reasons"]
    assert summary["groups"]["dropped"] == sum(reasons.values()) > 0
    for reason in reasons:
        assert reason in {
            "dropped/reward_raised",
            "dropped/reward_timeout",
            "dropped/reward_nan",
            "dropped/reward_not_a_number",
        }


def test_a_model_folder_that_is_missing_is_an_error_before_anything_starts(config_path: Path) -> None:
    config = load_config(config_path, {"model.path": "/nowhere"})
    with pytest.raises(ConfigError, match=r"model\.path = '/nowhere'"):
        train(config, config_path.parent / "out")
    assert not (config_path.parent / "out").exists()
