"""The command line: words in, an exit code out."""

import io
import json
import re
import shutil
import subprocess
import sys
from copy import copy
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

import tailrace
from tailrace.cli import main
from tailrace.config import load_config
from tailrace.drivers.assembly.check import check_live
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.commands import dry_run
from tailrace.drivers.commands.evaluate import evaluated_config, gain_over
from tailrace.drivers.kinds import torch as local_trainer
from tailrace.errors import CheckpointError, ConfigError
from tailrace.record.metrics import read_rows


def test_a_dry_run_prints_the_resolved_config_and_starts_no_run(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_path.parent / "out"
    assert main(["train", str(config_path), "--output-dir", str(folder), "--dry-run"]) == 0
    assert 'name = "rolloutpipe"' in capsys.readouterr().out
    assert not folder.exists()


def test_a_dry_run_shows_rows_prompt_memory_settings_and_steps_in_few_lines(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{n} + {n} =\n" * 40, "answer": f"{2 * n}"} for n in range(10, 58)]
    (config_path.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["train", str(config_path), "--output-dir", "out", "--dry-run", "--run.rounds", "6"]
    said: dict[int, list[str]] = {}
    for width in (40, 80):
        console = Console(file=io.StringIO(), width=width)
        monkeypatch.setattr(dry_run, "open_console", partial(copy, console))
        assert main([*words, "--weights.transport", "filesystem"]) == 0
        said[width] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert max(map(len, said[width])) <= width
    assert len(said[80]) <= 40
    text = [" ".join("".join(f" {line[10:].strip()}" for line in lines).split()) for lines in said.values()]
    assert text[0].replace(" ", "") == text[1].replace(" ", "")
    assert said[80][0] == "rows      45 to train on, 3 held out"
    first = re.search(r"(\d\d) \+ \1 =", text[1])
    assert first and f" {2 * int(first[1])} trainer " in text[1]
    assert " [...] " in text[1] and " tokens, the first that is drawn) " in text[1]
    assert "host memory, at most: " in text[1] and " checkpoints take " in text[1]
    settings = text[1].partition("prints every one ")[2]
    assert settings.startswith("[run] rounds = 6, group_size = ") and "[weights] transport = " in settings
    assert "[trainer] learning_rate = 0.0001 [weights]" in settings
    assert re.fullmatch(r"verdict   ready.*: 6 rounds = 12 steps of 4 samples", said[80][-1])


def test_a_terminal_without_a_letter_shows_its_number(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", few)
    words = ["train", str(config_path), "--output-dir", "out", "--dry-run", "--record.project", "é"]
    assert main(words) == 0
    few.flush()
    assert b'project = "\\xe9"' in few.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run.rund", "3"], "run.rund = 3: there is no such key; did you mean 'rounds'?"),
        (["--run.rounds", "0"], "run.rounds = 0: it must be at least 1; raise it"),
        (
            ["--schedule.groups_per_step", "3"],
            "schedule.groups_per_step = 3: groups_per_round = 4 is not divisible by it; choose from 1, 2, 4",
        ),
        (
            ["--schedule.name", "serie"],
            "schedule.name = 'serie': there is no such schedule; choose from serial",
        ),
        (["--model.path", "/nowhere"], "model.path = '/nowhere'"),
        (["--reward.function", "nowhere:f"], "reward.function = 'nowhere:f': it cannot be imported"),
        (["--engine.device", "tpu"], "engine.device = 'tpu': "),
        (["--trainer.device", "cuda:99"], "trainer.device = 'cuda:99': "),
        (
            ["--sampling.max_completion_tokens", "100000"],
            "sampling.max_completion_tokens = 100000: the model's context is",
        ),
    ],
)
def test_a_wrong_setting_ends_with_code_2_and_names_key_value_and_remedy(
    config_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["train", str(config_path), "--output-dir", str(config_path.parent / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (config_path.parent / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian run.toml", 'Unknown command "trian". Did you mean "train"?'),
        ("train run.toml", "--output-dir requires an argument"),
        ("train run.toml --output-dir out --resum", "Unknown option: --resum. Did you mean --resume?"),
        ("train run.toml --output-dir out --run.rounds", "--run.rounds = None: it has no value"),
        ("view run --port 1 --output page.html", "Mutually exclusive arguments"),
        ("view run --port a", 'unable to convert "a" into int'),
        ("fit run --run.rounds 3", "--run.rounds = '3': fit has no config to override"),
        ("view", "parameter RUNS requires an argument"),
    ],
)
def test_arguments_that_cannot_be_understood_end_with_code_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "compare", "simulate", "eval"])
def test_every_command_refuses_a_key_that_the_schedule_lacks(
    command: str, config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--output-dir", str(config_path.parent / "out")] if command == "train" else []
    assert main([command, str(config_path), *folder, "--schedule.groups_per_raund", "4"]) == 2
    assert "schedule.groups_per_raund = 4: " in capsys.readouterr().err


def test_a_missing_config_file_is_named_with_those_beside_it(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = config_path.with_name("rum.toml")
    assert main(["simulate", str(missing)]) == 2
    message = f"tailrace: CONFIG = '{missing}': there is no such file; choose from {config_path}\n"
    assert capsys.readouterr().err == message


def test_a_directory_is_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path)]) == 2
    assert f"CONFIG = '{tmp_path}': it cannot be read (" in capsys.readouterr().err


def test_the_package_runs_as_a_module_and_tells_its_version() -> None:
    words = [sys.executable, "-m", "tailrace.cli", "--version"]
    assert subprocess.run(words, capture_output=True, text=True).stdout == f"{tailrace.__version__}\n"


@pytest.mark.parametrize("command", ["compare", "eval", "diagnose", "simulate"])
def test_an_answer_that_cannot_be_written_ends_a_command_before_it_works(
    command: str, config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(config_path), "--json", str(tmp_path)]) == 2
    assert f"--json = '{tmp_path}': it is a folder" in capsys.readouterr().err
    if command != "simulate":  # which makes the folder
        assert main([command, str(config_path), "--json", str(tmp_path / "none" / "a.json")]) == 2
        assert f"there is no folder {tmp_path / 'none'}; choose a file in" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "inspect"])
