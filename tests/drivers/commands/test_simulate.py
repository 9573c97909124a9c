"""`tailrace simulate`: files, figures and the set-up that is taken from the run's config."""

import json
from pathlib import Path

import pytest

from tailrace.cli import main
from tailrace.config import RunConfig
from tailrace.drivers.assembly.simulation import sim_settings
from tailrace.record.timeline import RunTimelines
from tailrace.schedules import SCHEDULES

EXAMPLES = Path(__file__).parents[3] / "examples"
RUN = {"run": {"rounds": 2, "group_size": 4}, "schedule": {"name": "serial"}}


def test_replicas_slots_and_length_limit_are_taken_from_the_run() -> None:
    engine = {"replicas": 3}
    config = RunConfig.model_validate(RUN | {"engine": engine, "sampling": {"max_completion_tokens": 4096}})
    sim = sim_settings(config)
    assert (sim.engines.count, sim.engines.slots) == (3, config.engine.max_num_seqs)
    assert (sim.lengths.max_tokens, sim.lengths.median_tokens) == (4096, 1230 / 4)


def test_a_value_in_the_sim_section_wins() -> None:
    sections = {"engine": {"replicas": 3}, "sampling": {"max_completion_tokens": 4096}}
    sim = {"engines": {"count": 5, "slots": 7}, "lengths": {"max_tokens": 100}}
    filled = sim_settings(RunConfig.model_validate(RUN | sections | {"sim": sim}))
    assert (filled.engines.count, filled.engines.slots) == (5, 7)
    assert (filled.lengths.max_tokens, filled.lengths.median_tokens) == (100, 1230)


def test_without_sampling_the_limit_is_the_simulator_s_own() -> None:
    filled = sim_settings(RunConfig.model_validate(RUN))
    assert (filled.engines.count, filled.lengths.max_tokens) == (1, 16_384)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_cluster_runs_every_schedule(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One round, with an eighth of the engines and of the samples: a round of the file takes seconds."""
    words = [
        "simulate",
        str(EXAMPLES / "cluster.toml"),
        "--schedule.name",
        name,
        "--output-dir",
        str(tmp_path),
    ]
    small = ["--run.rounds", "1", "--run.group_size", "2", "--sim.engines.count", "8"]
    assert main([*words, *small]) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "reward" in row]
    assert steps == list(range(1, len(steps) + 1)) and steps
    timelines = RunTimelines(tmp_path / "events.jsonl")
    timelines.update()
    (timeline,) = timelines.all
    assert timeline.is_closed and len(timeline.steps) == len(steps) and timeline.requests
    assert json.loads((tmp_path / "summary.json").read_text())["groups"]["trained"] >= 32
    out = capsys.readouterr().out
    for figure in ("staleness, max (publications)", "lag, mean (optimizer steps)", "carried tokens"):
        assert figure in out
    for figure in ("carried samples", "length, mean", "length, max", "truncated samples", "samples/s"):
        assert figure in out


def test_a_simulation_has_the_trackers_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'tailrace[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ["simulate", str(EXAMPLES / "rolloutpipe.toml"), "--output-dir", str(tmp_path)]
    assert main([*words, "--record.trackers", '["tensorboard"]']) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {key for row in rows for key in row} - {"step", "wall_time"}
    steps = [(row["step"], row["wall_time"]) for row in rows if "reward" in row]
    # The wall time of a simulation is its virtual time.
    assert [(each.step, each.wall_time) for each in found.Scalars("reward")] == steps


def test_a_simulation_does_not_replace_a_live_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lock").touch()
    words = ["simulate", str(EXAMPLES / "rolloutpipe.toml"), "--output-dir", str(tmp_path)]
    assert main(words) == 2
    assert "it holds a run of tailrace train; choose another" in capsys.readouterr().err


CLUSTER = ["--sim.cluster.device", "H100", "--sim.cluster.devices", "2", "--sim.cluster.model", "Qwen3-1.7B"]


@pytest.mark.parametrize(
    ("costs", "is_noted"),
    [
        ([], True),
        (["--sim.engines.base_s", "0.02"], False),
        ([*CLUSTER, "--placement.kind", "colocated"], False),
    ],
)
def test_costs_that_belong_to_no_model_and_no_machine_are_said_to_be_defaults(
    costs: list[str], is_noted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        "[run]\nrounds = 1\ngroup_size = 2\n"
        "[schedule]\nname = 'serial'\ngroups_per_round = 2\ngroups_per_step = 2\n"
    )
    assert main(["simulate", str(config), *costs]) == 0
    assert ("the costs of engines and trainer are defaults" in capsys.readouterr().out) == is_noted
