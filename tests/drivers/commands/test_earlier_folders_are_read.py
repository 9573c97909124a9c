"""Folders of earlier releases, read by the page, `inspect` and `compare`: figures have their names of now."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.extras.view.run import RunView

EARLIER = Path(__file__).parent / "earlier_folders"
EVALUATION = (
    '{"step":1,"round":1,"time":699.2,"wall_time":1795897580.4,"eval/accuracy":0.25,"eval/mean_tokens":9.0,'
    '"eval/num_samples":4}\n'
)
"""The row that the release wrote of an evaluation; the run had none."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpacked = tmp_path_factory.mktemp("earlier")
    for kind in ("train", "sft", "simulate"):
        with tarfile.open(EARLIER / f"{kind}.tar.gz") as archive:
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


def test_a_simulation_has_no_reward(folders: Path) -> None:
    page = RunView(folders / "simulate", "simulate").figures()
    assert page["simulated"] and page["evaluations"] == []
    assert [name for name in page["names"] if "reward" in name and not name.startswith("bias/")] == []
    assert RunFolder(folders / "simulate").command == "simulate"