def test_a_directory_without_a_run_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 2
    remedy = "name the output directory of a run"
    assert f"RUN = '{tmp_path}': there is no run in it; {remedy}" in capsys.readouterr().err


def test_simulate_needs_no_model_and_writes_events_and_summary(tmp_path: Path) -> None:
    path = tmp_path / "sim.toml"
    schedule = '[schedule]\nname = "rolloutpipe"\ngroups_per_round = 8\ngroups_per_step = 2\n'
    path.write_text(f"[run]\nrounds = 2\ngroup_size = 8\n{schedule}")
    words = ["simulate", str(path), "--output-dir", str(tmp_path / "out"), "--json", str(tmp_path / "s.json")]
    assert main(words) == 0
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["groups"]["trained"] == 16
    assert summary["steps"] == 8
    first = (tmp_path / "out" / "events.jsonl").read_bytes()
    assert main(words) == 0
    assert (tmp_path / "out" / "events.jsonl").read_bytes() == first


def test_compare_races_two_schedules_from_the_same_weights(config_path: Path, tmp_path: Path) -> None:
    result = tmp_path / "race.json"
    words = ["compare", str(config_path), "--repeats", "1", "--json", str(result), "--run.rounds", "1"]
    assert main([*words, "--output-dir", str(tmp_path / "race")]) == 0
    numbers = json.loads(result.read_text())
    serial, pipelined = numbers["schedules"]["serial"], numbers["schedules"]["rolloutpipe"]
    assert serial.keys() >= {
        "main_time_s", "waiting_ratio", "first_dispatch_s", "trainer_compute_s", "reward"
    }  # fmt: skip
    assert serial["reward"] == pytest.approx(pipelined["reward"], abs=1e-9)
    assert numbers["bound_s"] > 0
    assert (tmp_path / "race" / "rolloutpipe" / "events.jsonl").exists()


