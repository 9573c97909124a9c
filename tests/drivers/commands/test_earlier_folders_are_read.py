"""Folders of earlier releases, read by the page, `inspect` and `compare`: figures have their names of now.

`train-VERSION` and `simulate-VERSION` were written by the source of that version: the quickstart's model, two
rounds of four groups of four samples, eight held-out samples after each. Their weights, checkpoints and logs
were left out. 0.1.0 is its last commit; `early` is one of three days before, whose config has other keys and
which wrote no log of events.
"""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.extras.view.run import RunView

EARLIER = Path(__file__).parent / "earlier_folders"
RELEASED, EARLY = ("train-0.1.0", "train-0.2.0"), "train-0.1.0-early"
EVALUATION = (
    '{"step":1,"round":1,"time":699.2,"wall_time":1795897580.4,"eval/accuracy":0.25,"eval/mean_tokens":9.0,'
    '"eval/num_samples":4}\n'
)
"""The row that the release wrote of an evaluation; the run had none."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpacked = tmp_path_factory.mktemp("earlier")
    for name in ("train", "sft", "simulate", *RELEASED, EARLY, "simulate-0.2.0"):
        with tarfile.open(EARLIER / f"{name}.tar.gz") as archive:
            archive.extractall(unpacked, filter="data")
    with (unpacked / "train" / "metrics.jsonl").open("a") as metrics:
        metrics.write(EVALUATION)
    shutil.copytree(unpacked / "train", unpacked / "again")
    return unpacked


def written(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_shows_its_held_out_accuracy_as_the_held_out_reward(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folders / "train"
    held_out = [row["eval/accuracy"] for row in written(run) if "eval/accuracy" in row]
    view = RunView(run, "train")
    page = view.figures()
    assert held_out == [0.25] and [each["reward"] for each in page["evaluations"]] == held_out
    assert (page["simulated"], page["about"]["version"], page["defects"]) == (False, "", [])
    compared = {each["key"]: each["value"] for each in view.record()["summary"]}
    assert compared["held_out"] == held_out[-1]
    assert main(["inspect", str(run), "--json"]) == 0
    tokens = sum(row.get("tokens/trained", 0) for row in written(run))
    assert json.loads(capsys.readouterr().out)["tokens"]["trained"] == tokens > 0
    assert main(["compare", str(run), str(folders / "again")]) == 0
    assert "have the same held-out reward: 0.250" in capsys.readouterr().out


def test_a_fine_tuning_is_finished_and_its_losses_are_drawn(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folders / "sft"
    page, record = RunView(run, "sft").figures(), RunView(run, "sft").record()
    losses = [row["eval/loss"] for row in written(run) if "eval/loss" in row]
    assert losses and [each["loss"] for each in page["evaluations"]] == losses
    assert page["y"]["loss"][0] == pytest.approx(
        [row["loss"] for row in written(run) if "loss" in row], rel=1e-4
    )
    assert page["defects"] == record["defects"] == [] and page["about"]["command"] == "sft"
    assert page["state"]["kind"] == record["state"]["kind"] == "finished"
    assert main(["inspect", str(run)]) == 2
    said = "tailrace sft wrote it, without a balance of prompts and tokens; name a run of tailrace train"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", [*RELEASED, EARLY])
def test_the_page_draws_the_held_out_accuracy_of_a_release_as_the_held_out_reward(
    folders: Path, name: str
) -> None:
    rows = written(folders / name)
    view = RunView(folders / name, name)
    page, record = view.figures(), view.record()
    assert [(each["step"], each["reward"], each["n"]) for each in page["evaluations"]] == [
        (row["step"], row["eval/accuracy"], row["eval/num_samples"]) for row in rows if "eval/accuracy" in row
    ]
    assert [each["reward"] for each in page["evaluations"]] == [0.0, 0.0625, 0.0625]
    steps = [row["reward"] for row in rows if "reward" in row]
    assert page["y"]["reward"][0] == pytest.approx(steps) and len(steps) == 4
    assert {each["key"]: each["value"] for each in record["summary"]}["held_out"] == 0.0625
    assert (page["simulated"], page["about"]["command"], page["defects"]) == (False, "train", [])
    assert (record["state"]["kind"], len(view.samples("trained")["samples"])) == ("finished", 32)
    settings = {key: value for key, value, differs in page["about"]["config"] if differs}
    lacks_log = [each["file"] for each in record["defects"]]
    if name == EARLY:
        assert settings == {} and lacks_log == ["events.jsonl"]
    else:
        assert settings["run.rounds"] == 2 and lacks_log == []


@pytest.mark.parametrize("name", RELEASED)
def test_the_balance_of_a_release_is_that_of_its_samples_and_engines(
    folders: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(folders / name), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    trained = sum(row.get("tokens/trained", 0) for row in written(folders / name))
    assert found["tokens"]["trained"] == trained == 384
    assert found["tokens"]["generated"] == 548 == trained + found["tokens"]["evaluated"]
    assert found["prompts"] == {"drawn": 8, "trained": 8, "filtered": 0, "dropped": 0, "living": 0}
    assert [each["name"] for each in found["checkpoints"]] == ["round_000000", "round_000002"]


def test_runs_of_two_releases_are_compared(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *(str(folders / name) for name in RELEASED)]) == 0
    out = capsys.readouterr().out
    assert "train-0.1.0 and train-0.2.0 have the same held-out reward: 0.062" in out
    assert "reward, last round          │ 0.125       │ 0.125" in out


def test_a_config_of_other_keys_is_named_and_figures_are_compared_without_it(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    early, writer = folders / EARLY, "(another version of tailrace wrote it): run.patience_s = 300.0"
    assert main(["compare", str(early), str(folders / "train-0.2.0")]) == 0
    printed = capsys.readouterr()
    assert "held-out reward │ 0.062 │ 0.062" in " ".join(printed.out.split())
    assert f"settings are not compared: {early / 'config.toml'} {writer}" in printed.err
    assert main(["inspect", str(early)]) == 2
    err = capsys.readouterr().err
    assert f"{early / 'config.toml'} {writer}" in err and "run.step_warning_timeout_s" in err


@pytest.mark.parametrize("name", ["simulate", "simulate-0.2.0"])
def test_a_simulation_has_no_reward(folders: Path, name: str) -> None:
    page = RunView(folders / name, name).figures()
    assert page["simulated"] and page["evaluations"] == []
    assert [name for name in page["names"] if "reward" in name and not name.startswith("bias/")] == []
    assert RunFolder(folders / name).command == "simulate"
