"""`tailrace init`: what it writes passes a dry run, is planned, trains; what it refuses."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.page_runs import save_model
from tailrace.cli import main
from tailrace.config import load_config
from tailrace.drivers.data.settings import RowsSettings
from tailrace.extras.init.command import DIVISIONS, SIZES
from tailrace.extras.plan.command import present_setting, problem_of
from tailrace.schedules import SCHEDULES
from tailrace.schedules.by_name import parameters_of

QUESTION = {"question": "What is 1 + 2?", "answer": "It is 1 + 2 = <<1+2=3>>3.\n#### 3"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and with rows in GSM8K's form."""
    save_model(tmp_path / "model", [QUESTION["question"]])
    rows = [QUESTION | {"question": f"What is {n} + 2?", "answer": f"#### {n + 2}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*words: str, model: str = "model") -> int:
    return main(["init", "--model", model, "--data", "rows.jsonl", *words])


@pytest.mark.parametrize("gpus", [*(f"{count}xH100" for count in DIVISIONS), "RTX 4090"])
def test_each_preset_passes_a_dry_run(here: Path, gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert init("--gpus", gpus, "--folder", "made") == 0
    assert "next      tailrace train made/run.toml" in capsys.readouterr().out
    assert main(["train", "made/run.toml", "--output-dir", "out", "--dry-run"]) == 0
    assert "judged on a node of [sim.cluster]" in capsys.readouterr().err
    config = load_config(here / "made" / "run.toml")
    lists = config.placement.engines + config.placement.trainer
    assert {gpu for one in lists for gpu in one} == {*range(int(gpus[0]) if gpus[1] == "x" else 1)}


@pytest.mark.parametrize(
    ("gpus", "model"),
    [
        ("8xH100", "Qwen2.5-7B"),
        ("4xH100", "Qwen3-4B"),
        ("2xH100", "Qwen3-1.7B"),
        ("1xRTX 4090", "Qwen3-1.7B"),
    ],
)
def test_the_planner_finds_each_preset_within_its_limits(here: Path, gpus: str, model: str) -> None:
    """Mean lag and effective sample size are those up to which learning was measured to lose nothing."""
    assert init("--gpus", gpus, model=f"Qwen/{model}-Instruct") == 0
    config = load_config(here / "run.toml", {"plan.steps": "16", "run.group_size": "2"})
    problem = problem_of(config)
    present, why = present_setting(config, problem)
    assert present and not why
    measured = problem.measure(*present, 16)
    assert problem.exceeded(measured) == ""
    assert present[0].rollout_devices == DIVISIONS[int(gpus[0])][0]


@pytest.mark.slow
def test_a_run_for_a_laptop_trains(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init() == 0
    assert {path.name for path in here.iterdir()} >= {"run.toml", "rewards.py"}
    assert main(["train", "run.toml", "--output-dir", "out", "--dry-run"]) == 0
    small = ["--run.rounds", "1", "--sampling.max_completion_tokens", "8", "--run.eval_every", "0"]
    assert main(["train", "run.toml", "--output-dir", "out", *small]) == 0
    assert json.loads((here / "out" / "summary.json").read_text())["steps"] == 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_schedule_runs_by_its_name_on_the_config(
    here: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init() == 0
    short = ["--run.rounds", "2", "--run.group_size", "2", "--json", "out.json"]
    words = ["simulate", "run.toml", "--schedule.name", name, *short]
    if name == "trl_async":  # its engines pin versions
        assert main(words) == 2
        assert "engine-0 serves 1 at a time, and the schedule needs 2; serve more" in capsys.readouterr().err
        words += ["--sim.engines.versions", "2"]
    assert main(words) == 0
    totals = json.loads((here / "out.json").read_text())
    assert totals["rounds"] >= 2 and totals["steps"] >= 2
    written = load_config(here / "run.toml").schedule
    lost = [key for key in written if key != "name" and key not in parameters_of(SCHEDULES[name])]
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "is translated" in line] or [""]
    assert all(f"{key} = {written[key]}" in said for key in lost)
    assert said.endswith("; run.rounds stays 2") == bool(said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["serial", "april", "pipelinerl", "tailrace", "streamrl"])
def test_another_schedule_trains_by_its_name_and_is_refused_by_the_folder_of_one(
    here: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init() == 0
    small = ["--run.rounds", "2", "--sampling.max_completion_tokens", "8", "--run.eval_every", "0"]
    words = ["train", "run.toml", "--output-dir", "out", *small]
    assert main([*words, "--schedule.name", name]) == 0
    assert load_config(here / "out" / "config.toml").schedule["name"] == name
    assert json.loads((here / "out" / "summary.json").read_text())["rounds"] == 2
    assert main([*words, "--run.rounds", "3", "--resume"]) == 2
    assert f"the run was begun with '{name}'" in capsys.readouterr().err
    assert main([*words, "--run.rounds", "3", "--resume", "--schedule.name", name]) == 0


def test_a_model_that_only_an_adapter_leaves_room_for_gets_one(here: Path) -> None:
    assert init("--gpus", "H100", model="Qwen/Qwen2.5-7B") == 0
    config = load_config(here / "run.toml")
    assert config.trainer.lora and config.trainer.lora.rank == 16
    assert config.placement.kind == "colocated"


def test_a_model_that_fits_no_device_alone_is_divided(here: Path) -> None:
    assert init("--gpus", "8 x A100-40G", model="Qwen/Qwen2.5-32B") == 0
    assert load_config(here / "run.toml").engine.num_devices in SIZES[1:]


def without_an_answer(here: Path) -> None:
    (here / "rows.jsonl").write_text('{"prompt": "1 + 1", "label": "2"}\n')


def with_a_name_of_no_parameter(here: Path) -> None:
    (here / "rows.jsonl").write_text('{"prompt": "1 + 1", "a=b": "2"}\n')


def test_any_columns_and_rows_of_messages_train_and_the_reward_names_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"chat": [{"role": "user", "content": f"What is {n} + 2?"}], "code": str(n + 2), "customer": "me"}
        for n in range(40)
    ]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert init("--prompt-column", "chat", "--answer-column", "code") == 0
    assert "def score(completion: str, code: object," in (here / "rewards.py").read_text()
    header = (here / "run.toml").read_text().partition("[run]")[0]
    assert "tailrace simulate" not in header, "it knows neither model nor machine"
    assert main(["check-reward", "run.toml", "--rows", "4"]) == 0
    assert "│ the right answer         │    1 │    100% │    4 │" in capsys.readouterr().out
    assert main(["train", "run.toml", "--output-dir", "out", "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1].endswith(": 20 rounds = 40 steps of 32 samples") and said[-1].startswith(
        "verdict   ready"
    )
    (prompt,) = [line for line in said if line.startswith("prompt ")]
    (answer,) = [line.split()[1] for line in said if line.startswith("answer ")]
    assert f"What is {int(answer) - 2} + 2?" in prompt


@pytest.mark.parametrize(
    ("words", "before", "message"),
    [
        (
            "--gpus 8xB300",
            None,
            "--gpus = '8xB300': the GPU is not known; write a number (1, 2, 4, 8), x and a GPU (A100-40G, ",
        ),
        ("--gpus=", None, "--gpus = '': the GPU is not known"),
        ("--gpus 3xH100", None, "there are presets for 1, 2, 4, 8 of them"),
        ("--gpus 1xA100-40G", None, "--gpus = '1xA100-40G': the model does not fit"),
        (
            "",
            lambda here: (here / "rewards.py").touch(),
            "it has a rewards.py already; name another --folder",
        ),
        (
            "",
            without_an_answer,
            "--answer-column = None: no column of the first row is answer, solution, ground_truth; choose "
            "from prompt, label",
        ),
        (
            "--prompt-column text",
            None,
            "'text': no column of the first row is text; choose from question, answer",
        ),
        ("--answer-column a=b", with_a_name_of_no_parameter, "--answer-column = 'a=b': no parameter of"),
        ("", lambda here: (here / "rows.jsonl").unlink(), "there is no such file or folder"),
    ],
)
def test_what_cannot_be_written_is_refused(
    here: Path,
    words: str,
    before: Callable[[Path], None] | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if before:
        before(here)
    assert init(*words.split(), model="Qwen/Qwen2.5-32B") == 2
    assert message in capsys.readouterr().err
    assert not (here / "run.toml").exists()


def test_a_name_without_its_owner_is_no_model_of_the_hub(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init("--gpus", "8xH100", model="Qwen2.5-7B") == 2
    assert "'Qwen2.5-7B': there is no such folder" in capsys.readouterr().err


def test_paths_lead_out_of_a_folder_that_is_a_link(here: Path) -> None:
    (here / "far" / "away").mkdir(parents=True)
    (here / "link").symlink_to(here / "far" / "away")
    assert init("--folder", "link") == 0
    config = load_config(here / "link" / "run.toml")
    assert config.model and config.model.path.samefile(here / "model")


def test_names_may_have_any_letter_and_sign(here: Path) -> None:
    (here / "rows.jsonl").rename(here / "Aufgaben für 🚀.jsonl")
    assert main(["init", "--model", "model", "--data", "Aufgaben für 🚀.jsonl"]) == 0
    data = load_config(here / "run.toml").data
    assert isinstance(data, RowsSettings) and data.path == here / "Aufgaben für 🚀.jsonl"


def test_the_reward_compares_the_last_number_or_the_last_word(here: Path) -> None:
    assert init() == 0
    spec = importlib.util.spec_from_file_location("written_rewards", here / "rewards.py")
    assert spec and spec.loader
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    score = rewards.score
    assert score("1 + 2 is 3.", QUESTION["answer"], "stop") == 1.0
    assert score("so $1,234.00", "... #### 1234", "stop") == score("Answer: Paris.", "Paris", "stop") == 1.0
    assert score("3", QUESTION["answer"], "length") == score("3, no, 4", "3", "stop") == 0.0
    assert score("", "Paris", "stop") == score("none", "3", "stop") == 0.0
    assert score("9" * 400, "3", "stop") == score(f"1/{'9' * 5000}", "3", "stop") == 0.0
    assert score("BANANA", "A", "stop") == score("C++", "C", "stop") == score("5/6", "6", "stop") == 0.0
    assert score("It is **(A)**.", "A", "stop") == score("10/12, or 5/6", "5/6", "stop") == 1.0