def test_eval_takes_the_newest_checkpoint_of_a_run_and_starts_no_reference(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "eval.json"
    monkeypatch.setattr(local_trainer, "ReferenceWorker", None)
    assert main(["eval", str(trained), "--json", str(result), "--algorithm.kl_coef", "0.1"]) == 0
    numbers = json.loads(result.read_text())
    checkpoint = RunFolder(trained).newest_checkpoint()
    assert (numbers["num_samples"], numbers["model"], numbers["greedy"]) == (4, str(checkpoint), True)
    assert 0.0 <= numbers["reward"] <= 12.0
    weights, reward, solved, *shown = capsys.readouterr().out.splitlines()
    assert weights == f"weights   {checkpoint}"
    assert reward.startswith(f"reward    {numbers['reward']:.4f} over 4 held-out prompts, greedy, ")
    low, high = numbers["interval"]
    assert low <= numbers["reward"] <= high and f"95% interval {low:.3f} to {high:.3f}; " in reward
    assert solved == f"solved    {numbers['solved']:.1%} of 4 samples have a reward of at least 1"
    assert [line.startswith("Sample | Reward ") for line in shown] == [True] * 3


def test_eval_says_what_a_run_has_gained_over_its_base_and_takes_a_number_of_prompts(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base model against itself gains nothing, prompt by prompt."""
    result, config = tmp_path / "eval.json", load_config(trained / "config.toml")
    assert config.model
    words = ["--base", "--model", str(config.model.path), "--prompts", "3", "--samples", "2"]
    assert main(["eval", str(trained), "--json", str(result), *words]) == 0
    numbers, out = json.loads(result.read_text()), capsys.readouterr().out.splitlines()
    assert (numbers["num_samples"], numbers["greedy"]) == (6, False)
    assert numbers["base"] == numbers["reward"]
    gain = f"gain      +0.000 ±0.000 over the base model ({numbers['base']:.4f})"
    assert out[3] == f"{gain}: so many prompts show no difference"
    assert "all/pass@2" in numbers["sets"]
    assert sum(" | Base " in line for line in out) == 3


def test_eval_counts_each_row_once_however_many_prompts_are_asked_for(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data have four held-out rows. One prompt alone has no interval."""
    results = []
    for asked in ("4", "192", "1"):
        result = tmp_path / f"{asked}.json"
        assert main(["eval", str(trained), "--prompts", asked, "--json", str(result)]) == 0
        results.append(json.loads(result.read_text()))
    assert results[1] == results[0] and results[0]["num_samples"] == 4
    assert (results[2]["num_samples"], results[2]["interval"]) == (1, None)
    out, err = capsys.readouterr()
    rewards = [line for line in out.splitlines() if line.startswith("reward ")]
    assert "over 4 held-out prompts" in rewards[1]
    assert "over 1 held-out prompts, greedy, one prompt: no interval; " in rewards[2]
    assert err.count("run.eval_prompts = 192: ") == 1 and err.count("the data have 4 held-out rows") == 1


def test_a_gain_is_taken_prompt_by_prompt() -> None:
    """Each prompt gains 0.5 or 0.6: as sure as two means that far apart among other prompts are not."""
    base, sure, unsure = [0.0, 10.0, 20.0, 30.0], [0.5, 10.6, 20.5, 30.6], [0.5, 9.5, 20.5, 29.5]
    *gains, alone = (
        gain_over([[reward] for reward in base[:n]], [[reward] for reward in tuned[:n]])
        for tuned, n in ((sure, 4), (unsure, 4), (sure, 1))
    )
    assert gains[0] == "+0.550 ±0.092 over the base model (15.0000)"
    assert gains[1].endswith("so many prompts show no difference")
    assert alone == "+0.500 over the base model (0.0000): one prompt: no interval"


def test_a_checkpoint_is_evaluated_by_its_name(trained: Path) -> None:
    def weights(name: str) -> str:
        config = evaluated_config(trained, None, {}, name)
        assert config.model
        return config.model.path.name

    rows = read_rows(trained / "metrics.jsonl")
    accuracy = {int(row["round"]): row["eval/reward"] for row in rows if "eval/reward" in row}
    best = max(accuracy, key=lambda round: accuracy[round])
    assert weights("best") == f"round_{best:06d}"
    assert (weights("newest"), weights("round_000000")) == ("round_000001", "round_000000")
    with pytest.raises(ConfigError, match="choose from newest, round_000000, round_000001"):
        weights("round_000009")


def test_the_weights_of_an_evaluation_are_those_that_were_asked_for(config_path: Path, trained: Path) -> None:
    def weights(path: Path, model: Path | None = None) -> Path:
        config = evaluated_config(path, model, {})
        assert config.model
        return config.model.path

    quickstart = load_config(config_path).model
    assert quickstart and weights(config_path) == quickstart.path
    assert weights(config_path, trained / "model") == trained / "model"
    assert weights(trained, quickstart.path) == quickstart.path


def test_one_bit_in_the_weights_of_an_exported_model_is_refused_and_its_small_files_may_be_edited(
    trained: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(trained / "model", model)
    (model / "generation_config.json").write_text("{}")
    check_live(evaluated_config(trained, model, {}))
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 4
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: its checksum differs"):
        check_live(evaluated_config(trained, model, {}))


def test_a_run_without_a_checkpoint_cannot_be_evaluated(config_path: Path) -> None:
    folder = RunFolder(config_path.parent / "out")
    folder.path.mkdir()
    folder.config.write_text(load_config(config_path).toml())
    with pytest.raises(ConfigError, match="the run has no checkpoint yet; name weights with --model"):
        evaluated_config(folder.path, None, {})
