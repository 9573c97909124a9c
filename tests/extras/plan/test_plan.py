"""`tailrace plan`: the table, the config that it writes, and what it refuses."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, Signals

import pytest

from tailrace.cli import main
from tailrace.config import config_of, load_config
from tailrace.controller.base import RunSettings
from tailrace.drivers.assembly.simulation import simulate
from tailrace.errors import ConfigError
from tailrace.extras.plan.command import present_setting, problem_of, with_lengths
from tailrace.extras.plan.plan import METERED, measure
from tailrace.schedules import SCHEDULES
from tailrace.sim.settings import EmpiricalSettings, SimLengthSettings, SimSettings, TableSettings

EXAMPLE = Path(__file__).parents[3] / "examples" / "cluster_plan.toml"
SMALL = {
    "run.group_size": "2",
    "run.rounds": "2",
    "schedule.groups_per_round": "2",
    "schedule.groups_per_step": "2",
    "sim.cluster.devices": "2",
    "sim.cluster.model": "Qwen3-1.7B",
    "plan.steps": "16",
    "plan.max_lag": "1",
    "plan.top": "3",
}


def words(overrides: dict[str, str]) -> list[str]:
    return [word for key, value in overrides.items() for word in (f"--{key}", value)]


def test_the_written_config_runs_in_virtual_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned, numbers = tmp_path / "planned.toml", tmp_path / "plan.json"
    arguments = ["plan", str(EXAMPLE), "--output", str(planned), "--json", str(numbers)]
    assert main([*arguments, *words(SMALL)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(numbers.read_text())
    best = found["ranking"][0]
    assert "0 measured" in err
    assert f"Fastest within the limits: {best['schedule']}" in out.splitlines()[-2]
    assert "times as fast as serial (in turn), the present setting, at a mean lag of" in out
    assert found["present"]["times"] == 1.0 and best["times"] >= 1.0
    assert found["present"]["step_s"] == pytest.approx(best["times"] * best["step_s"])
    assert "- assumed shares of the peaks: memory bandwidth in decoding 70%" in out
    assert best["schedule"] in out
    assert "of 2 devices, a step needs at least" in " ".join(out.split())
    too_old = "train tokens that are older than plan.max_lag = 1 steps"
    assert f"- {found['excluded'][too_old]} of {found['candidates']} candidates {too_old}" in out
    config = load_config(planned)
    assert config.schedule["name"] == best["schedule"]
    assert config.placement.kind == best["placement"]
    assert config.sim.cluster and config.engine.num_engines == (
        (config.sim.cluster.rollout_devices or 2) // best["tensor_parallel"]
    )
    assert main(["simulate", str(planned)]) == 0


@pytest.mark.parametrize("sent", [SIGINT, SIGTERM, SIGHUP])
def test_a_signal_ends_the_search_with_the_best_plan_so_far(sent: Signals, tmp_path: Path) -> None:
    planned, command = tmp_path / "planned.toml", ["env", "--default-signal=HUP"]  # of nohup
    command += [sys.executable, "-m", "tailrace.cli", "plan", str(EXAMPLE)]
    command += ["--output", str(planned), "--whole", *words(SMALL | {"sim.cluster.devices": "8"})]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env={**os.environ, "FORCE_COLOR": ""}) as process:
        assert process.stderr
        while "best so far" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(sent)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + sent
    assert out.splitlines()[-1].startswith("Not finished; fastest so far: ")
    assert err.splitlines()[-1] == f"tailrace: {sent.name}: the plan is not finished; no file was written"
    assert not any(each in err for each in ("Traceback", "Stuck", "exception", "Warning"))
    assert not planned.exists()


def test_a_present_setting_that_cannot_run_on_the_devices_is_left_out_with_the_reason() -> None:
    """Its engines never stop generating, and the cluster divides its devices only if it says so."""
    schedule = {"name": "tailrace", "groups_per_step": 4, "groups_in_flight": 8, "staleness": 1}
    tree = {"run": {"rounds": 1, "group_size": 2}, "schedule": schedule}
    cluster = {"devices": 2, "model": "Qwen3-1.7B"}
    in_turn = config_of({**tree, "sim": {"cluster": cluster}})
    found, (why,) = present_setting(in_turn, problem_of(in_turn))
    assert found is None and "tailrace, cannot run colocated, as [sim.cluster] has it: " in why
    divided = {"sim": {"cluster": cluster | {"rollout_devices": 1}}, "placement": {"kind": "colocated"}}
    config = config_of(tree | divided)
    assert present_setting(config, problem_of(config))[0], "devices of the cluster, not of the placement"


def test_the_lengths_of_a_run_and_their_correlation_replace_those_of_the_file(tmp_path: Path) -> None:
    """Both responses to a prompt are equally long, so their correlation is 1."""
    samples = tmp_path / "samples"
    samples.mkdir()
    lines = [{"id": f"{n // 2}.0/{n % 2}", "num_tokens": 100 + 100 * (n // 4), "step": 1} for n in range(8)]
    (samples / "round_000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = with_lengths(load_config(EXAMPLE), str(tmp_path))
    assert config.sim.lengths.distribution == EmpiricalSettings(path=samples)
    assert config.sim.lengths.correlation == pytest.approx(1.0)
    distribution = problem_of(config).sim.lengths.distribution
    assert distribution == TableSettings(tokens=(100, 200), shares=(4, 4))


def test_unknown_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is neither 'model' nor the output directory of a run"):
        with_lengths(load_config(EXAMPLE), str(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"sim.trainer.tokens_per_s": "1000"}, "it would be the same for every division of the devices"),
        ({"schedule.groups_per_step": "0"}, "all candidates train so many groups in an optimizer step"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        problem_of(load_config(EXAMPLE, overrides))


def test_a_config_without_a_cluster_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[run]\nrounds = 1\ngroup_size = 2\n[schedule]\nname = "serial"\n')
    assert main(["plan", str(path)]) == 2
    assert "sim.cluster = None: the planner needs the section" in capsys.readouterr().err
    assert main(["plan", str(EXAMPLE), "--output", str(tmp_path / "none" / "F.toml")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["plan", str(EXAMPLE), "--output", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err


def test_transfers_to_each_engine_weigh_on_a_division_into_many_engines() -> None:
    loads: list[list[tuple[int | None, float]]] = []
    for groups in ("one", "each"):
        weights = f"{{ transport = 'process_group', groups = '{groups}' }}"
        changes = SMALL | {"sim.cluster.devices": "4", "weights": weights}
        sims, _ = problem_of(load_config(EXAMPLE, changes)).candidates()
        apart = [sim.engines for candidate, sim in sims.items() if candidate.kind == "disaggregated"]
        loads.append([(engines.count, engines.load_s) for engines in apart])
    one, each = loads
    assert {count for count, _ in one} == {1, 2, 3}
    assert each == [(count, pytest.approx((count or 0) * load_s)) for count, load_s in one]


def test_a_measured_schedule_has_the_bias_that_the_meter_has_after_its_last_step() -> None:
    """April parks the long responses, so they are trained later; serial has no bias."""
    sim = SimSettings(lengths=SimLengthSettings(median_tokens=300, sigma=1.0, max_tokens=4096))
    run = RunSettings(rounds=8, group_size=2)
    april = partial(SCHEDULES["april"], groups_per_round=2, groups_launched=4)
    found, last = measure(april, sim, run), simulate(april, sim, run).steps[-1]
    assert {name: found[name] for name in METERED} == {name: last[name] for name in METERED}
    assert found["bias/delay"] > 0.2
    serial = measure(partial(SCHEDULES["serial"], groups_per_round=2, groups_per_step=2), sim, run)
    assert (serial["bias/length"], serial["bias/delay"]) == (0.0, 0.0)
