"""One run, read by the terminal, the page, `inspect`, metrics.jsonl, summary.json and a tracker."""

import json
import re
from pathlib import Path

import pytest

from helpers.small_run import train_here, write_small_run
from tailrace.cli import main
from tailrace.extras.view.run import RunView
from tailrace.record.metrics import read_rows

pytest.importorskip("tensorboard", reason="no tracker: pip install 'tailrace[tensorboard]'")


def test_a_figure_is_the_same_number_under_the_same_name_wherever_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward is a number of digits. Two make a solved sample."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, run = write_small_run(tmp_path), tmp_path / "out"
    words = ["--record.trackers", '["tensorboard"]', "--run.eval_solved_at", "2"]
    assert train_here(config, *words) == 0
    out = capsys.readouterr().out
    *_, last = [row for row in read_rows(run / "metrics.jsonl") if "loss" in row]
    *_, held_out = [row for row in read_rows(run / "metrics.jsonl") if "eval/reward" in row]
    assert 0 < held_out["eval/solved"] < 1 and held_out["eval/reward"] != held_out["eval/solved"]

    tracked = EventAccumulator(str(run / "tensorboard")).Reload()
    for row, *names in ((last, "reward", "round/reward", "loss"), (held_out, "eval/reward", "eval/solved")):
        for name in names:
            assert tracked.Scalars(name)[-1].value == pytest.approx(row[name])
    assert tracked.Scalars("eval/accuracy") == tracked.Scalars("eval/reward"), "for one release"

    *_, line = re.findall(r"^Step .*", out, re.MULTILINE)
    assert f"Reward {last['reward']:.4f} " in line
    said = f"Held-out reward {held_out['eval/reward']:.4f} | Solved {held_out['eval/solved']:.1%}"
    assert said in re.findall(r"^Evaluation .*", out, re.MULTILINE)[-1]
    assert f"-> {last['round/reward']:.3f} " in re.findall(r"^reward  .*", out, re.MULTILINE)[0]
    ends = re.findall(r"^held-out reward .*", out, re.MULTILINE)[0]
    assert (
        f"-> {held_out['eval/reward']:.3f}, solved " in ends and f"-> {held_out['eval/solved']:.1%}" in ends
    )

    summary = json.loads((run / "summary.json").read_text())
    assert summary["reward"]["last"] == last["round/reward"]
    assert summary["eval"]["last"] == held_out["eval/reward"]
    assert summary["solved"]["last"] == held_out["eval/solved"]

    view = RunView(run, "out")
    page, totals = view.figures(), view.record()["totals"]
    assert page["y"]["reward"][0][-1] == pytest.approx(last["reward"], rel=1e-4)
    assert view.figure("round/reward")[0][-1] == pytest.approx(last["round/reward"], rel=1e-4)
    assert page["evaluations"][-1]["reward"] == held_out["eval/reward"]
    assert page["evaluations"][-1]["solved"] == held_out["eval/solved"]

    assert main(["inspect", str(run), "--json"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    trained = sum(row.get("tokens/trained", 0) for row in read_rows(run / "metrics.jsonl"))
    assert inspected["tokens"]["trained"] == totals["tokens"]["trained"] == trained
    assert inspected["tokens"]["trained"] == summary["tokens"]["trained"]
    assert inspected["prompts"]["trained"] == totals["groups"]["trained"] == summary["groups"]["trained"]
