"""The examples for one GPU and for a node of eight: what `tailrace init` writes, on machines without them."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from helpers.page_runs import save_model
from tailrace.cli import main
from tailrace.config import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = {"gsm8k": ("Qwen/Qwen3-1.7B", "H100"), "eight_gpus": ("Qwen/Qwen2.5-7B-Instruct", "8xH100")}
SOLVED = [
    {
        "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips "
        "in May. How many clips did Natalia sell altogether in April and May?",
        "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 "
        "clips altogether in April and May.\n#### 72",
    },
    {
        "question": "Mark's car breaks down and he needs to get a new radiator. What does it cost?",
        "answer": "It costs 400*3 + 30 = $<<400*3+30=1230>>1,230.\n#### 1,230",
    },
]
"""Rows in the form of GSM8K; the first one is its first."""


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """Both examples beside the data in the form in which `save_to_disk` leaves them."""
    import datasets  # most of a second, which other processes of the tests need not spend

    for name in MODELS:
        shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("rows"))
    split = datasets.Dataset.from_list(SOLVED * 8)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "gsm8k" / "rows"))
    return tmp_path


@pytest.mark.parametrize("name", MODELS)
def test_an_example_is_what_init_writes(examples: Path, name: str) -> None:
    model, gpus = MODELS[name]
    there = {file: (examples / name / file).read_text() for file in ("run.toml", "rewards.py")}
    for file in there:
        (examples / name / file).unlink()
    words = ["--model", model, "--gpus", gpus, "--data", str(examples / "gsm8k" / "rows")]
    assert main(["init", *words, "--folder", str(examples / name)]) == 0
    assert {file: (examples / name / file).read_text() for file in there} == there


@pytest.mark.parametrize("name", MODELS)
def test_an_example_passes_a_dry_run_without_its_gpus(
    examples: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(examples / "model", [row["question"] for row in SOLVED])
    small = ["--model.path", str(examples / "model"), "--sampling.max_completion_tokens", "64"]
    small += ["--data.max_prompt_tokens", "250"]
    words = ["train", str(examples / name / "run.toml"), "--output-dir", str(examples / "out"), "--dry-run"]
    assert main([*words, *small]) == 0
    out, err = capsys.readouterr()
    assert "judged on a node of [sim.cluster] (H100)" in err and 'device = "cuda"' in out
    assert main([*words, *small, "--sim.cluster.devices", "7", "--placement.trainer", "[[8]]"]) == 2


@pytest.mark.parametrize("name", MODELS)
def test_an_example_is_simulated(examples: Path, name: str) -> None:
    config, summary = examples / name / "run.toml", examples / "summary.json"
    short = ["--run.rounds", "4", "--run.group_size", "2"]
    assert main(["simulate", str(config), "--json", str(summary), *short]) == 0
    assert json.loads(summary.read_text())["steps"] == 4


def test_four_gpus_generate_and_four_train() -> None:
    config = load_config(EXAMPLES / "eight_gpus" / "run.toml")
    assert config.placement.engines == ((0,), (1,), (2,), (3,))
    assert config.placement.trainer == ((4, 5, 6, 7),)
    assert (config.engine.kind, config.engine.num_engines, config.trainer.ranks) == ("vllm", 4, 4)


def test_examples_have_the_reward_that_init_writes() -> None:
    written = EXAMPLES.parent / "src" / "tailrace" / "extras" / "init" / "rewards.py.txt"
    texts = {(EXAMPLES / name / "rewards.py").read_text() for name in ("gsm8k", "eight_gpus")}
    assert texts == {written.read_text().replace("$answer", "answer")}


def test_the_reward_reads_the_answers_of_gsm8k() -> None:
    spec = importlib.util.spec_from_file_location("gsm8k_rewards", EXAMPLES / "gsm8k" / "rewards.py")
    assert spec and spec.loader
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    for row, right in zip(SOLVED, ("72", "1230"), strict=True):
        given = {"answer": row["answer"], "finish_reason": "stop"}
        assert rewards.score(row["answer"], **given) == 1.0
        assert rewards.score(f"<think>48 and 24</think> The answer is ${right}.00.", **given) == 1.0
        assert rewards.score(f"{right}, or rather 7", **given) == rewards.score("", **given) == 0.0
