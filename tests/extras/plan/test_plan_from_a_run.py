"""`tailrace plan --from`: a run beside the candidates for its devices."""

import json
from pathlib import Path
from typing import Any

import pytest
from simulated_run import SERIAL, run_config, write_run

from tailrace.cli import main

LOGS = Path(__file__).with_name("fixtures")
CLUSTER = {
    "run.group_size": 4,
    "schedule.groups_per_step": 4,
    "sim.cluster.device": "H100",
    "sim.cluster.devices": 4,
    "sim.cluster.model": "Qwen3-1.7B",
    "sim.cluster.memory_share": 0.3,
    "plan.steps": 16,
    "plan.max_lag": 1,
    "plan.max_length_bias": 1.0,
}
PRICES = {"prices.engine_hour": 2.0, "prices.trainer_hour": 1.0}


def planned(
    log: Path, folder: Path, capsys: pytest.CaptureFixture[str], *given: str, **changed: Any
) -> tuple[str, Any]:
    """What `tailrace plan --from LOG` prints and writes."""
    settings = CLUSTER | {name.replace("__", "."): value for name, value in changed.items()}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    numbers = folder / "plan.json"
    assert main(["plan", *given, "--from", str(log), "--json", str(numbers), *words]) == 0
    return capsys.readouterr().out, json.loads(numbers.read_text())


def test_a_log_is_set_beside_its_bound_its_own_schedule_and_the_fastest_candidate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step takes 20.68 s, of which 1 s is in no part. Four H100 for 2 dollars an hour cost 2.73 dollars in
    62.5 of the others, which are 1,000 samples."""
    out, found = planned(LOGS / "verl", tmp_path, capsys, **PRICES)
    best = found["ranking"][0]
    assert best["gain"] == pytest.approx(19.68 / best["step_s"], rel=1e-4)
    assert best["gain"] > 1.2 and best["lag_max"] <= 1
    assert "- the run: a step takes 20.7 s: generation 66%" in out and "it waits most for generation" in out
    (said,) = [line for line in out.splitlines() if line.startswith("- serial on its devices is predicted")]
    assert abs(float(said.rpartition(", ")[2].rstrip("%"))) <= 10
    least_s = 19.68 / float(out.partition("- it takes ")[2].partition("x the least bound")[0])
    assert least_s <= best["step_s"] * 1.01
    fast = f"{best['step_s']:.3g} s a step: {best['gain']:.2f}x as fast, at a lag of at most"
    assert f"{fast} {best['lag_max']:.0f}; " in out
    cost = f"1,000 samples cost {best['cost_per_1000_samples']:,.4f} in place of 2.7333 USD"
    assert cost in out


def test_an_asynchronous_log_is_planned_on_other_divisions_than_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, found = planned(LOGS / "prime-rl", tmp_path, capsys, sim__cluster__rollout_devices=2)
    assert "waiting for samples 58%" in out and "serial on its devices" not in out
    assert len({each["rollout_devices"] for each in found["ranking"]}) > 1
    assert all(each["gain"] > 0 for each in found["ranking"])


def test_the_costs_of_a_run_of_tailrace_take_the_place_of_the_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config.toml, in which every default is written out, is the config."""
    small = SERIAL | {"groups_per_round": 4, "groups_per_step": 2}
    run = write_run(tmp_path / "run", run_config(small))
    out, found = planned(run, tmp_path, capsys)
    assert "- the run: a step takes " in out and "waiting for samples" in out
    assert all(each["gain"] > 0 for each in found["ranking"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "CLUSTER = None: there is no config; name one with [sim.cluster], or a run: --from RUN"),
        (["--from", str(LOGS / "verl")], "run.group_size"),
        (["--from", str(LOGS / "verl"), "--run.group_size", "4"], "schedule.groups_per_step = None"),
        (
            ["--from", str(LOGS / "verl"), "--run.group_size", "4", "--schedule.groups_per_step", "8"],
            "schedule.groups_per_step = 8: a step of",
        ),
        (
            ["--from", str(LOGS / "verl"), "--run.group_size", "4", "--schedule.groups_per_step", "4"],
            "sim.cluster = None: the planner needs the section; add [sim.cluster] with the device, the",
        ),
        (
            ["--from", "none", "--run.group_size", "4", "--schedule.groups_per_step", "4"],
            "RUN = 'none': there is no such file or folder",
        ),
    ],
)
def test_what_is_missing_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err
